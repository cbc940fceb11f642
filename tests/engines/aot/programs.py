"""Small programs to compile."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import ExportedProgram

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Weights that share memory, a constant, and buffers of every kind."""

    shift: torch.Tensor
    expanded: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(70, 64)
        self.head = nn.Linear(64, 70, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.LayerNorm(64)
        self.register_buffer("shift", torch.arange(64.0), persistent=False)
        self.register_buffer("expanded", torch.rand(8)[::2].expand(3, 4))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.embedding(ids) * self.scale + self.shift)
        return {"logits": self.head(hidden) + torch.tensor([1.0, 2.0] * 35), "sum": self.expanded.sum()}


IDS = torch.arange(40).reshape(4, 10)


def exported(model: nn.Module, *inputs: torch.Tensor) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(model.eval(), inputs, strict=False)


def small() -> ExportedProgram:
    return exported(nn.Linear(4, 4), torch.rand(2, 4))
