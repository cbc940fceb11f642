from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bentoml_compile.artifacts.hashing import hash_sources, unseen
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


def imported(name: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of that text, imported from the folder until it has been yielded."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module(name)
    sys.modules.pop(name)


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
    return sources


def test_files_of_called_functions_and_the_constants_that_they_name_are_sources(helper: ModuleType) -> None:
    constants = {f"global {name}" for name in ("helper:FACTOR", "helper:TABLE", "helper:plus", "settings:SCALE")}
    assert sources_of(helper).keys() == constants | {"module helper", "module settings"}


def test_a_file_that_is_no_module_s_is_known_by_its_path(helper: ModuleType, tmp_path: Path) -> None:
    del sys.modules["helper"]
    assert {str(tmp_path / "helper.py"), "module settings"} <= sources_of(helper).keys()


def test_a_module_is_found_where_it_lies_now(
    helper: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: known for name, known in sources_of(helper).items() if name.startswith("module ")}
    (tmp_path / "elsewhere" / "package").mkdir(parents=True)
    for name in ("helper", "settings"):
        (tmp_path / f"{name}.py").rename(tmp_path / "elsewhere" / f"{name}.py")
        del sys.modules[name]
    (tmp_path / "elsewhere" / "package" / "inner.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    assert hash_sources(before) == before  # and nothing was imported for it
    assert not {"helper", "settings"} & sys.modules.keys()
    inner = hash_sources(["module package.inner", "module package.gone", "module gone.inner"])
    assert [value == "missing" for value in inner.values()] == [True, True, False]  # by name: gone, package.gone, inner
    (tmp_path / "helper.py").write_text("other = 1")
    monkeypatch.syspath_prepend(str(tmp_path))  # after it, since Python remembers for a moment what a folder has
    assert hash_sources(before)["module helper"] != before["module helper"]


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


def test_a_function_is_known_by_its_closure_too(helper: Any) -> None:
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
    assert {s for s in before if now[s] != before[s]} == {"module helper", "global settings:SCALE"}


def test_a_module_that_is_not_imported_yet_is_imported_for_its_globals(helper: ModuleType) -> None:
    before = sources_of(helper)
    del sys.modules["settings"]
    assert hash_sources(before) == before


OBJECTS = """
import dataclasses, enum, functools, os, types

@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float = 2.0

class Inner:
    scale = 2.0

class Settings:
    limit = 2.0
    def __init__(self):
        self.scale, self.inner, self.untouched = 2.0, Inner(), 2.0

class Mode(enum.Enum):
    FAST = 2.0

settings, slotted, space = Settings(), Slotted(), types.SimpleNamespace(scale=2.0)
twice = functools.partial(pow, 2.0)

def through(settings):
    return settings.scale

def scaled(x):
    import lazy
    with open(os.environ["DATA"]) as file:
        x = x * float(file.read())
    x = x * settings.inner.scale * getattr(settings, "limit") * slotted.scale * space.scale * twice(1) * Mode.FAST.value
    return x * through(settings) * Inner.scale * lazy.FACTOR * float(os.getenv("SCALE", "2"))
"""


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "objects.py").write_text(OBJECTS)
    (tmp_path / "lazy.py").write_text("FACTOR = 2.0")
    (tmp_path / "data.txt").write_text("2.0")
    monkeypatch.setenv("DATA", str(tmp_path / "data.txt"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("objects")
    for name in ("objects", "lazy"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("global objects:settings.scale", "objects.settings.scale = 3.0"),
        ("global objects:settings.limit", "objects.Settings.limit = 3.0"),
        ("global objects:settings.inner.scale", "objects.settings.inner.scale = 3.0"),
        ("global objects:Inner.scale", "objects.Inner.scale = 3.0"),
        ("global objects:slotted.scale", "objects.slotted.scale = 3.0"),
        ("global objects:space.scale", "objects.space.scale = 3.0"),
        ("global objects:twice", "objects.twice = functools.partial(pow, 3.0)"),
        ("global lazy:FACTOR", "sys.modules['lazy'].FACTOR = 3.0"),
        ("environment SCALE", "os.environ['SCALE'] = '3'"),
        ("environment DATA", "os.environ['DATA'] = 'elsewhere'"),
        ("data.txt", "path.write_text('3.0')"),
    ],
)
def test_whatever_a_function_reads_is_a_source(
    objects: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, change: str
) -> None:
    monkeypatch.setenv("SCALE", "2")
    path = tmp_path / "data.txt"
    with watched_sources() as before:
        objects.scaled(1.0)
    assert hash_sources(before) == before
    exec(change, {"objects": objects, "functools": functools, "sys": sys, "os": os, "path": path})
    now = hash_sources(before)
    changed = {name for name in before if now[name] != before[name]}
    assert (str(path) if source == "data.txt" else source) in changed
    assert not any(name.endswith("untouched") for name in before)


def test_a_file_is_known_as_it_was_when_it_ran(objects: ModuleType, tmp_path: Path) -> None:
    with watched_sources() as before:
        objects.scaled(1.0)
    (tmp_path / "objects.py").write_text(OBJECTS.replace("2.0", "3.0"))
    assert hash_sources(before)["module objects"] != before["module objects"]


def test_torch_and_the_standard_library_are_no_sources() -> None:
    with watched_sources() as sources:
        classifier()(ids())
    assert "module tests.models" in sources
    modules = {source.removeprefix("module ") for source in sources if source.startswith("module ")}
    assert not {name.partition(".")[0] for name in modules} & {"torch", *sys.stdlib_module_names}
    assert not [source for source in sources if source.startswith("/")]


def test_a_profiler_that_was_there_is_there_again() -> None:
    def profile(*_: object) -> None: ...

    sys.setprofile(profile)
    try:
        with watched_sources():
            assert sys.getprofile() is not profile
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)


HELD = """
import collections, contextvars, functools, operator, re, threading
import numpy as np

class Conf:
    def __init__(self, scale):
        self.scale = scale

class Act:
    scale = 2.0
    def __call__(self, x):
        return x * self.scale

def outer(scale):
    return lambda x: x * scale

def logged(f):
    @functools.wraps(f)
    def inner(x):
        return f(x)
    return inner

@functools.lru_cache
def cached():
    return 2.0

@functools.lru_cache
def memo(x):
    return 2.0

@functools.lru_cache
def not_called():
    return 2.0

ARRAY = np.array([2.0])
REG, PAIR = {"a.b": Conf(2.0), 1: [Conf(2.0)]}, (Conf(2.0), Conf(2.0))
DEFAULTS = collections.defaultdict(lambda: None, a=Conf(2.0))
SELF = {"scale": 2.0}
SELF["self"] = SELF
ACT, OBJECT, PICK, VAR = logged(outer(2.0)), logged(Act()), operator.itemgetter(0), contextvars.ContextVar("VAR")
WORD, COUNT, LOCK, LOCAL = re.compile("a"), operator.itemgetter(Conf(2.0)), threading.Lock(), threading.local()
LARGE, SET, QUEUE = [2.0] * 2000, {Conf(2.0)}, collections.deque([2.0])
VAR.set(2.0)
cached()

def array(x): return x * float(ARRAY[0])
def registry(x): return x * REG["a.b"].scale
def nested(x): return x * REG[1][0].scale
def pair(x): return x * PAIR[1].scale
def default(x): return x * DEFAULTS["a"].scale
def loop(x): return x * SELF["scale"]
def decorated(x): return ACT(x)
def decorating(x): return OBJECT(x)
def picking(x): return PICK((x, 2 * x))
def variable(x): return x * VAR.get()
def word(x): return x if WORD.match("a") else 2 * x
def settings(x): return x * cached()
def memoized(x): return x * memo(x)
def unused(x): return x if x else not_called()
def local(x): return x if LOCK else LOCAL
def large(x): return x * LARGE[-1]
def unordered(x): return x if SET else 2 * x
def queue(x): return x * QUEUE[0]
"""


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from imported("held", HELD, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("array", "held.ARRAY[0] = 3"),
        ("registry", "held.REG['a.b'].scale = 3.0"),
        ("nested", "held.REG[1][0].scale = 3.0"),
        ("nested", "held.REG[1].append(2)"),
        ("pair", "held.PAIR[1].scale = 3.0"),
        ("default", "held.DEFAULTS['a'].scale = 3.0"),
        ("loop", "held.SELF['scale'] = 3.0"),
        ("decorated", "held.ACT = held.logged(held.outer(3.0))"),
        ("decorating", "held.Act.scale = 3.0"),
        ("picking", "held.PICK = held.operator.itemgetter(1)"),
        ("variable", "held.VAR.set(3.0)"),
        ("queue", "held.QUEUE[0] = 3.0"),
        ("word", "held.WORD = held.re.compile('b')"),
    ],
)
def test_what_a_global_holds_is_compared_by_value(held: ModuleType, name: str, change: str) -> None:
    with watched_sources() as before:
        getattr(held, name)(1.0)
    assert unseen(before) == []
    assert hash_sources(before) == before
    exec(change, {"held": held})
    assert hash_sources(before) != before


