"""What is compiled while a model serves: a boot in the background, learned shapes, calls that wait for a compile."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

from bentoml_compile import late
from bentoml_compile.background import Background, background
from bentoml_compile.compiled_model import CompiledModel
from bentoml_compile.engines.limits import ProcessEnds
from bentoml_compile.errors import UnpreparedInputError
from bentoml_compile.listener import Call, Listener, Stage
from bentoml_compile.model import compile_model
from tests.models import Broken, Counting, classifier, ids
from tests.waiting import wait_for

FAST = {"backend": "eager", "keep_eager_if_slower": False}
PREPARED = [{"ids": ids(2, 5)}]
PATIENCE = 300.0  # seconds until something that should happen counts as failed; a compile of C++ is among it


class Recorder(Listener):
    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.calls: list[Call] = []
        self.told: list[tuple[str, Any]] = []

    def tracing(self) -> bool:
        return True

    def stage_ended(self, stage: Stage) -> None:
        self.stages.append(stage)

    def called(self, call: Call) -> None:
        self.calls.append(call)

    def ready(self, report: Any) -> None:
        self.told.append(("ready", report))

    def fallback(self, model: str, reason: str) -> None:
        self.told.append(("fallback", reason))

    def unprepared(self, model: str, action: str) -> None:
        self.told.append(("unprepared", action))

    def startups(self) -> list[Stage]:
        return [stage for stage in self.stages if stage.name == "startup"]


Make = Callable[..., tuple[CompiledModel, Recorder]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[CompiledModel] = []

    def build(model: nn.Module | None = None, examples: Any = None, **config: Any) -> tuple[CompiledModel, Recorder]:
        recorder = Recorder()
        compiled = compile_model(
            classifier() if model is None else model,
            example_inputs=examples or PREPARED,
            config={**FAST, **config},
            listeners=[recorder],
            default_store=tmp_path / "store",
        )
        made.append(compiled)
        return compiled, recorder

    yield build
    for compiled in made:
        compiled.close()


def wait_until(condition: Callable[[], bool]) -> None:
    wait_for(condition, PATIENCE)


def wait_for_shape(compiled: CompiledModel, sizes: str) -> None:
    wait_until(lambda: any(sizes in shape.signature for shape in compiled.report.shapes))


# in the background


def backend(compile_graph: Callable[..., Any]) -> str:
    """The name of a new torch.compile backend."""
    name = f"late_{next(_numbers)}"
    torch._dynamo.register_backend(name=name, compiler_fn=compile_graph)
    return name


_numbers = itertools.count()


@pytest.fixture
def slow_backend() -> Iterator[tuple[str, threading.Event]]:
    """A torch.compile backend that waits until it may go on."""
    go_on = threading.Event()

    def waiting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        assert go_on.wait(PATIENCE)
        return graph.forward

    yield backend(waiting), go_on
    go_on.set()


def test_the_model_answers_eagerly_until_compiled_code_takes_over(
    make: Make, slow_backend: tuple[str, threading.Event]
) -> None:
    slow, go_on = slow_backend
    model = classifier()
    compiled, recorder = make(model, backend=slow, startup="background", on_unprepared="reject")
    assert not compiled.is_ready
    at_first = compiled.report
    assert at_first.outcome == "eager"
    assert "background" in at_first.fallback
    torch.testing.assert_close(compiled(ids=ids(2, 5)), model(ids(2, 5)))
    with pytest.raises(UnpreparedInputError, match=r"ids: int64\[2, 5\]"):
        compiled(ids=ids(3, 3))
    assert not recorder.startups()
    go_on.set()
    wait_until(lambda: compiled.is_ready)
    assert compiled.report.outcome == "compiled"
    torch.testing.assert_close(compiled(ids=ids(2, 5)), model(ids(2, 5)))
    assert [(call.engine, call.executable.label) for call in recorder.calls] == [
        ("eager", "ids: int64[2, 5]"),
        ("eager", "unprepared"),
        ("jit", "ids: int64[2, 5]"),
    ]
    [startup] = recorder.startups()
    assert startup.attributes["outcome"] == "compiled"
    assert startup.ended_ns is not None
    assert startup.ended_ns <= recorder.calls[-1].started_ns
    assert [told for told in recorder.told if told[0] == "unprepared"] == [("unprepared", "reject")]


def test_ready_when_eager_does_not_wait(make: Make, slow_backend: tuple[str, threading.Event]) -> None:
    slow, go_on = slow_backend
    compiled, _ = make(backend=slow, startup="background", ready_when="eager")
    assert compiled.is_ready
    go_on.set()
    wait_until(lambda: compiled.report.outcome == "compiled")


def test_a_stored_artifact_is_loaded(make: Make) -> None:
    """torch.compile's takes seconds, in the background; one made ahead of time would be there at once."""
    first, _ = make()
    first.close()
    second, _ = make(startup="background")
    wait_until(lambda: second.is_ready)
    assert second.report.outcome == "loaded"


