from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bentoml_compile.artifacts.hashing import hash_sources
from bentoml_compile.engines.sources import watched_sources
from tests.models import classifier, ids

HELPER = """
import settings
FACTOR, NAME, TABLE, unused = 2.0, "x", {"a": (1, [2.5, None])}, 7

def adder(n):
    return lambda x: x + n

plus = adder(3)

def scaled(x):
    def inner():
        return x * FACTOR * settings.SCALE * TABLE["a"][0] + plus(x)
    return inner()
"""


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "settings.py").write_text("SCALE, OTHER = 3, 4\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("helper")
    for name in ("helper", "settings"):
        sys.modules.pop(name, None)


def sources_of(helper: ModuleType) -> dict[str, str]:
    with watched_sources() as sources:
        helper.scaled(torch.ones(2))
    return hash_sources(sources)


def test_files_of_called_functions_and_the_constants_that_they_name_are_sources(helper: ModuleType) -> None:
    names = {source for source in sources_of(helper) if not source.startswith("/")}
    assert names == {f"global {name}" for name in ("helper:FACTOR", "helper:TABLE", "helper:plus", "settings:SCALE")}
    files = {Path(source).name for source in sources_of(helper) if source.startswith("/")}
    assert files == {"helper.py", "settings.py"}


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("helper", "FACTOR", 2.5),
        ("helper", "TABLE", {"a": (1, [2.5, 0])}),
        ("settings", "SCALE", 3.0),
        ("helper", "plus", lambda x: x + 3),
    ],
)
def test_another_value_of_a_global_is_another_source(helper: ModuleType, module: str, name: str, value: object) -> None:
    before = sources_of(helper)
    setattr(sys.modules[module], name, value)
    now = hash_sources(before)
    assert {source for source in before if now[source] != before[source]} == {f"global {module}:{name}"}


def test_a_function_is_known_by_its_closure_too(helper: ModuleType) -> None:
    before = sources_of(helper)
    helper.plus = helper.adder(3)
    assert hash_sources(before) == before
    helper.plus = helper.adder(4)
    assert hash_sources(before) != before


def test_an_edited_file_and_a_global_that_is_gone_are_told(helper: ModuleType, tmp_path: Path) -> None:
    before = sources_of(helper)
    (tmp_path / "helper.py").write_text(HELPER.replace("2.0", "2.5"))
    del sys.modules["settings"].SCALE
    now = hash_sources(before)
    assert now["global settings:SCALE"] == "missing"
    assert {Path(s).name for s in before if now[s] != before[s]} == {"helper.py", "global settings:SCALE"}


def test_a_module_that_is_not_imported_yet_is_known_by_its_file(helper: ModuleType) -> None:
    before = sources_of(helper)
    del sys.modules["settings"]
    assert before.keys() - hash_sources(before).keys() == {"global settings:SCALE"}


def test_torch_and_the_standard_library_are_no_sources() -> None:
    with watched_sources() as sources:
        classifier()(ids())
    files = [source for source in sources if not source.startswith("global ")]
    assert "models.py" in {Path(file).name for file in files}
    assert not [file for file in files if Path(torch.__file__).parent in Path(file).parents]
    assert not [file for file in files if Path(threading.__file__).parent == Path(file).parent]


def test_a_profiler_that_was_there_is_there_again() -> None:
    def profile(*_: object) -> None: ...

    sys.setprofile(profile)
    try:
        with watched_sources():
            assert sys.getprofile() is not profile
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
