"""`dynamic: {argument: {dim: [min, max]}}`: one compiled graph for a range of sizes, right at all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bentoml_compile.config import CompileConfig
from bentoml_compile.engines.build import Record, examine
from bentoml_compile.errors import ConfigError, UnpreparedInputError
from bentoml_compile.listener import Call, Listener
from bentoml_compile.model import CompiledModel, compile_model
from bentoml_compile.prepared import Target
from bentoml_compile.shapes import ExampleInput
from tests.models import classifier, ids

RANGES = {name: {"0": [1, 6], "1": [2, 16]} for name in ("ids", "mask")}
FAST = {"backend": "eager", "keep_eager_if_slower": False, "dynamic": RANGES}
EXAMPLE = {"ids": ids(2, 5), "mask": torch.ones(2, 5)}


class Calls(Listener):
    """What served each call."""

    def __init__(self) -> None:
        self.served: list[tuple[str, str, str | None]] = []

    def called(self, call: Call) -> None:
        self.served.append((call.executable.engine, call.executable.label, call.fallback))


class Ones(nn.Module):
    """Does something else at a batch of one, as squeeze() and broadcasting do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.head(x)
        return (hidden * 100 if x.shape[0] == 1 else hidden).squeeze()


class Rows(nn.Module):
    """What may be picked depends on how many rows there are."""

    def forward(self, rows: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        return rows.index_select(0, picked) * 2


def compiled(model: nn.Module, examples: list[Any], **config: Any) -> tuple[CompiledModel, Calls]:
    calls, store = Calls(), config.pop("store", None)
    made = compile_model(
        model, example_inputs=examples, config={**FAST, **config}, listeners=[calls], default_store=store
    )
    return made, calls


@pytest.fixture
def closing() -> Iterator[list[CompiledModel]]:
    made: list[CompiledModel] = []
    yield made
    for model in made:
        model.close()


def test_every_size_of_a_range_runs_compiled_code_and_is_right(closing: list[CompiledModel], tmp_path: Path) -> None:
    model = classifier()
    for outcome in ("compiled", "loaded"):
        made, calls = compiled(model, [EXAMPLE], store=tmp_path)
        closing.append(made)
        assert made.report.outcome == outcome or made.report.engine == "jit"
        for batch in (1, 2, 6):
            for length in (2, 9, 16):
                given = {"ids": ids(batch, length), "mask": torch.rand(batch, length)}
                torch.testing.assert_close(made(**given), model(**given))
        assert {served[0] for served in calls.served} == {"jit"}
        assert {served[2] for served in calls.served} == {None}
        assert {served[1] for served in calls.served} == {
            "ids: int64[1, 2..16], mask: float32[1, 2..16]",  # a size of 1 is a constant to Dynamo
            "ids: int64[2..6, 2..16], mask: float32[2..6, 2..16]",
        }
        made.close()


@pytest.mark.parametrize(("batch", "length"), [(7, 5), (2, 17), (2, 1)])
def test_a_size_outside_of_a_range_is_not_prepared(closing: list[CompiledModel], batch: int, length: int) -> None:
    made, _ = compiled(classifier(), [EXAMPLE], on_unprepared="reject")
    closing.append(made)
    with pytest.raises(UnpreparedInputError, match=r"ids: int64\[2\.\.6, 2\.\.16\]"):
        made(ids=ids(batch, length), mask=torch.ones(batch, length))


def test_sizes_that_must_be_equal_and_are_not_are_for_eager_to_judge(closing: list[CompiledModel]) -> None:
    made, calls = compiled(classifier(), [EXAMPLE])
    closing.append(made)
    with pytest.raises(RuntimeError, match="must match"):
        made(ids=ids(2, 5), mask=torch.ones(2, 6))
    made(ids=ids(2, 5), mask=torch.ones(1, 5))  # broadcasts
    assert [served[:2] for served in calls.served] == [("eager", "unprepared")] * 2


def test_an_end_of_a_range_that_the_model_cannot_run_stops_the_boot_and_is_named() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Embedding(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.positions(torch.arange(x.shape[1]))

    with pytest.raises(
        ConfigError, match=r"(?s)an end of the range x: float32\[2, 2\.\.9, 4\], .*\[2, 9, 4\].*dynamic"
    ):
        compiled(Positions(), [(torch.rand(2, 5, 4),)], dynamic={"x": {"1": [2, 9]}})


def test_a_model_that_does_something_else_within_a_range_is_served_eagerly_there(closing: list[CompiledModel]) -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.shape[0] > 3 else x - 1

    made, _ = compiled(Branch(), [(torch.rand(2, 4),)], dynamic={"x": {"0": [2, 8]}})
    closing.append(made)
    [shape] = made.report.shapes
    assert shape.engine == "eager"
    assert "x" in shape.reason
    for batch in (2, 3, 4, 8):
        x = torch.rand(batch, 4)
        torch.testing.assert_close(made(x), Branch()(x))


_ramps: dict[int, torch.Tensor] = {}


@torch._dynamo.allow_in_graph
def ramped(x: torch.Tensor) -> torch.Tensor:
    """Dynamo does not look into it, and runs it with fake tensors."""
    size = int(x.shape[1])
    if size not in _ramps:
        _ramps[size] = torch.ones(size).cumsum(0)
    return x * _ramps[size]


class Ramped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ramped(x) + 1


def test_what_a_model_keeps_by_size_is_real_at_the_sizes_that_are_traced(closing: list[CompiledModel]) -> None:
    """Equal sizes of two ranges are traced at different ones: [5, 4] here."""
    made, _ = compiled(Ramped(), [(torch.rand(5, 5),)], engine="jit", dynamic={"x": {"0": [2, 8], "1": [2, 5]}})
    closing.append(made)
    assert 4 in _ramps
    for length in (2, 3, 4, 5):
        torch.testing.assert_close(made(torch.ones(3, length)), torch.arange(2.0, length + 2).expand(3, length))


def test_an_index_whose_bound_grows_with_a_size_is_left_to_code_that_stands_a_wrong_one() -> None:
    config = CompileConfig.model_validate({"dynamic": {"rows": {"0": [2, 9]}}})
    example = ExampleInput((), {"rows": torch.rand(4, 3), "picked": torch.tensor([0, 1])})
    target = Target(Rows(), "forward", "rows", config, ("rows", "picked"), (example,))
    [shape] = target.shapes
    examine(target, shape, Record())
    assert shape.bounds == ()
    assert shape.computes_indices
    fixed = Target(Rows(), "forward", "rows", CompileConfig(), ("rows", "picked"), (example,))
    examine(fixed, fixed.shapes[0], Record())
    assert [(bound.low, bound.high) for bound in fixed.shapes[0].bounds or ()] == [(0, 3)]


def test_a_range_that_export_gets_wrong_at_one_gets_a_package_of_its_own_there(
    closing: list[CompiledModel], tmp_path: Path
) -> None:
    model, wanted = Ones().eval(), {"x: float32[1, 3..9, 4]", "x: float32[2..8, 3..9, 4]"}
    for outcome in ("compiled", "loaded"):
        made, calls = compiled(
            model,
            [(torch.rand(1, 5, 4),)],
            store=tmp_path,
            dynamic={"x": {"0": [1, 8], "1": [3, 9]}},
            engine="aot",
            backend="inductor",
        )
        closing.append(made)
        assert made.report.outcome == outcome
        assert {shape.signature for shape in made.report.shapes} == wanted
        for batch in (1, 2, 5, 8):
            for length in (3, 4, 9):
                x = torch.rand(length, batch, 4).transpose(0, 1) if length == 4 else torch.rand(batch, length, 4)
                torch.testing.assert_close(made(x), model(x))
        assert {served[:2] for served in calls.served} == {("aot", label) for label in wanted}
        assert {served[2] for served in calls.served} == {None}
        made.close()
