"""The models of this folder's services, and how each is compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tests.models import WORDS

LENGTH = 8  # of a text, in letters
COLUMNS = 4  # of a table

# Compiled ahead of time; an input that does not run compiled is refused.
AHEAD = {"engine": "aot", "keep_eager_if_slower": False, "on_unprepared": "reject", "fullgraph": "require"}
# Through Dynamo with its gate and guards, without Inductor.
CAPTURED = {**AHEAD, "engine": "jit", "backend": "eager"}


class Blend(nn.Module):
    """Two images, uint8[height, width, 3], to one; it matters which is which."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(6, 3, kernel_size=1)

    def forward(self, original: torch.Tensor, compared: torch.Tensor) -> torch.Tensor:
        both = torch.cat([original, compared], dim=2).permute(2, 0, 1).unsqueeze(0).float() / 255
        return (torch.sigmoid(self.mix(both))[0].permute(1, 2, 0) * 255).round().to(torch.uint8)


def blend() -> Blend:
    torch.manual_seed(2)
    return Blend().eval()


def table() -> nn.Module:
    """Rows of four numbers to rows of three."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(COLUMNS, 3), nn.Tanh()).eval()


def letters(texts: Sequence[str]) -> torch.Tensor:
    """Texts as the classifier takes them: int64[texts, LENGTH], cut off or filled up."""
    rows = [[ord(letter) % WORDS for letter in text[:LENGTH].ljust(LENGTH)] for text in texts]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), LENGTH)


def blank() -> torch.Tensor:
    return torch.zeros(8, 8, 3, dtype=torch.uint8)
