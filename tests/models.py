"""Small models that show one behaviour each."""

from __future__ import annotations

import torch
from torch import nn

WORDS = 11


class Classifier(nn.Module):
    """Token ids to logits: an embedding that is indexed directly, and something to fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, 3)
        self.scale = 2.0

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embedding(ids)
        if mask is not None:
            hidden = hidden * mask.unsqueeze(-1)
        return {"logits": torch.tanh(self.head(hidden.mean(1))) * self.scale}


class Counting(Classifier):
    """Keeps a state: every call changes a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.calls += 1
        return super().forward(ids, mask)


class Broken(nn.Module):
    """Two graph breaks, and a branch that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        torch._dynamo.graph_break()
        x = torch.relu(x)
        if x.sum() > 1000:
            return torch.sin(x)
        return torch.cos(x)


def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier().eval()


def ids(batch: int = 2, length: int = 5) -> torch.Tensor:
    return torch.arange(batch * length).reshape(batch, length) % WORDS
