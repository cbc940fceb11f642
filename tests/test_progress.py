"""The lines that say what a boot is doing. Each compile here waits until the line that is asked for has been said."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.backends import registry

from bentoml_compile import progress
from bentoml_compile.compiled_model import CompiledModel
from bentoml_compile.engines.phases import phase, recorded_phases
from bentoml_compile.errors import ConfigError, GraphBreakError
from bentoml_compile.listener import Listeners, Timeline
from bentoml_compile.model import compile_model
from bentoml_compile.progress import Place, Progress
from tests.models import Broken, Classifier, classifier, ids
from tests.waiting import wait_for

PATIENCE = 120.0  # seconds until something that should happen counts as failed
NAME = "tiny"
FAST = {"backend": "eager", "keep_eager_if_slower": False}


def wait_until(condition: Callable[[], bool]) -> None:
    wait_for(condition, PATIENCE)


@pytest.fixture(autouse=True)
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """What progress.py has logged; it has something to say all the time, and in the next test nothing of this one."""
    monkeypatch.setattr(progress, "SAY_EVERY", 0.05)
    caplog.set_level(logging.INFO, logger="bentoml_compile")
    yield lambda: [record.getMessage() for record in caplog.records if record.module == "progress"]
    wait_until(lambda: not speakers())


Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


@pytest.fixture
def use() -> Iterator[Callable[[Backend], str]]:
    """Gives a torch.compile backend a name."""
    names: list[str] = []

    def register(backend: Backend) -> str:
        names.append(f"progress_{len(names)}")
        torch._dynamo.register_backend(name=names[-1], compiler_fn=backend)
        return names[-1]

    yield register
    for name in names:
        registry._BACKENDS.pop(name)
        registry._COMPILER_FNS.pop(name)


def boot(model: torch.nn.Module | None = None, examples: Any = None, store: Path | None = None, **config: Any) -> None:
    compiled: CompiledModel = compile_model(
        classifier() if model is None else model,
        example_inputs=examples or [{"ids": ids(2, 5)}],
        name=NAME,
        config={**FAST, **config},
        default_store=store,
    )
    compiled.close()


def speakers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"torch_compile-{NAME}-progress"]


Said = Callable[[], list[str]]
Use = Callable[[Backend], str]


def test_it_says_which_shape_and_which_phase_is_running_and_for_how_long(said: Said, use: Use) -> None:
    wanted = iter(
        [
            "model 'tiny': ids: int64[2, 5] (1 of 2): backend for ",
            "model 'tiny': ids: int64[3, 7] (2 of 2): backend for ",
        ]
    )

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        line = next(wanted)
        wait_until(lambda: any(one.startswith(line) and one.endswith(" s in all") for one in said()))
        return graph.forward

    boot(examples=[{"ids": ids(2, 5)}, {"ids": ids(3, 7)}], backend=use(backend), dynamic=False)
    assert next(wanted, None) is None


def test_it_says_that_a_result_is_verified_and_measured(said: Said, use: Use) -> None:
    wanted = iter(["(1 of 1): verify for ", "(1 of 1): measure for "])
    calls = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls in (2, 4):  # one call to warm up, two to verify
                line = next(wanted)
                wait_until(lambda: any(line in one for one in said()))
            return graph.forward(*args)

        return run

    boot(backend=use(backend), keep_eager_if_slower=True)
    assert next(wanted, None) is None


def test_it_says_so_in_the_background_too(said: Said, use: Use) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        wait_until(lambda: any("(1 of 1): backend for " in one for one in said()))
        done.set()
        return graph.forward

    done = threading.Event()
    compiled = compile_model(
        classifier(),
        example_inputs=[{"ids": ids(2, 5)}],
        name=NAME,
        config={**FAST, "backend": use(backend), "startup": "background"},
    )
    assert done.wait(PATIENCE)
    wait_until(lambda: compiled.is_ready and not speakers())
    compiled.close()


class SlowToExport(Classifier):
    """Waits while it is exported, and then cannot be."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if torch.compiler.is_exporting():
            self._wait()
            raise RuntimeError("not to be exported")
        return super().forward(ids, mask)