def test_a_compile_that_the_end_of_its_process_calls_off_leaves_its_lease_to_another(
    make: Make, tmp_path: Path
) -> None:
    began, seen = threading.Event(), list[str]()

    def forever(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        began.set()
        while True:
            time.sleep(0.01)

    _, recorder = make(backend=backend(forever), startup="background")
    background.run(lambda: seen.append("queued"))
    assert began.wait(PATIENCE)
    background.end(PATIENCE)
    [startup] = recorder.startups()
    assert isinstance(startup.error, ProcessEnds)
    assert recorder.told == []
    assert len(list((tmp_path / "store").rglob("lease"))) == 1
    background.run(lambda: seen.append("after"))
    wait_until(lambda: bool(seen))
    assert seen == ["after"]


def test_a_job_that_was_taken_but_has_not_begun_as_the_process_ends_does_not_begin() -> None:
    taken, go_on = threading.Event(), threading.Event()
    seen: list[str] = []

    class Stopping(SimpleQueue[Any]):
        """Its reader is stopped with the first job in its hands."""

        def get(self, *args: Any, **kwargs: Any) -> Any:
            job = super().get(*args, **kwargs)
            taken.set()
            assert go_on.wait(PATIENCE)
            return job

    own = Background()
    own._jobs = Stopping()
    own.run(lambda: seen.append("before"))
    assert taken.wait(PATIENCE)
    own.end(PATIENCE)
    own.run(lambda: seen.append("after"))
    go_on.set()
    wait_until(lambda: "after" in seen)
    assert seen == ["after"]


def test_a_boot_that_fails_in_the_background_leaves_eager_serving(make: Make) -> None:
    def fails(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        raise RuntimeError("no such luck")

    compiled, recorder = make(backend=backend(fails), startup="background")
    wait_until(lambda: compiled.is_ready)
    assert compiled.report.outcome == "eager"
    assert ("fallback", "backend_error") in recorder.told
    assert compiled(ids=ids(2, 5))["logits"].shape == (2, 3)


def test_a_compiler_that_runs_out_of_memory_does_so_in_a_process_of_its_own(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starved = tmp_path / "starved"
    starved.mkdir()
    compiler = starved / "g++"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || ulimit -v 100000\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{starved}{os.pathsep}{os.environ['PATH']}")
    model = classifier()
    compiled, recorder = make(model, backend="inductor", engine="aot", startup="background")
    wait_until(lambda: compiled.is_ready)
    assert compiled.report.outcome == "eager"
    assert ("fallback", "out_of_memory") in recorder.told, compiled.report.fallback
    torch.testing.assert_close(compiled(ids=ids(2, 5)), model(ids(2, 5)))


def test_what_would_stop_a_boot_keeps_the_service_from_being_ready(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    compiled, recorder = make(
        Broken().eval(), [{"x": torch.rand(2, 4)}], startup="background", fullgraph="require", backend="eager"
    )
    wait_until(lambda: bool(recorder.startups()))
    wait_until(lambda: "will not be ready" in caplog.text)
    assert not compiled.is_ready
    assert "graph break" in caplog.text
    torch.testing.assert_close(compiled(x=torch.ones(2, 4)), compiled._target.model(torch.ones(2, 4)))


def test_a_boot_beside_requests_leaves_the_models_buffers_to_them(make: Make) -> None:
    """The trials run a copy; a model that changes its buffers cannot be traced beside its requests."""
    model = Counting().eval()
    compiled, recorder = make(model, startup="background")
    for _ in range(3):
        compiled(ids=ids(2, 5))
    wait_until(lambda: bool(recorder.startups()))
    assert model.calls.item() == 3
    assert compiled.report.outcome == "eager"
    assert "buffer" in compiled.report.fallback


def test_weights_that_are_replaced_during_the_boot_are_the_ones_that_serve(
    make: Make, slow_backend: tuple[str, threading.Event]
) -> None:
    slow, go_on = slow_backend
    model, other = classifier(), classifier()
    with torch.no_grad():
        other.head.weight.mul_(3)
    compiled, _ = make(model, backend=slow, startup="background")
    compiled.update_weights(other.state_dict())
    go_on.set()
    wait_until(lambda: compiled.is_ready)
    torch.testing.assert_close(compiled(ids=ids(2, 5)), other(ids(2, 5)))


def test_weights_and_buffers_that_change_during_the_boot_are_no_reason_to_refuse_it(
    make: Make, slow_backend: tuple[str, threading.Event]
) -> None:
    slow, go_on = slow_backend
    model = classifier()
    model.register_buffer("shift", torch.zeros(3))
    state = {name: value + 1 for name, value in model.state_dict().items()}
    compiled, _ = make(model, backend=slow, startup="background", verify={"strict": True})
    compiled.update_weights(state)
    go_on.set()
    wait_until(lambda: compiled.is_ready)
    assert compiled.report.engine == "jit", compiled.report.fallback
    torch.testing.assert_close(compiled(ids=ids(2, 5)), model(ids(2, 5)))


def test_a_model_that_is_closed_during_its_boot_stays_closed(
    make: Make, slow_backend: tuple[str, threading.Event]
) -> None:
    slow, go_on = slow_backend
    compiled, recorder = make(backend=slow, startup="background")
    compiled.close()
    go_on.set()
    wait_until(lambda: bool(recorder.startups()))
    with pytest.raises(RuntimeError, match="closed"):
        compiled(ids=ids(2, 5))


# learned shapes


def test_a_shape_that_is_seen_often_is_compiled_in_the_background(make: Make, tmp_path: Path) -> None:
    model = classifier()
    compiled, recorder = make(model, prepare_after=3)
    for _ in range(2):
        compiled(ids=ids(3, 3))
    assert len(compiled.report.shapes) == 1
    compiled(ids=ids(3, 3))
    wait_until(lambda: len(compiled.report.shapes) == 2)
    torch.testing.assert_close(compiled(ids=ids(3, 3)), model(ids(3, 3)))
    assert [(call.engine, call.executable.prepared) for call in recorder.calls] == [("eager", False)] * 3 + [
        ("jit", True)
    ]
    assert compiled.recompiles == 0
    late = [stage for stage in recorder.startups() if stage.attributes.get("late")]
    assert [stage.attributes["outcome"] for stage in late] == ["compiled"]
    learned = next(shape for shape in compiled._serving.shapes if shape.learned)
    assert not any(leaf.any() for leaf in learned.example.kwargs.values()), "a client's data is kept"


@pytest.mark.parametrize("kind", ["inference", "parameter", "expanded"])
def test_a_learned_shape_answers_the_call_that_it_was_learned_from(make: Make, kind: str) -> None:
    """An example is copied to ordinary, dense tensors, and the call is not one."""
    model = nn.Linear(8, 8)
    compiled, recorder = make(model, [(torch.ones(2, 8),)], prepare_after=1)
    with torch.inference_mode(kind == "inference"):
        x = torch.arange(8.0).expand(3, 8) if kind == "expanded" else torch.rand(3, 8)
    x = nn.Parameter(x) if kind == "parameter" else x
    compiled(x)
    wait_for_shape(compiled, "[3, 8]")
    with torch.inference_mode():
        expected = model(x)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), expected)
    assert [call.executable.prepared for call in recorder.calls] == [False, True, True]
    assert compiled._serving.shapes[-1].uses > 0


def test_what_an_earlier_worker_has_learned_is_loaded(make: Make) -> None:
    outcomes = []
    for _ in range(2):
        compiled, recorder = make(prepare_after=1)
        compiled(ids=ids(3, 3))
        wait_for_shape(compiled, "[3, 3]")
        assert len(compiled.report.shapes) == 2
        outcomes += [stage.attributes["outcome"] for stage in recorder.startups() if stage.attributes.get("late")]
        compiled.close()
    assert outcomes == ["compiled", "loaded"]


def test_the_least_used_learned_shape_makes_room(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[CompiledModel.__module__], "MOST_LEARNED", 2)
    compiled, _ = make(prepare_after=1)
    for length in (3, 4):
        compiled(ids=ids(2, length))
        wait_for_shape(compiled, f"[2, {length}]")
    for _ in range(5):
        compiled(ids=ids(2, 3))
    compiled(ids=ids(2, 6))
    wait_for_shape(compiled, "[2, 6]")
    assert [shape.signature for shape in compiled.report.shapes] == [
        "ids: int64[2, 5]",
        "ids: int64[2, 3]",
        "ids: int64[2, 6]",
    ]

    def is_back() -> bool:
        compiled(ids=ids(2, 4))  # counts once the one that was dropped is forgotten, in the background
        return any("[2, 4]" in shape.signature for shape in compiled.report.shapes)

    wait_until(is_back)


def test_a_shape_that_is_asked_for_again_as_soon_as_it_is_dropped_keeps_its_new_artifact(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[CompiledModel.__module__], "MOST_LEARNED", 1)
    compiled, _ = make(on_unprepared="compile")
    forget, asked_again = compiled._late.forget, threading.Event()

    def forget_and_ask(signature: Any) -> None:
        forget(signature)
        if not asked_again.is_set():
            compiled(ids=ids(2, 3))
            asked_again.set()

    monkeypatch.setattr(compiled._late, "forget", forget_and_ask)
    for length in (3, 4):
        compiled(ids=ids(2, length))
    over = threading.Event()
    assert asked_again.wait(PATIENCE)
    background.run(over.set)
    assert over.wait(PATIENCE)
    assert set(compiled._artifacts) == {"", "ids: int64[2, 3]"}


# a compile that the call waits for


def test_on_unprepared_compile_compiles_once_while_the_call_waits(make: Make) -> None:
    model = classifier()
    compiled, recorder = make(model, on_unprepared="compile")
    torch.testing.assert_close(compiled(ids=ids(3, 3)), model(ids(3, 3)))
    torch.testing.assert_close(compiled(ids=ids(3, 3)), model(ids(3, 3)))
    first, second = recorder.calls
    assert [call.executable.engine for call in recorder.calls] == ["jit", "jit"]
    assert [compile_.reason for compile_ in first.compiles] == ["shape was not prepared: ids: int64[3, 3]"]
    assert not second.compiles
    assert compiled.recompiles == 1
    assert ("unprepared", "compile") in recorder.told


class Uncopied(dict[str, Any]):
    def __copy__(self) -> Any:
        raise TypeError("only one of these")


class OfBatch(nn.Linear):
    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch["x"])


@pytest.mark.parametrize("config", [{"on_unprepared": "compile"}, {"prepare_after": 1}])
def test_a_call_that_cannot_be_copied_is_answered_eagerly(make: Make, config: dict[str, Any]) -> None:
    compiled, recorder = make(OfBatch(8, 8), [({"x": torch.ones(2, 8)},)], **config)
    for _ in range(2):
        assert compiled(Uncopied(x=torch.ones(3, 8))).shape == (3, 8)
    assert [call.executable.engine for call in recorder.calls] == ["eager", "eager"]


def test_weights_are_replaced_while_a_call_waits_for_its_compile(
    make: Make, slow_backend: tuple[str, threading.Event]
) -> None:
    slow, go_on = slow_backend
    go_on.set()
    model = classifier()
    compiled, recorder = make(model, backend=slow, on_unprepared="compile")
    go_on.clear()
    results: list[Any] = []
    call = threading.Thread(target=lambda: results.append(compiled(ids=ids(3, 3))), daemon=True)
    call.start()
    wait_until(lambda: ("unprepared", "compile") in recorder.told)
    state = {name: value * 2 for name, value in model.state_dict().items()}
    update = threading.Thread(target=lambda: compiled.update_weights(state), daemon=True)
    update.start()
    go_on.set()
    for thread in (call, update):
        thread.join(PATIENCE)
        assert not thread.is_alive()
    torch.testing.assert_close(compiled(ids=ids(3, 3)), model(ids(3, 3)))


def test_torch_compile_is_not_asked_for_late_shapes_without_end(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(late, "_jit_compiles", 0)
    monkeypatch.setattr(late, "_MOST_BY_JIT", 3)
    compiled, recorder = make(on_unprepared="compile")
    for length in range(6, 12):
        compiled(ids=ids(2, length))
    assert [call.engine for call in recorder.calls] == ["jit"] * 3 + ["eager"] * 3
    assert "asked for 3 late shapes in this process" in caplog.text


def test_many_calls_of_one_new_shape_compile_it_once(make: Make) -> None:
    model = classifier()
    compiled, recorder = make(model, on_unprepared="compile")
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(compiled(ids=ids(4, 4)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    for result in results:
        torch.testing.assert_close(result, model(ids(4, 4)))
    assert sum(len(call.compiles) for call in recorder.calls) == 1


def test_an_input_that_the_model_refuses_is_its_own_error_and_not_compiled_again(make: Make) -> None:
    compiled, recorder = make(on_unprepared="compile")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            compiled(ids=ids(2, 5).float())
    assert len([stage for stage in recorder.startups() if stage.attributes.get("late")]) == 1


# Dynamo's own compiles inside of calls


def test_dynamo_giving_up_is_an_error_that_is_said_and_counted(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    inner = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return inner(x) + 1

    compiled, recorder = make(Inner().eval(), [{"x": torch.rand(2, 2)}], enabled=False)
    with torch._dynamo.config.patch(recompile_limit=3):
        for size in range(3, 10):
            compiled(x=torch.rand(size, 2))
    limits = [compile_ for call in recorder.calls for compile_ in call.compiles if "limit" in compile_.reason]
    assert limits
    assert ("fallback", "recompile_limit") in recorder.told
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [message for message in errors if "recompile_limit (3) reached" in message]
