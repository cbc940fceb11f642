"""In a mode that promises CUDA graphs: ahead of time for single shapes, torch.compile for what has no graph.

There is no GPU here: the graph is one of the CPU, which runs the library again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bentoml_compile.engines.aot import build, cuda_graph
from bentoml_compile.engines.aot.cuda_graph import GraphedLibrary
from bentoml_compile.model import CompiledModel, compile_model
from tests.engines.aot.test_cuda_graph import GraphOnCpu
from tests.models import classifier, ids

BOTH = [{"ids": ids(1, 5)}, {"ids": ids(2, 5)}]
RANGES = {"ids": {"0": [2, 4], "1": [2, 8]}}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(autouse=True)
def _graphs_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "Graph", GraphOnCpu)
    monkeypatch.setattr(build, "uses_cuda_graphs", lambda *_: True)


def compiled(store: Path, examples: list[Any], **config: Any) -> CompiledModel:
    return compile_model(
        classifier(), example_inputs=examples, config={"keep_eager_if_slower": False, **config}, default_store=store
    )


def test_single_shapes_are_replayed_and_ranges_are_left_to_torch_compile(store: Path) -> None:
    single, ranged = "ids: int64[1, 5]", "ids: int64[2..4, 2..8]"
    for outcome in ("compiled", "loaded"):
        made = compiled(store, BOTH, dynamic=RANGES)
        assert made.report.outcome == outcome, made.report.rejected
        assert {shape.signature: shape.engine for shape in made.report.shapes} == {single: "aot", ranged: "jit"}
        assert made.report.engine_reason == f"{ranged}: a CUDA graph has one size"
        graphed = next(shape for shape in made._serving.shapes if shape.label == single)
        assert isinstance(graphed.run._library, GraphedLibrary)  # type: ignore[union-attr]
        first, second = ids(1, 5), ids(1, 5).flip(1)
        results = [made(ids=first), made(ids=second)]
        torch.testing.assert_close(results[0], classifier()(first))
        torch.testing.assert_close(results[1], classifier()(second))
        torch.testing.assert_close(made(ids=ids(4, 8)), classifier()(ids(4, 8)))
        made.close()


def test_a_shape_without_a_graph_is_left_to_torch_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphOnCpu, "failing", "operation not permitted when stream is capturing")
    made = compiled(tmp_path, [{"ids": ids(2, 5)}])
    assert [shape.engine for shape in made.report.shapes] == ["jit"]
    assert "no CUDA graph: operation not permitted" in made.report.engine_reason
    torch.testing.assert_close(made(ids=ids(2, 5)), classifier()(ids(2, 5)))
    made.close()


def test_a_graph_gets_new_weights(store: Path) -> None:
    made, other = compiled(store, BOTH, dynamic=RANGES), classifier()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    made.update_weights(other.state_dict())
    for given in (ids(1, 5), ids(2, 5)):
        torch.testing.assert_close(made(ids=given), other(given))
    assert made.recompiles == 0
    made.close()
