"""The jit engine on a thread of its own, as with CUDA graphs; on the CPU by a backend that asserts its thread.

The backend `one_thread` is like CUDA graphs in what matters here: its code runs only on the thread that compiled it,
and the results of a call lie where those of the next will.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from bentoml_compile.compiled_model import CompiledModel
from bentoml_compile.config import CompileConfig, Mode
from bentoml_compile.engines import dynamo, jit
from bentoml_compile.engines.copies import copied
from bentoml_compile.listener import Call, Listener
from bentoml_compile.model import compile_model
from bentoml_compile.shapes import ExampleInput
from tests.models import Broken, Classifier, classifier, ids

DEADLINE = 60.0
CONFIG: dict[str, Any] = {"engine": "jit", "backend": "one_thread", "dynamic": False, "keep_eager_if_slower": False}


@torch._dynamo.register_backend
def one_thread(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., Any]:
    thread = threading.get_ident()
    memory: list[torch.Tensor] = []

    def run(*inputs: torch.Tensor) -> Any:
        assert threading.get_ident() == thread, "not on the thread that compiled"
        outputs = graph(*inputs)
        if not memory:
            memory.extend(output.clone() for output in outputs)
        for mine, output in zip(memory, outputs, strict=True):
            mine.copy_(output)
        return tuple(memory)

    return run


@torch._dynamo.register_backend
def endless(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Any:
    while True:
        pass


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs need a thread, as if the model were on a GPU and the mode had CUDA graphs."""
    monkeypatch.setattr(jit, "uses_cuda_graphs", lambda model, config: True)


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"torch_compile-{name}"]


def compiled(model: torch.nn.Module, *examples: torch.Tensor, name: str, **settings: Any) -> CompiledModel:
    inputs = [{"ids" if isinstance(model, Classifier) else "x": example} for example in examples]
    return compile_model(model, example_inputs=inputs, name=name, config={**CONFIG, **settings})


def program(model: torch.nn.Module) -> jit.JitProgram:
    made = jit.JitProgram(model, "forward", CompileConfig(backend="one_thread"), fullgraph=True)
    with made.preparing(1):
        made.prepare(ExampleInput((ids(),), {}))
    return made


# calls


@pytest.mark.parametrize("backend", ["one_thread", "eager"])
def test_mixed_calls_of_many_threads_equal_eager(backend: str, request: pytest.FixtureRequest) -> None:
    """With a thread of the program's, and where each call runs on its caller's."""
    if backend == "one_thread":
        request.getfixturevalue("bound")
    model = classifier()
    served = compiled(model, ids(2, 5), ids(3, 4), name="mixed", backend=backend)
    inputs = [ids(2, 5), ids(3, 4), ids(3, 4) * 0, ids(4, 4)]  # the last one is not prepared
    with torch.inference_mode():
        expected = [model(input_)["logits"] for input_ in inputs]
    assert [shape.engine for shape in served.report.shapes] == ["jit", "jit"]

    def call(seed: int) -> None:
        for number in random.Random(seed).choices(range(4), k=200):
            torch.testing.assert_close(served(ids=inputs[number])["logits"], expected[number])

    with ThreadPoolExecutor(8) as callers:
        list(callers.map(call, range(8)))
    assert all("not prepared" in message for message in served._said), "a prepared shape was answered eagerly"
    served.close()


