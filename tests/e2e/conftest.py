"""What all tests of this folder share: one store of artifacts, two images, and patience."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """BENTOML_CONFIG_OVERRIDES for services or runners by name: one store, so that each model is compiled once."""
    store = {"torch_compile": {"artifacts": {"store": str(tmp_path_factory.mktemp("store"))}}}

    def overrides(**services: dict[str, Any]) -> str:
        return json.dumps({"services": {name: {**store, **section} for name, section in services.items()}})

    return overrides


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of the size that the model was prepared for."""
    paths = [tmp_path_factory.mktemp("images") / name for name in ("original.png", "compared.png")]
    for seed, path in enumerate(paths):
        pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(path)
    return paths
