from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BatchEncoding

from bentoml_compile.config import VerifyConfig
from bentoml_compile.engines.verify import compare, in_higher_precision, varied
from bentoml_compile.shapes import ExampleInput

DEFAULT = VerifyConfig()


def problem(eager: Any, compiled: Any, config: VerifyConfig = DEFAULT, reference: Any = None) -> str:
    return compare(eager, compiled, config=config, reference=reference).problem


def test_equal_outputs_have_no_problem_and_no_error() -> None:
    comparison = compare({"a": torch.ones(3)}, {"a": torch.ones(3)}, config=DEFAULT)
    assert comparison.problem == ""
    assert comparison.max_error == 0.0


def test_the_largest_difference_is_reported() -> None:
    comparison = compare(torch.zeros(3), torch.tensor([0.0, 0.25, -0.5]), config=DEFAULT)
    assert comparison.max_error == 0.5
    assert "not close" in comparison.problem


def test_float32_uses_torch_testings_tolerances() -> None:
    one = torch.ones(4)
    assert problem(one, one * (1 + 1.2e-6)) == ""
    assert problem(one, one * (1 + 2e-5)) != ""
    assert problem(one, one * (1 + 2e-5), VerifyConfig(rtol=1e-4)) == ""


def test_equal_nan_is_equal_and_a_new_nan_is_not() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert problem(nan, nan.clone()) == ""
    assert problem(torch.ones(2), nan) != ""


@pytest.mark.parametrize(
    ("eager", "compiled", "word"),
    [
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "dtype"),
        (torch.ones(2), torch.ones(1, 2), "shape"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2"),
        (torch.tensor([True]), torch.tensor([False]), "1 of 1"),
        ((torch.ones(1), 3), (torch.ones(1), 4), "4 instead of 3"),
        ((torch.ones(1),), [torch.ones(1)], "structure"),
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}, "structure"),
        ((torch.ones(1), None), (torch.ones(1), torch.ones(1)), ""),
    ],
)
def test_other_kinds_of_difference_are_named(eager: Any, compiled: Any, word: str) -> None:
    found = problem(eager, compiled)
    assert found
    assert word in found


def test_below_float32_compiled_may_be_as_far_from_the_truth_as_eager() -> None:
    exact = torch.linspace(1, 100, 64, dtype=torch.float64)
    eager = (exact + 0.4).to(torch.bfloat16)
    on_the_other_side = (exact - 0.4).to(torch.bfloat16)
    far = (exact + 5).to(torch.bfloat16)
    tight = VerifyConfig(rtol=0, atol=0)
    assert problem(eager, on_the_other_side, tight, lambda: exact) == ""
    assert "allowed" in problem(eager, far, tight, lambda: exact)


def test_below_float32_a_new_infinity_is_a_problem() -> None:
    eager = torch.ones(2, dtype=torch.float16)
    assert "infinity" in problem(
        eager, torch.tensor([1.0, float("inf")], dtype=torch.float16), DEFAULT, lambda: eager.double()
    )


def test_the_reference_runs_in_float64_on_a_copy() -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    inputs = ExampleInput((torch.ones(1, 4, dtype=torch.bfloat16),), {})
    exact = in_higher_precision(model, "forward", inputs)
    assert exact.dtype is torch.float64
    assert model.weight.dtype is torch.bfloat16
    torch.testing.assert_close(exact, model.double()(inputs.args[0].double()))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_other_values_of_float8_are_finite(dtype: torch.dtype) -> None:
    given = torch.linspace(1, torch.finfo(dtype).max, 64).to(dtype)
    (other,) = varied(ExampleInput((given,), {}), (), ("x",)).args
    assert other.dtype is dtype
    assert other.float().isfinite().all()
    assert not torch.equal(other.float(), given.float())


def test_a_dtype_without_operators_keeps_its_values() -> None:
    given = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    (other,) = varied(ExampleInput((given,), {}), (), ("x",)).args
    assert torch.equal(other.view(torch.uint8), given.view(torch.uint8))
    assert other.data_ptr() != given.data_ptr()


class OfBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.bfloat16)

    def forward(self, batch: Any) -> Any:
        return self.linear(batch["x"])


def test_tensors_inside_of_any_container_are_varied_and_cast() -> None:
    inputs = ExampleInput((BatchEncoding({"x": torch.ones(1, 4, dtype=torch.bfloat16)}),), {})
    (other,) = varied(inputs, (), ("batch",)).args
    assert type(other) is BatchEncoding
    assert not torch.equal(other["x"], inputs.args[0]["x"])
    assert in_higher_precision(OfBatch(), "forward", inputs).dtype is torch.float64


@dataclass
class Opaque:
    value: int


class Cache:
    def __init__(self, value: float) -> None:
        self.layers = [{"keys": torch.full((2,), value)}]
        self.owner = self


def test_objects_are_compared_by_their_attributes() -> None:
    assert problem((torch.ones(1), Cache(1.0)), (torch.ones(1), Cache(1.0))) == ""
    assert "not close" in problem((torch.ones(1), Cache(1.0)), (torch.ones(1), Cache(1.5)))


def test_outputs_that_are_no_tensors_are_compared_by_value() -> None:
    assert problem((torch.ones(1), Opaque(1)), (torch.ones(1), Opaque(1))) == ""
    assert problem((torch.ones(1), Opaque(1)), (torch.ones(1), Opaque(2))) != ""
