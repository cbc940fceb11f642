"""torch's private parts, as they are in the installed torch. A failure here after an upgrade names what moved."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bentoml_compile.config import CompileConfig
from bentoml_compile.engines import dynamo, jit
from bentoml_compile.engines.phases import nest, recorded_phases, seconds_by_phase
from bentoml_compile.shapes import ExampleInput
from tests.models import Broken, Classifier, classifier, ids

EAGER = CompileConfig(backend="eager")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()  # what it learnt of a function's shapes in other tests would make its first compile dynamic


def program(model: torch.nn.Module, *, fullgraph: bool = True, config: CompileConfig = EAGER) -> jit.JitProgram:
    return jit.JitProgram(model, "forward", config, fullgraph=fullgraph)


def prepare(made: jit.JitProgram, *tensors: torch.Tensor) -> None:
    with made.preparing(1):
        made.prepare(ExampleInput(tensors, {}))


def test_a_closed_gate_runs_prepared_code_and_compiles_nothing_else() -> None:
    model, made = classifier(), None
    made = program(model)
    prepare(made, ids(2, 5))
    torch.testing.assert_close(made(ids(2, 5)), model(ids(2, 5)))
    with pytest.raises(dynamo.GuardMiss):
        made(ids(3, 6))


def test_a_guard_miss_says_which_guard_failed_and_where() -> None:
    model = classifier()
    made = program(model)
    prepare(made, ids())
    model.scale = 3.0
    with pytest.raises(dynamo.GuardMiss, match=r"forward \(models\.py:\d+\).*scale") as raised:
        made(ids())
    assert "3.0" in str(raised.value) or "2.0" in str(raised.value)


def test_two_models_of_one_class_do_not_share_compiled_code() -> None:
    first, second = classifier(), classifier()
    prepare(program(first), ids())
    with pytest.raises(dynamo.GuardMiss):
        program(second)(ids())


def test_a_compiled_method_has_a_gate_too() -> None:
    class TwoWays(Classifier):
        def encode(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embedding(ids).sum(1)

    model = TwoWays().eval()
    made = jit.JitProgram(model, "encode", EAGER, fullgraph=True)
    prepare(made, ids())
    torch.testing.assert_close(made(ids()), model.encode(ids()))
    with pytest.raises(dynamo.GuardMiss):
        made(ids(5, 5))


def test_more_shapes_than_dynamos_limit_can_be_prepared() -> None:
    made = program(classifier(), config=CompileConfig(backend="eager", dynamic=False))
    sizes = range(1, torch._dynamo.config.recompile_limit + 4)
    with made.preparing(len(sizes)):
        for size in sizes:
            made.prepare(ExampleInput((ids(size, 3),), {}))
    for size in sizes:
        made(ids(size, 3))


def test_graph_breaks_are_recorded_with_place_reason_and_hint() -> None:
    with dynamo.recorded_graph_breaks() as breaks:
        prepare(program(Broken().eval(), fullgraph=False), torch.ones(2, 4))
    assert [item.source for item in breaks] == ["torch._dynamo.graph_break()", "if x.sum() > 1000:"]
    assert all(Path(item.file).name == "models.py" and item.line > 0 and item.reason and item.hint for item in breaks)


def test_fullgraph_of_a_broken_model_is_one_kind_of_error() -> None:
    with pytest.raises(jit.GraphBroken):
        prepare(program(Broken().eval()), torch.ones(2, 4))


def test_a_model_that_dynamo_skips_whole_is_broken_too() -> None:
    class Skipped(torch.nn.Module):
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    with pytest.raises(jit.GraphBroken):
        prepare(program(Skipped()), torch.ones(2))


def test_phases_are_recorded_in_this_thread() -> None:
    with recorded_phases() as phases:
        prepare(program(classifier()), ids())
    assert {"dynamo", "backend"} <= {phase.name for phase in phases}
    assert all(phase.ended_ns >= phase.started_ns > 0 for phase in phases)


def test_a_phases_seconds_leave_out_the_phases_inside() -> None:
    second = 10**9
    events = [(0, 10 * second, "dynamo"), (1 * second, 9 * second, "dynamo"), (2 * second, 8 * second, "inductor")]
    events += [
        (3 * second, 4 * second, "codegen"),
        (5 * second, 6 * second, "codegen"),
        (20 * second, 21 * second, "dynamo"),
    ]
    phases = nest(events)
    assert [phase.name for phase in phases] == ["dynamo", "inductor", "codegen", "codegen", "dynamo"]
    assert [phase.parent for phase in phases] == [None, 0, 1, 1, None]
    assert seconds_by_phase(phases) == {"dynamo": 5.0, "inductor": 4.0, "codegen": 2.0}


def test_compiles_of_this_thread_are_seen_with_their_reason() -> None:
    dynamo.start_watching()
    dynamo.watch.take()
    function = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    function(torch.ones(2))
    function(torch.ones(3))
    first, second = dynamo.watch.take()
    assert first.ended_ns >= first.started_ns
    assert "first compile" in first.reason
    assert "size" in second.reason
    assert dynamo.watch.take() == []


def test_an_inductor_cache_directory_holds_for_the_block_only(tmp_path: Path) -> None:
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with dynamo.inductor_cache(tmp_path):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def test_what_is_known_of_the_cpus_vector_isa_is_forgotten_for_a_self_contained_cache(tmp_path: Path) -> None:
    from torch._inductor import config, cpu_vec_isa

    isa = cpu_vec_isa.VecAVX2()
    with config.patch({"cpp.vec_isa_ok": True}):
        bool(isa)
        cpu_vec_isa.valid_vec_isa_list()
    known = [cpu_vec_isa.valid_vec_isa_list, vars(cpu_vec_isa.VecISA)["_VecISA__bool__impl"]]
    with dynamo.inductor_cache(tmp_path, self_contained=False):
        assert all(function.cache_info().currsize for function in known)
    with dynamo.inductor_cache(tmp_path):
        assert not any(function.cache_info().currsize for function in known)


def test_options_go_on_top_of_the_modes_for_inductor_and_alone_to_others() -> None:
    tuned = jit._backend(CompileConfig(mode="max-autotune", options={"max_autotune": False}))
    assert tuned["options"] == {**torch._inductor.list_mode_options("max-autotune"), "max_autotune": False}
    assert "mode" not in tuned
    assert jit._backend(CompileConfig(mode="max-autotune"))["mode"] == "max-autotune"
    assert jit._backend(CompileConfig(backend="eager", mode="max-autotune"))["options"] is None
