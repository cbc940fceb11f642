"""What all tests share: the order, one compiler cache for the run, and the example service, booted once."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import Server

COLD_BOOT = 900.0  # seconds until a cold boot counts as failed; a busy machine takes minutes
CHECKOUT = Path(__file__).resolve().parents[1]

os.environ["BENTOML_DO_NOT_TRACK"] = "True"
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    # Before torch is imported, which reads it. A cache left by an earlier run would hide that a boot is not cold.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ.pop("TORCHINDUCTOR_CACHE_DIR"), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The example service of this checkout, served by `bentoml serve`, compiled, with real weights."""
    with Server(CHECKOUT, tmp_path_factory.mktemp("example")).start(wait=False) as server:
        server.wait_ready(COLD_BOOT)
        yield server
