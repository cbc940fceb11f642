"""What all tests share: the order, one compiler cache for the run, and the example service, booted once."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bentoml_compile.artifacts.patience import Patience
from tests.servers import Server

COLD_BOOT = 900.0  # seconds until a cold boot counts as failed; a busy machine takes minutes
EXAMPLE = ("tests/test_example_service.py", "tests/test_bento.py")  # the files that use the example service
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist loadfile`, but those that use `example` in one process: each process would compile it again."""
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return EXAMPLE[0] if file in EXAMPLE else file

    return Together(config, log)


@pytest.fixture(autouse=True)
def _nothing_is_given_up() -> None:
    """A remote that was too slow in one test is asked in the next."""
    Patience.forget_all()


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The example service of this checkout, served by `bentoml serve`, compiled, with real weights."""
    with Server(CHECKOUT, tmp_path_factory.mktemp("example")).start(wait=False) as server:
        server.wait_ready(COLD_BOOT)
        yield server