def test_it_says_which_shape_is_exported(said: Said) -> None:
    model = SlowToExport(lambda: wait_until(lambda: any("ids: int64[2, 5] (1 of 2): export for" in s for s in said())))
    with pytest.raises(ConfigError, match="not to be exported"):
        boot(model.eval(), [{"ids": ids(2, 5)}, {"ids": ids(3, 7)}], engine="aot", backend="inductor")


@pytest.mark.soak
def test_it_says_how_far_the_compiler_is_with_each_of_the_shapes(said: Said) -> None:
    boot(examples=[{"ids": ids(2, 5)}, {"ids": ids(3, 7)}], engine="aot", backend="inductor")
    for shape in ("ids: int64[2, 5] (1 of 2)", "ids: int64[3, 7] (2 of 2)"):
        assert any(f"{shape}: cpp_compile for " in line for line in said())


def test_a_boot_that_is_over_before_that_says_nothing(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SAY_EVERY", 10 * PATIENCE)
    boot()
    assert said() == []


def failing(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    raise RuntimeError("no such luck")


def hanging(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize("backend", [failing, hanging])
def test_the_thread_ends_with_a_boot_that_ends_in_eager(use: Use, backend: Backend) -> None:
    boot(backend=use(backend), time_limit=1)
    wait_until(lambda: not speakers())


def test_the_thread_ends_with_a_boot_that_stops() -> None:
    with pytest.raises(GraphBreakError):
        boot(Broken().eval(), [{"x": torch.rand(2, 4)}], fullgraph="require")
    wait_until(lambda: not speakers())


def progress_of(timeline: Timeline, place: Callable[[], Place | None] = lambda: None) -> Progress:
    return Progress(NAME, timeline, place)


def test_the_thread_ends_where_nothing_could_tell_it_to() -> None:
    """SIGTERM may come between any two lines; here it has come before the thread was told."""
    timeline = Timeline(Listeners())
    with timeline.stage("startup"):
        threading.Thread(target=progress_of(timeline)._say, args=(threading.Event(),), name="untold").start()
        assert any(thread.name == "untold" for thread in threading.enumerate())
    wait_until(lambda: not any(thread.name == "untold" for thread in threading.enumerate()))


def test_it_does_not_repeat_what_a_wait_for_another_worker_says(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(Listeners())
    progress = progress_of(timeline)
    assert progress.line() == ""
    with timeline.stage("startup"), timeline.stage("wait"):
        assert progress.line() == ""
    other = Timeline(Listeners())
    with other.stage("startup") as startup, other.stage("store"):
        clock = SimpleNamespace(time_ns=lambda: startup.started_ns + 3 * 10**9)
        monkeypatch.setattr("bentoml_compile.progress.time", clock)
        assert progress_of(other).line() == "model 'tiny': store for 3 s, 3 s in all"


def test_the_compilers_process_is_named_and_phases_end_with_what_they_are_in() -> None:
    timeline = Timeline(Listeners())
    progress = progress_of(timeline, lambda: Place("x: float32[2]", 1, 3))
    with timeline.stage("startup"), timeline.stage("compile"), progress.said():
        with recorded_phases(), phase("export"):
            with phase("compiler_process"):
                assert "x: float32[2] (1 of 3): compiler_process for " in progress.line()
            assert "(1 of 3): export for " in progress.line()
            with pytest.raises(KeyError), phase("inductor"):
                raise KeyError
            assert "(1 of 3): export for " in progress.line()
        assert "(1 of 3): compile for " in progress.line()


def test_what_cannot_be_told_does_not_end_the_lines(said: Said) -> None:
    raised: list[bool] = []

    def place() -> Place | None:
        if len(said()) == 1 and not raised:
            raised.append(True)
            raise RuntimeError("changed while it was read")
        return None

    timeline = Timeline(Listeners())
    with timeline.stage("startup"), timeline.stage("compile"), progress_of(timeline, place).said():
        wait_until(lambda: len(said()) >= 3)
    assert raised
