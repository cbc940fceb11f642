"""Boots and calls of a compiled model without a server. What needs no C++ uses torch's own "eager" backend."""

from __future__ import annotations

import gc
import json
import logging
import os
import tempfile
import threading
import time
import uuid
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from bentoml_compile.errors import ConfigError, GraphBreakError, UnpreparedInputError, VerificationError
from bentoml_compile.listener import Call, Listener, Stage
from bentoml_compile.model import CompiledModel, compile_model, explaining
from tests.models import Broken, Classifier, Counting, classifier, ids

FAST = {"backend": "eager", "keep_eager_if_slower": False}
BOTH = [{"ids": ids(2, 5)}, {"ids": ids(4, 7)}]


class Recorder(Listener):
    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.fallbacks: list[str] = []
        self.unprepared_calls: list[str] = []
        self.calls: list[Call] = []

    def stage_ended(self, stage: Stage) -> None:
        self.stages.append(stage)

    def fallback(self, model: str, reason: str) -> None:
        self.fallbacks.append(reason)

    def unprepared(self, model: str, action: str) -> None:
        self.unprepared_calls.append(action)

    def tracing(self) -> bool:
        return True

    def called(self, call: Call) -> None:
        self.calls.append(call)

    def stage_names(self) -> list[str]:
        return [stage.name for stage in self.stages if not stage.name.startswith("phase.")]


Make = Callable[..., CompiledModel]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[CompiledModel] = []

    def build(model: nn.Module | None = None, example_inputs: Any = None, **config: Any) -> CompiledModel:
        while made:
            made.pop().close()
        recorder = config.pop("recorder", None)
        compiled = compile_model(
            model if model is not None else classifier(),
            example_inputs=example_inputs or BOTH,
            method=config.pop("method", "forward"),
            config={**FAST, **config},
            listeners=[recorder] if recorder else [],
            default_store=tmp_path / "store",
        )
        made.append(compiled)
        return compiled

    yield build
    while made:
        made.pop().close()


# calls


def test_a_prepared_shape_is_answered_by_compiled_code(make: Make) -> None:
    recorder, model = Recorder(), classifier()
    compiled = make(model, recorder=recorder)
    torch.testing.assert_close(compiled(ids=ids(2, 5)), model(ids(2, 5)))
    torch.testing.assert_close(compiled(ids(4, 7)), model(ids(4, 7)))
    assert [(call.executable.engine, call.executable.prepared, call.shape) for call in recorder.calls] == [
        ("jit", True, "ids: int64[2, 5]"),
        ("jit", True, "ids: int64[4, 7]"),
    ]
    assert compiled.recompiles == 0


def test_results_are_inference_tensors_whatever_the_engine(make: Make) -> None:
    compiled = make()
    assert compiled(ids=ids(2, 5))["logits"].is_inference()
    assert compiled(ids=ids(3, 3))["logits"].is_inference()


def test_an_unprepared_shape_runs_eagerly_and_never_reaches_the_compiler(make: Make) -> None:
    recorder, model = Recorder(), classifier()
    compiled = make(model, recorder=recorder)
    torch.testing.assert_close(compiled(ids=ids(3, 3)), model(ids(3, 3)))
    call = recorder.calls[0]
    assert (call.executable.engine, call.executable.prepared, call.shape) == ("eager", False, "ids: int64[3, 3]")
    assert not call.compiles
    assert recorder.unprepared_calls == ["eager"]


def test_reject_refuses_an_unprepared_shape_and_lists_the_prepared_ones(make: Make) -> None:
    compiled = make(on_unprepared="reject")
    with pytest.raises(
        UnpreparedInputError, match=r"(?s)ids: int64\[3, 3\].*ids: int64\[2, 5\].*ids: int64\[4, 7\]"
    ) as e:
        compiled(ids=ids(3, 3))
    assert e.value.error_code.value == 422
    assert compiled(ids=ids(2, 5))["logits"].shape == (2, 3)


class Pair(NamedTuple):
    x: torch.Tensor


