"""What the models give eagerly, and what is near enough to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from tests.e2e.networks import blend, letters, table
from tests.models import classifier


def eager_logits(*texts: str) -> list[list[float]]:
    with torch.inference_mode():
        return classifier()(letters(texts))["logits"].tolist()


def eager_rows(rows: np.ndarray) -> list[list[float]]:
    with torch.inference_mode():
        return table()(torch.as_tensor(rows, dtype=torch.float32)).tolist()


def eager_image(original: np.ndarray, compared: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return blend()(torch.tensor(original), torch.tensor(compared)).numpy()


def near(rows: Any) -> Any:
    """Equal to these rows of numbers, or to one row of them."""
    if isinstance(rows[0], list):
        return [near(row) for row in rows]
    return pytest.approx(rows, rel=1e-5, abs=1e-5)


def near_image(pixels: np.ndarray, expected: np.ndarray) -> bool:
    """The same size, and each value at most one apart: it was rounded."""
    return pixels.shape == expected.shape and int(np.abs(pixels.astype(int) - expected).max()) <= 1


def pixels_of(image: Path | PIL.Image.Image) -> np.ndarray:
    return np.array(PIL.Image.open(image) if isinstance(image, Path) else image)