def test_a_call_that_another_thread_begins_meanwhile_does_not_fail_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts the frames that ran compiled code once for all threads; a call of a whole graph begins it anew."""
    model = classifier()
    served = compiled(model, ids(), name="met", backend="eager")
    count = torch._C._dynamo.eval_frame.set_fullgraph_compiled_frame_count

    def count_meanwhile(value: int) -> int:
        if value < 0:  # where the call ends, another one has just ended, and a third begun
            count(-1)
            count(0)
        return count(value)

    monkeypatch.setattr(torch._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", count_meanwhile)
    torch.testing.assert_close(served(ids=ids())["logits"], model(ids())["logits"])
    assert not served._said
    served.close()


def test_without_a_thread_the_backend_would_notice() -> None:
    made = program(classifier())
    made(ids())
    with ThreadPoolExecutor(1) as callers, pytest.raises(AssertionError, match="not on the thread"):
        callers.submit(made, ids()).result()


@pytest.mark.usefixtures("bound")
def test_a_later_call_does_not_overwrite_an_earlier_result() -> None:
    model = classifier()
    served = compiled(model, ids(), name="kept")
    first = served(ids=ids())["logits"]
    second = served(ids=ids() * 0)["logits"]
    torch.testing.assert_close(first, model(ids())["logits"])
    assert not torch.equal(first, second)
    served.close()


@pytest.mark.usefixtures("bound")
def test_a_model_in_parts_runs_on_the_thread_too() -> None:
    model = Broken().eval()
    served = compiled(model, torch.ones(2, 4), name="parts", fullgraph="prefer")
    with ThreadPoolExecutor(2) as callers:
        for result in callers.map(lambda _: served(x=torch.ones(2, 4)), range(8)):
            torch.testing.assert_close(result, model(torch.ones(2, 4)))
    assert [shape.engine for shape in served.report.shapes] == ["jit"]
    assert len(threads_of("parts")) == 1  # the thread of the program that was to be whole has ended
    served.close()


@pytest.mark.usefixtures("bound")
def test_phases_of_the_compile_on_the_thread_are_in_the_report() -> None:
    served = compiled(classifier(), ids(), name="phases")
    assert {"dynamo", "backend"} <= served.report.phases.keys()
    served.close()


class Heard(Listener):
    def __init__(self) -> None:
        self.calls: list[Call] = []

    def called(self, call: Call) -> None:
        self.calls.append(call)


@pytest.mark.usefixtures("bound")
def test_a_compile_inside_of_a_call_is_told_as_the_callers() -> None:
    heard = Heard()
    model = classifier()
    served = compile_model(model, example_inputs=[{"ids": ids()}], name="recompiled", config=CONFIG, listeners=[heard])
    shape = served._serving.shapes[0]
    run: Any = shape.run
    run._program._gate.open = True
    model.scale = 3.0  # a guard
    torch.testing.assert_close(served(ids=ids())["logits"], model(ids())["logits"])
    assert served.recompiles == 1
    assert "scale" in heard.calls[-1].compiles[0].reason
    served.close()


@pytest.mark.usefixtures("bound")
def test_a_caller_in_a_torch_mode_is_answered_eagerly() -> None:
    heard = Heard()
    model = classifier()
    served = compile_model(model, example_inputs=[{"ids": ids()}], name="moded", config=CONFIG, listeners=[heard])
    with torch.device("cpu"):
        torch.testing.assert_close(served(ids=ids())["logits"], model(ids())["logits"])
    assert heard.calls[-1].fallback == "guard"
    served.close()


# the end of the thread


@pytest.mark.usefixtures("bound")
def test_closing_the_model_ends_its_thread() -> None:
    served = compiled(classifier(), ids(2, 5), ids(3, 4), name="closed")
    assert len(threads_of("closed")) == 1
    served.close()
    assert not threads_of("closed")
    with pytest.raises(RuntimeError, match="is closed"):
        served(ids=ids())


@pytest.mark.usefixtures("bound")
def test_a_shape_that_is_served_eagerly_leaves_the_thread_to_the_others() -> None:
    model = classifier()
    served = compiled(model, ids(2, 5), ids(3, 4), name="fewer")
    first, second = served._serving.shapes
    run: Any = first.run
    first.serve_eagerly("slower")
    first.serve_eagerly("slower")
    run.close()
    assert second.run is not None
    torch.testing.assert_close(second.run(ids=ids(3, 4)), model(ids(3, 4)))
    assert len(threads_of("fewer")) == 1
    second.serve_eagerly("slower")
    assert not threads_of("fewer")
    served.close()


@pytest.mark.usefixtures("bound")
def test_a_model_that_is_dropped_takes_its_thread_with_it() -> None:
    served = compiled(classifier(), ids(), name="dropped")
    (thread,) = threads_of("dropped")
    del served
    deadline = time.monotonic() + DEADLINE
    while (
        thread.is_alive() and time.monotonic() < deadline
    ):  # a thread of the boot's may hold the model a little longer
        gc.collect()
        thread.join(0.1)
    assert not thread.is_alive()


@pytest.mark.usefixtures("bound")
def test_a_compile_on_the_thread_ends_with_the_time_limit() -> None:
    model = classifier()
    served = compiled(model, ids(), name="limited", backend="endless", time_limit=2)
    assert served.report.engine == "eager"
    assert "time_limit" in served.report.fallback
    assert not threads_of("limited")
    torch.testing.assert_close(served(ids=ids()), model(ids()))
    served.close()


# what needs a thread


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_model_on_the_cpu_has_no_cuda_graphs_and_no_thread(mode: Mode) -> None:
    assert not jit.uses_cuda_graphs(classifier(), CompileConfig(mode=mode))
    assert jit.JitProgram(classifier(), "forward", CompileConfig(), fullgraph=True).thread is None


# copies


@dataclasses.dataclass(frozen=True)
class Cache:
    layers: list[torch.Tensor]
    length: int = 3


def test_tensors_inside_of_any_object_are_copied_once_each() -> None:
    tensor = torch.ones(2)
    cache = Cache([tensor, torch.zeros(2)])
    copy: Any = copied({"logits": tensor, "again": (tensor, None, "text"), "cache": cache})
    tensor.fill_(7)
    assert copy["logits"] is copy["again"][0] is copy["cache"].layers[0]
    assert copy["logits"].tolist() == [1.0, 1.0]
    assert copy["again"][1:] == (None, "text")
    assert copy["cache"] is cache
    assert cache.length == 3


def test_an_object_that_holds_itself_is_copied() -> None:
    holder: Any = type("Holder", (), {})()
    holder.self, holder.tensor = holder, torch.ones(1)
    tensor = holder.tensor
    assert copied(holder).tensor is not tensor


def test_watching_is_per_thread() -> None:
    """What `JitProgram` hands over compiles for; without the need, it could go."""
    dynamo.start_watching()
    dynamo.watch.take()
    function = torch.compile(lambda x: x + 1, backend="eager")
    with ThreadPoolExecutor(1) as callers:
        callers.submit(function, torch.ones(2)).result()
    assert dynamo.watch.take() == []