class OfBatch(nn.Module):
    """Reads a batch as its class is read; a list's is another number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, BaseModelOutput):
            return self.linear(batch.last_hidden_state)
        if isinstance(batch, Pair):
            return self.linear(batch.x)
        if isinstance(batch, (list, tuple)):
            return self.linear(batch[0]) + isinstance(batch, list)
        if isinstance(batch, torch.Tensor):
            return self.linear(batch if batch.is_nested else batch.float())
        return self.linear(batch["x"])


BATCHES: list[Callable[[torch.Tensor], Any]] = [
    lambda x: {"x": x},
    lambda x: OrderedDict(x=x),
    lambda x: UserDict(x=x),
    lambda x: BatchEncoding({"x": x}),
    lambda x: BaseModelOutput(last_hidden_state=x),
    Pair,
    lambda x: (x,),
    lambda x: [x],
]


def test_examples_in_containers_of_any_class_are_prepared_as_they_are(make: Make) -> None:
    torch.manual_seed(0)
    model, wide = OfBatch().eval(), torch.randn(8, 16)
    examples = [(batch(wide[:, :8].contiguous()),) for batch in BATCHES]
    compiled = make(model, examples, on_unprepared="reject")
    assert [shape.engine for shape in compiled.report.shapes] == ["jit"] * len(BATCHES)
    for batch in BATCHES:
        for x in (wide[:, :8].contiguous(), wide[:, 8:], wide[:1, 8:].expand(8, 8)):
            torch.testing.assert_close(compiled(batch(x)), model(batch(x)))


def test_a_tensor_that_has_no_signature_is_answered_eagerly_or_refused(make: Make) -> None:
    model, recorder = OfBatch().eval(), Recorder()
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
    examples = [(torch.ones(2, 8),)]
    for config in ({}, {"on_unprepared": "compile"}, {"prepare_after": 1}):
        compiled = make(model, examples, recorder=recorder, **config)
        assert torch.equal(compiled(nested).to_padded_tensor(0.0), model(nested).to_padded_tensor(0.0))
        assert recorder.calls[-1].executable.engine == "eager"
    with pytest.raises(UnpreparedInputError, match=r"batch: nested torch.float32"):
        make(model, examples, on_unprepared="reject")(nested)


def test_an_example_of_float8_is_prepared(make: Make) -> None:
    model, x = OfBatch().eval(), torch.randn(2, 8).to(torch.float8_e4m3fn)
    compiled = make(model, [(x,)], on_unprepared="reject")
    assert compiled.report.shapes[0].engine == "jit"
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("value", [11, 10_000_000, -1])
def test_a_token_outside_of_the_vocabulary_is_eagers_index_error(make: Make, value: int) -> None:
    compiled = make()
    wrong = ids(2, 5).clone()
    wrong[1, 4] = value
    with pytest.raises(IndexError):
        compiled(ids=wrong)
    assert compiled(ids=ids(2, 5))["logits"].shape == (2, 3)


def test_other_strides_of_a_prepared_shape_are_put_right(make: Make) -> None:
    recorder, model = Recorder(), classifier()
    compiled = make(model, recorder=recorder, on_unprepared="reject")
    turned = ids(5, 2).t()
    torch.testing.assert_close(compiled(ids=turned), model(turned))
    torch.testing.assert_close(compiled(turned), model(turned))
    assert [(call.executable.engine, call.fallback) for call in recorder.calls] == [("jit", None)] * 2


def test_inference_tensors_run_compiled_code_too(make: Make) -> None:
    recorder, model = Recorder(), classifier()
    compiled = make(model, [{"ids": ids(2, 5), "mask": torch.ones(2, 5)}], recorder=recorder)
    with torch.inference_mode():
        given = {"ids": ids(2, 5), "mask": torch.ones(2, 5)}
        assert given["ids"].is_inference()
        torch.testing.assert_close(compiled(**given), model(**given))
        torch.testing.assert_close(compiled(ids(2, 5), torch.ones(2, 5)), model(**given))
    assert [(call.executable.engine, call.fallback) for call in recorder.calls] == [("jit", None)] * 2


def test_examples_that_are_inference_tensors_prepare_the_same_shape(make: Make) -> None:
    recorder = Recorder()
    with torch.inference_mode():
        compiled = make(example_inputs=[{"ids": ids(2, 5)}], recorder=recorder)
        compiled(ids=ids(2, 5))
    compiled(ids=ids(2, 5))
    assert [(call.executable.engine, call.fallback) for call in recorder.calls] == [("jit", None)] * 2


def test_a_model_that_writes_into_its_inputs_is_given_the_callers_own(make: Make) -> None:
    class Writer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

    compiled = make(Writer().eval(), [{"x": torch.zeros(2, 3)}])
    for given in (torch.zeros(2, 3), torch.zeros(3, 2).t()):
        compiled(x=given)
        assert torch.equal(given, torch.ones(2, 3))


def test_many_threads_get_eagers_results(make: Make) -> None:
    model = classifier()
    compiled = make(model)
    expected = {size: model(ids(*size))["logits"] for size in ((2, 5), (4, 7), (3, 3))}
    wrong: list[Any] = []

    def call() -> None:
        for _ in range(30):
            for size, want in expected.items():
                got = compiled(ids=ids(*size))["logits"]
                if not torch.allclose(got, want):
                    wrong.append((size, got))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert compiled.recompiles == 0


def test_a_changed_model_is_answered_eagerly_and_said_so_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    recorder, model = Recorder(), classifier()
    compiled = make(model, recorder=recorder)
    model.scale = 5.0
    for _ in range(3):
        torch.testing.assert_close(compiled(ids=ids()), model(ids()))
    assert recorder.fallbacks == ["guard"] * 3
    assert [call.fallback for call in recorder.calls] == ["guard"] * 3
    assert len([r for r in caplog.records if "answered eagerly" in r.getMessage()]) == 1


def test_weights_replaced_in_place_are_used(make: Make) -> None:
    model = classifier()
    compiled = make(model)
    other = Classifier().eval()
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(compiled(ids=ids()), other(ids()))


def test_compiled_code_that_fails_in_a_call_is_answered_eagerly(make: Make) -> None:
    recorder, model = Recorder(), classifier()
    compiled = make(model, recorder=recorder)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("cuda graphs and threads")

    [shape, _] = compiled.__dict__["_serving"].exact.values()
    shape.run = fail
    torch.testing.assert_close(compiled(*shape.example.args, **shape.example.kwargs), model(**shape.example.kwargs))
    assert recorder.fallbacks == ["call_failed"]


def test_a_compile_inside_a_call_is_counted_and_reported(make: Make) -> None:
    inner = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)

    class Nested(nn.Module):
        @torch.compiler.disable
        def helper(self, x: torch.Tensor) -> torch.Tensor:
            return inner(torch.ones(int(x.sum())))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.helper(x).sum()

    recorder = Recorder()
    compiled = make(Nested(), [{"x": torch.ones(3)}], fullgraph="allow_breaks", recorder=recorder)
    compiled(x=torch.ones(3))
    assert compiled.recompiles == 0
    compiled(x=torch.full((3,), 2.0))
    assert compiled.recompiles == 1
    last = recorder.calls[-1]
    [compile_] = last.compiles
    assert "size" in compile_.reason
    assert last.started_ns <= compile_.started_ns <= compile_.ended_ns <= last.ended_ns


def test_another_branch_of_a_model_in_parts_is_right_and_not_compiled_in_the_call(make: Make) -> None:
    model = Broken().eval()
    compiled = make(model, [{"x": torch.ones(2, 4)}], fullgraph="allow_breaks")
    big = torch.full((2, 4), 1e6)
    torch.testing.assert_close(compiled(x=big), model(big))
    torch.testing.assert_close(compiled(x=torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert compiled.recompiles == 0


def test_hooks_methods_and_nested_outputs_are_the_models_own(make: Make) -> None:
    class Model(Classifier):
        def encode(self, pair: tuple[torch.Tensor, dict[str, torch.Tensor]], *, double: bool = False) -> Any:
            a, named = pair
            return [a.sum(), {"b": (named["b"] * (2 if double else 1), None)}]

    model = Model().eval()
    model.register_forward_hook(lambda module, args, output: {"logits": output["logits"] + 1})
    torch.testing.assert_close(make(model)(ids=ids()), model(ids()))
    inputs: dict[str, Any] = {"pair": (torch.ones(2), {"b": torch.ones(3)}), "double": True}
    compiled = make(model, [inputs], method="encode")
    assert compiled.report.shapes[0].engine == "jit"
    got, want = compiled(**inputs), model.encode(**inputs)
    assert got[1]["b"][1] is None
    torch.testing.assert_close((got[0], got[1]["b"][0]), (want[0], want[1]["b"][0]))


def test_a_dataclass_is_compared_field_by_field(make: Make) -> None:
    @dataclass
    class Output:
        logits: torch.Tensor
        extra: Any = None

    class Model(Classifier):
        def forward(self, ids: torch.Tensor) -> Any:  # type: ignore[override]
            return Output(super().forward(ids)["logits"])

    model = Model().eval()
    compiled = make(model)
    assert compiled.report.engine == "jit"
    torch.testing.assert_close(compiled(ids=ids()).logits, model(ids()).logits)


def test_a_model_that_draws_random_numbers_is_served_eagerly_and_told_why(make: Make) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    report = make(model, [(torch.ones(2, 4),)]).report
    assert report.engine == "eager"
    assert "random numbers" in report.shapes[0].reason


def test_what_would_change_the_model_behind_the_compiled_code_is_refused(make: Make) -> None:
    compiled = make()
    for name in ("to", "half", "train"):
        with pytest.raises(AttributeError, match="on the model before"):
            getattr(compiled, name)
    assert len(list(compiled.parameters())) == 3


def test_unprepared_shapes_are_said_once_each_and_not_without_end(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    compiled = make()
    for size in [*range(10, 80), 10]:
        compiled(ids=ids(size, 3))
    said = [record.getMessage() for record in caplog.records if "not prepared" in record.getMessage()]
    assert len(said) == len(set(said)) == 50


def test_attributes_are_read_through_and_setting_one_is_refused_with_a_hint(make: Make) -> None:
    compiled = make()
    assert compiled.scale == 2.0
    assert compiled.embedding.num_embeddings == 11
    with pytest.raises(AttributeError, match="before compile_model"):
        compiled.scale = 3.0
    with pytest.raises(AttributeError):
        _ = compiled.no_such_thing


def test_a_closed_model_raises_and_frees_its_name(make: Make) -> None:
    compiled = make()
    compiled.close()
    with pytest.raises(RuntimeError, match="closed"):
        compiled(ids=ids())
    make().close()


def test_two_models_of_one_name_are_refused_while_both_live(make: Make) -> None:
    first = make()
    with pytest.raises(ConfigError, match=r"'model'.*its own name"):
        compile_model(classifier(), example_inputs=BOTH, config=FAST)
    del first


def test_a_model_that_is_gone_frees_its_name() -> None:
    first: CompiledModel | None = compile_model(classifier(), example_inputs=BOTH, name="gone", config=FAST)
    assert first is not None
    first = None
    gc.collect()
    compile_model(classifier(), example_inputs=BOTH, name="gone", config=FAST).close()


# boots


def test_the_second_boot_loads_what_the_first_compiled(make: Make) -> None:
    first, cold = Recorder(), None
    cold = make(recorder=first).report
    second = Recorder()
    warm = make(recorder=second).report
    assert (cold.outcome, warm.outcome) == ("compiled", "loaded")
    assert first.stage_names() == ["lookup", "compile", "verify", "store", "startup"]
    # only Inductor's cache would tell that this boot traced another graph, so another backend is verified again
    assert second.stage_names() == ["lookup", "load", "verify", "startup"]
    assert warm.fingerprint == cold.fingerprint
    assert [row.max_error for row in warm.shapes] == [row.max_error for row in cold.shapes] == [0.0, 0.0]


def test_new_values_of_weights_load_and_a_changed_attribute_does_not(make: Make) -> None:
    assert make(classifier()).report.outcome == "compiled"
    assert make(Classifier().eval()).report.outcome == "loaded"
    model = classifier()
    model.scale = 7.0
    report = make(model).report
    assert report.outcome == "compiled"
    assert any("scale" in rejection.reason for rejection in report.rejected)


def test_a_boot_may_ask_for_what_the_stored_one_did_not(make: Make) -> None:
    assert make().report.shapes[0].speedup is None
    asked = make(keep_eager_if_slower=True).report
    assert (asked.outcome, asked.engine) == ("loaded", "eager")
    assert asked.shapes[0].speedup is not None
    again = Recorder()
    assert make(keep_eager_if_slower=True, recorder=again).report.shapes == asked.shapes
    assert "measure" not in again.stage_names()
    assert make(keep_eager_if_slower=False).report.engine == "jit"


def test_without_a_store_nothing_is_left_on_the_disk_and_nothing_foreseeable_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    caches: list[str] = []

    def noting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        caches.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        return graph.forward

    torch._dynamo.register_backend(noting, name="noting")
    compile_model(classifier(), example_inputs=BOTH, config={**FAST, "backend": "noting"}, name="nowhere").close()
    assert {Path(cache).parent for cache in caches} == {tmp_path}
    assert list(tmp_path.iterdir()) == []


def test_a_store_with_a_space_in_its_path_is_not_used_and_says_so(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = make(artifacts={"store": str(tmp_path / "with space")}).report
    assert (report.outcome, report.engine) == ("compiled", "jit")
    assert any("has a space" in record.getMessage() for record in caplog.records)


def test_refresh_compiles_again_and_write_false_keeps_nothing(make: Make) -> None:
    assert make(artifacts={"write": False}).report.outcome == "compiled"
    assert make().report.outcome == "compiled"
    assert make().report.outcome == "loaded"
    assert make(artifacts={"refresh": True}).report.outcome == "compiled"


def test_a_damaged_artifact_is_passed_over_with_its_reason_and_replaced(make: Make, tmp_path: Path) -> None:
    make()
    [manifest] = (tmp_path / "store").rglob("manifest.json")
    manifest.write_text(manifest.read_text()[:-20])
    report = make().report
    assert report.outcome == "compiled"
    assert report.rejected
    assert make().report.outcome == "loaded"


def test_an_artifact_that_grows_while_it_is_loaded_still_fits(make: Make) -> None:
    assert [make(backend="growing_backend").report.outcome for _ in range(3)] == ["compiled", "loaded", "loaded"]


def test_a_store_that_cannot_be_written_costs_only_the_artifact(make: Make, tmp_path: Path) -> None:
    recorder = Recorder()
    (tmp_path / "file").write_text("not a directory")
    report = make(artifacts={"store": str(tmp_path / "file" / "store")}, recorder=recorder).report
    assert report.outcome == "compiled"
    assert report.engine == "jit"
    assert recorder.fallbacks == ["store_failed"]


def test_disabled_serves_eagerly_without_compiling(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, model = Recorder(), classifier()
    compiled = make(model, enabled=False, on_unprepared="reject", recorder=recorder)
    assert (compiled.report.outcome, compiled.report.engine) == ("eager", "eager")
    torch.testing.assert_close(compiled(ids=ids(3, 3)), model(ids(3, 3)))
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert make().report.outcome == "eager"


def test_the_report_is_plain_json(make: Make) -> None:
    report = make().report
    data = json.loads(json.dumps(report.to_dict()))
    assert report.to_dict() == data  # lists too: not every writer of JSON takes a tuple
    assert data["shapes"][0]["signature"] == "ids: int64[2, 5]"
    assert data["fullgraph"] is True
    assert data["phases"]["dynamo"] > 0
    assert data["seconds"] >= sum(data["phases"].values())


def test_what_compiles_slower_than_eager_is_served_eagerly_and_remembered(make: Make) -> None:
    recorder = Recorder()
    cold = make(recorder=recorder, keep_eager_if_slower=True).report  # Dynamo's guards without a compiler: slower
    assert [row.engine for row in cold.shapes] == ["eager", "eager"]
    assert all(row.speedup is not None and row.speedup < 1 and "slower" in row.reason for row in cold.shapes)
    assert "measure" in recorder.stage_names()
    again = Recorder()
    warm = make(recorder=again, keep_eager_if_slower=True).report
    assert warm.outcome == "loaded"
    assert [row.speedup for row in warm.shapes] == [row.speedup for row in cold.shapes]
    assert "measure" not in again.stage_names()


def test_a_warm_boot_serves_each_shape_as_the_cold_one_decided(make: Make) -> None:
    class Sleepy(Classifier):
        def forward(self, ids: torch.Tensor) -> Any:  # type: ignore[override]
            if not torch.compiler.is_compiling() and ids.shape[0] == 2:
                time.sleep(0.02)  # eager is slow for two rows, so compiled wins there and loses elsewhere
            return super().forward(ids)

    model = Sleepy().eval()
    reports = [make(model, keep_eager_if_slower=True).report for _ in range(2)]
    assert [report.outcome for report in reports] == ["compiled", "loaded"]
    assert [[row.engine for row in report.shapes] for report in reports] == [["jit", "eager"]] * 2
    assert reports[0].shapes == reports[1].shapes


# graph breaks


def test_require_stops_the_boot_with_every_break_and_remembers(make: Make) -> None:
    first = Recorder()
    with pytest.raises(GraphBreakError) as cold:
        make(Broken().eval(), [{"x": torch.ones(2, 4)}], fullgraph="require", recorder=first)
    assert [item.source for item in cold.value.breaks] == ["torch._dynamo.graph_break()", "if x.sum() > 1000:"]
    for item in cold.value.breaks:
        assert item.file in str(cold.value)
        assert f":{item.line}:" in str(cold.value)
        assert item.reason in str(cold.value)
        assert item.hint in str(cold.value)
    second = Recorder()
    with pytest.raises(GraphBreakError) as warm:
        make(Broken().eval(), [{"x": torch.ones(2, 4)}], fullgraph="require", recorder=second)
    assert str(warm.value) == str(cold.value)
    assert warm.value.breaks == cold.value.breaks
    assert second.stage_names() == ["lookup", "startup"]


def test_prefer_compiles_in_parts_and_says_so_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    recorder, model = Recorder(), Broken().eval()
    compiled = make(model, [{"x": torch.ones(2, 4)}], fullgraph="prefer", recorder=recorder)
    report = compiled.report
    assert (report.engine, report.fullgraph, len(report.graph_breaks)) == ("jit", False, 2)
    torch.testing.assert_close(compiled(x=torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert len([r for r in caplog.records if "compiled in parts" in r.getMessage()]) == 1
    compile_stage = next(stage for stage in recorder.stages if stage.name == "compile")
    assert [event.name for event in compile_stage.events] == ["graph_break", "graph_break"]
    warm = make(model, [{"x": torch.ones(2, 4)}], fullgraph="prefer").report
    assert (warm.outcome, warm.fullgraph, warm.graph_breaks) == ("loaded", False, report.graph_breaks)


def test_explaining_collects_the_breaks_and_compiles_nothing(make: Make) -> None:
    with explaining() as found:
        make(Broken().eval(), [{"x": torch.ones(2, 4)}], fullgraph="require")
        make()
    assert [(name, len(breaks)) for name, breaks in found] == [("model", 2), ("model", 0)]


# errors


def wrong_backend(graph: Any, inputs: Any) -> Any:
    return lambda *args: tuple(x + 1 for x in graph.forward(*args))


def failing_backend(graph: Any, inputs: Any) -> Any:
    raise ValueError("this backend has a bug")


def hungry_backend(graph: Any, inputs: Any) -> Any:
    return torch.empty(2**50)


def growing_backend(graph: Any, inputs: Any) -> Any:
    (Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / uuid.uuid4().hex).write_text("found out again in each process")
    return graph.forward


def hanging_backend(graph: Any, inputs: Any) -> Any:
    threading.Event().wait(600)


@pytest.fixture(scope="module", autouse=True)
def backends() -> None:
    for backend in (wrong_backend, failing_backend, hungry_backend, growing_backend, hanging_backend):
        torch._dynamo.register_backend(backend, name=backend.__name__)


def test_a_wrong_result_is_not_served(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    recorder, model = Recorder(), classifier()
    compiled = make(model, backend="wrong_backend", recorder=recorder)
    assert compiled.report.engine == "eager"
    assert all(
        "differs" in row.reason and row.max_error == pytest.approx(1.0, abs=1.1) for row in compiled.report.shapes
    )
    assert recorder.fallbacks == ["verification", "verification"]
    assert any(record.levelno >= logging.ERROR for record in caplog.records)
    torch.testing.assert_close(compiled(ids=ids()), model(ids()))
    assert make(model, backend="wrong_backend").report.outcome == "compiled"  # it was not kept


def test_a_wrong_result_stops_the_boot_if_the_config_says_so(make: Make) -> None:
    with pytest.raises(VerificationError, match=r"ids: int64\[2, 5\]"):
        make(backend="wrong_backend", verify={"strict": True})


def test_without_verification_nobody_looks(make: Make) -> None:
    recorder = Recorder()
    report = make(backend="wrong_backend", verify=False, recorder=recorder).report
    assert report.engine == "jit"
    assert "verify" not in recorder.stage_names()


@pytest.mark.parametrize(
    ("backend", "reason", "words"),
    [
        ("failing_backend", "backend_error", "this backend has a bug"),
        ("hungry_backend", "out_of_memory", "memory"),
    ],
)
def test_a_backend_that_fails_means_eager_serving(make: Make, backend: str, reason: str, words: str) -> None:
    recorder, model = Recorder(), classifier()
    compiled = make(model, backend=backend, recorder=recorder)
    assert (compiled.report.engine, compiled.report.shapes[0].engine) == ("eager", "eager")
    assert set(recorder.fallbacks) == {reason}
    assert words in compiled.report.shapes[0].reason
    compile_stage = next(stage for stage in recorder.stages if stage.name == "compile")
    assert {event.attributes["reason"] for event in compile_stage.events} == {reason}
    torch.testing.assert_close(compiled(ids=ids()), model(ids()))


@pytest.mark.timeout(300, method="thread")
def test_a_compile_over_the_time_limit_ends_in_eager(make: Make) -> None:
    recorder, model = Recorder(), classifier()
    compiled = make(model, backend="hanging_backend", time_limit=1, recorder=recorder)
    assert compiled.report.outcome == "eager"
    assert "time_limit" in compiled.report.fallback
    assert recorder.fallbacks == ["time_limit"]
    torch.testing.assert_close(compiled(ids=ids()), model(ids()))


def test_an_example_that_the_model_cannot_run_is_a_config_error(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"ids: float32\[2, 2\].*example_inputs"):
        make(example_inputs=[{"ids": torch.ones(2, 2)}])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"backend": "inducter"}, "did you mean 'inductor'"),
        ({"backend": "inductor", "options": {"max_autotunes": True}}, "did you mean 'max_autotune'"),
    ],
)
def test_a_backend_or_option_unknown_to_torch_is_refused_with_the_nearest(make: Make, config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(**config)


def test_a_boot_leaves_buffers_and_random_state_as_they_were(make: Make) -> None:
    model = Counting().eval()
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    compiled = make(model)
    assert torch.rand(1) == expected
    assert model.calls == 0
    compiled(ids=ids())
    assert model.calls == 1


def test_a_listener_that_raises_breaks_neither_boot_nor_call(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Listener):
        def stage_started(self, stage: Stage) -> None:
            raise RuntimeError("no collector")

        def called(self, call: Call) -> None:
            raise RuntimeError("no collector")

    compiled = make(recorder=Broken())
    assert compiled(ids=ids())["logits"].shape == (2, 3)
    assert len([record for record in caplog.records if "telemetry" in record.getMessage()]) == 1


def test_half_precision_is_judged_by_its_distance_to_the_truth(make: Make) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)).eval().to(torch.bfloat16)
    report = make(model, [(torch.randn(4, 32, dtype=torch.bfloat16),)], backend="aot_eager").report
    assert report.shapes[0].engine == "jit"


# the ahead-of-time engine, by real compiles


def test_an_exported_model_boots_from_its_package_and_answers_from_any_thread(make: Make) -> None:
    model, inductor = classifier(), {"backend": "inductor"}
    cold = make(model, [{"ids": ids(2, 5)}], engine="auto", **inductor).report
    assert (cold.engine, cold.outcome, cold.fullgraph, cold.engine_reason) == ("aot", "compiled", True, "")
    recorder = Recorder()
    compiled = make(model, [{"ids": ids(2, 5)}], engine="auto", recorder=recorder, **inductor)
    assert (compiled.report.engine, compiled.report.outcome) == ("aot", "loaded")
    assert recorder.stage_names() == ["lookup", "load", "startup"]
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(compiled(ids=ids(2, 5))["logits"])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer in answers:
        torch.testing.assert_close(answer, model(ids(2, 5))["logits"])
    assert len(answers) == 8
    wrong = ids(2, 5) + 7
    with pytest.raises(IndexError):
        compiled(ids=wrong)
    model.load_state_dict(Classifier().state_dict())
    torch.testing.assert_close(compiled(ids=ids(2, 5)), model(ids(2, 5)))


def test_auto_says_why_a_model_is_traced_and_aot_refuses_it(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"cannot be exported: .*calls.*'auto'"):
        make(Counting().eval(), [{"ids": ids()}], backend="inductor", engine="aot")


@pytest.mark.parametrize("config", [{"fullgraph": "allow_breaks"}, {"dynamic": True}, {"backend": "eager"}])
def test_aot_refuses_settings_that_only_torch_compile_can_follow(make: Make, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="engine='aot'"):
        make(**{"backend": "inductor", **config}, engine="aot")


@pytest.mark.parametrize("name", ["", "\ud800"])
def test_a_name_that_nothing_can_be_called_by_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="UTF-8 and not empty"):
        compile_model(torch.nn.Linear(2, 2).eval(), example_inputs=[(torch.ones(1, 2),)], name=name)
