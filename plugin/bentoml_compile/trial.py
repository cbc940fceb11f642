"""Verify and measure one prepared shape: may its compiled code serve, and is it worth it?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bentoml_compile.config import VerifyConfig
from bentoml_compile.engines.bounds import Bound
from bentoml_compile.engines.eager import call, device_of, eager_callable
from bentoml_compile.engines.failures import Failure, classify
from bentoml_compile.engines.measure import measure
from bentoml_compile.engines.verify import compare, in_higher_precision
from bentoml_compile.prepared import PreparedShape
from bentoml_compile.shapes import ExampleInput

logger = logging.getLogger("bentoml_compile")


@dataclass(frozen=True, slots=True)
class Trial:
    """Compares the compiled code of a model's shapes with the model."""

    model: torch.nn.Module
    method: str
    names: tuple[str, ...]  # of the method's positional parameters

    def verify(self, shape: PreparedShape, config: VerifyConfig) -> Failure | None:
        """Notes the largest error on the shape; the failure if the compiled result is not eager's.

        Two inputs of the same signature: the example, and one of other values.
        """
        shape.max_error = 0.0
        failure = self._verify_input(shape, shape.example, config)
        if failure is not None:
            return failure
        other = varied(shape.example, shape.bounds or (), self.names)
        try:
            call(self._eager, other.clone())
        except Exception:  # not every value of an input need make sense to a model
            logger.debug("model %r: no second input of %s to verify with", shape.model, shape.label, exc_info=True)
            return None
        return self._verify_input(shape, other, config)

    def measure(self, shape: PreparedShape) -> Failure | None:
        """Notes the speed-up on the shape, and serves it eagerly if compiled is slower; a failure if a run raises."""
        run, eager = _compiled(shape), self._eager
        inputs = shape.example.clone()
        try:
            speedup = measure(
                lambda: run(*inputs.args, **inputs.kwargs), lambda: call(eager, inputs), device_of(self.model)
            )
        except Exception as error:
            return classify(error)
        shape.speedup = speedup.ratio
        if speedup.slower:
            ratio = f"{speedup.ratio:.2f} of eager's speed in {speedup.pairs} runs of each"
            shape.serve_eagerly(f"compiled is slower: {ratio}")
        return None

    def _verify_input(self, shape: PreparedShape, inputs: ExampleInput, config: VerifyConfig) -> Failure | None:
        try:
            expected, actual = call(self._eager, inputs.clone()), call(_compiled(shape), inputs.clone())
            comparison = compare(expected, actual, config=config, reference=lambda: self._exact(inputs.clone()))
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            return Failure("verification", f"could not be compared: {type(error).__name__}: {first_line}")
        shape.max_error = max(shape.max_error or 0.0, comparison.max_error)
        if not comparison.problem:
            return None
        again = compare(expected, call(self._eager, inputs.clone()), config=config)
        if again.problem:
            words = (
                f"eager gives another result each time ({again.problem}); does it draw random numbers or keep state?"
            )
            return Failure("verification", words)
        return Failure("verification", f"compiled differs from eager: {comparison.problem}")

    @property
    def _eager(self) -> Callable[..., Any]:
        return eager_callable(self.model, self.method)

    def _exact(self, inputs: ExampleInput) -> Any:
        with torch.inference_mode():
            return in_higher_precision(self.model, self.method, inputs)


def varied(example: ExampleInput, bounds: Sequence[Bound], names: tuple[str, ...]) -> ExampleInput:
    """Another input of the example's signature: random values where any will do, else the example's in other places.

    Integers that index a table stay within it; other integers and booleans (masks, flags) are shuffled.
    """
    limits = {(bound.name, *bound.path): bound for bound in bounds}

    def other(name: str, value: Any, path: tuple[Any, ...] = ()) -> Any:
        if isinstance(value, torch.Tensor):
            return _other_values(value, limits.get((name, *path)))
        if isinstance(value, dict):
            return {key: other(name, item, (*path, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(other(name, item, (*path, index)) for index, item in enumerate(value))
        return value

    args = tuple(other(names[i] if i < len(names) else "", value) for i, value in enumerate(example.args))
    return ExampleInput(args, {name: other(name, value) for name, value in example.kwargs.items()})


def _other_values(value: torch.Tensor, bound: Bound | None) -> torch.Tensor:
    result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if value.is_floating_point() or value.is_complex():
        result.copy_(torch.randn(value.shape, device=value.device) * _scale(value))
    elif bound is not None:
        result.copy_(torch.randint(bound.low, bound.high + 1, value.shape, device=value.device))
    else:
        order = torch.randperm(value.numel(), device=value.device)
        result.copy_(value.reshape(-1)[order].reshape(value.shape))
    return result.requires_grad_(value.requires_grad)


def _scale(value: torch.Tensor) -> float:
    largest = float(value.detach().abs().max()) if value.numel() else 1.0
    return largest if 0.0 < largest < float("inf") else 1.0


def _compiled(shape: PreparedShape) -> Callable[..., Any]:
    assert shape.run is not None, "only a shape with compiled code is on trial"
    return shape.run