@pytest.mark.parametrize(
    ("name", "doubts"),
    [
        ("settings", ["held:cached"]),
        ("memoized", []),
        ("unused", []),
        ("local", ["held:LOCAL"]),
        ("large", ["held:LARGE"]),
        ("unordered", ["held:SET"]),
    ],
)
def test_what_an_earlier_call_has_left_and_what_c_code_hides_is_a_doubt(
    held: ModuleType, name: str, doubts: list[str]
) -> None:
    with watched_sources() as sources:
        getattr(held, name)(1.0)
    assert unseen(sources) == doubts


def test_a_library_s_registry_counts_only_by_what_the_code_names(
    held: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bentoml_compile.engines.sources._PACKAGES", (str(tmp_path),))
    with watched_sources() as sources:
        held.default(1.0), held.nested(1.0)
    assert "global held:DEFAULTS.['a'].scale" in sources
    assert not any("held:REG" in source for source in sources)


ODD = """
import dataclasses, functools

@dataclasses.dataclass(slots=True)
class Output:
    logits: float

class Proxy:
    __class__ = property(lambda self: 1 / 0)
    def get(self):
        return 2.0

class Raising(type):
    def __getattribute__(self, name):
        raise RuntimeError(name)

class Broken(metaclass=Raising):
    pass

TABLE = {"scale": 2.0}
TABLE["self"] = TABLE
DEEP = functools.reduce(lambda inner, _: [inner], range(5000), 2.0)
current, half, broken = Proxy(), functools.partial(pow, 2.0), Broken

def slotted(x):
    return Output(x).logits

def partial(x):
    return half(1) * len(half.args) * len(functools.partial(pow, 2).args) * x

def looped(x):
    return TABLE["scale"] * x

def deep(x):
    return len(DEEP) * x

def proxied(x):
    return type(current).get(current) * x

def unreadable(x):
    broken
    return x

def raising(x):
    broken
    raise ValueError("the model's own")
"""


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from imported("odd", ODD, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["slotted", "partial", "looped", "deep", "proxied", "unreadable"])
def test_whatever_a_global_is_the_model_runs(odd: ModuleType, name: str) -> None:
    with watched_sources() as sources:
        getattr(odd, name)(1.0)
    assert "module odd" in sources
    assert hash_sources(sources) == sources
    assert unseen(sources) == (["odd:broken"] if name == "unreadable" else [])


def test_the_model_s_own_exception_is_told(odd: ModuleType) -> None:
    with pytest.raises(ValueError, match="the model's own"), watched_sources() as sources:
        odd.raising(1.0)
    assert unseen(sources) == ["odd:broken"]


def test_a_failure_in_collecting_is_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bentoml_compile.engines.sources._sources_of", lambda seen: 1 / 0)
    with watched_sources() as sources:
        classifier()(ids())
    assert unseen(sources) == ["the model's code (ZeroDivisionError)"]


FINALIZED = 0


class Garbage:
    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        global FINALIZED
        FINALIZED += 1


def test_what_a_finalizer_of_others_garbage_reads_is_not_the_models() -> None:
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    try:
        with watched_sources() as sources:
            Garbage()
            made = [[number] for number in range(100)]
            finalized = FINALIZED
        assert (len(made), finalized) == (100, 0)
    finally:
        gc.set_threshold(*before)
        gc.collect()
    assert not [source for source in sources if "FINALIZED" in source]
    assert FINALIZED == 1
