"""Verify and measure one prepared shape: may its compiled code serve, and is it worth it?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bentoml_compile.config import VerifyConfig
from bentoml_compile.engines.eager import call, device_of, eager_callable
from bentoml_compile.engines.failures import Failure, classify
from bentoml_compile.engines.measure import measure
from bentoml_compile.engines.verify import compare, in_higher_precision
from bentoml_compile.prepared import PreparedShape
from bentoml_compile.shapes import ExampleInput


@dataclass(frozen=True, slots=True)
class Trial:
    """Compares the compiled code of a model's shapes with the model."""

    model: torch.nn.Module
    method: str

    def verify(self, shape: PreparedShape, config: VerifyConfig) -> Failure | None:
        """Notes the largest error on the shape; the failure if the compiled result is not eager's."""
        run = _compiled(shape)
        try:
            expected = call(eager_callable(self.model, self.method), shape.example.clone())
            actual = call(run, shape.example.clone())
            comparison = compare(expected, actual, config=config, reference=lambda: self._exact(shape.example.clone()))
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            return Failure("verification", f"could not be compared: {type(error).__name__}: {first_line}")
        shape.max_error = comparison.max_error
        if not comparison.problem:
            return None
        again = compare(expected, call(eager_callable(self.model, self.method), shape.example.clone()), config=config)
        if again.problem:
            words = (
                f"eager gives another result each time ({again.problem}); does it draw random numbers or keep state?"
            )
            return Failure("verification", words)
        return Failure("verification", f"compiled differs from eager: {comparison.problem}")

    def measure(self, shape: PreparedShape) -> Failure | None:
        """Notes the speed-up on the shape, and serves it eagerly if compiled is slower; a failure if a run raises."""
        run, eager = _compiled(shape), eager_callable(self.model, self.method)
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

    def _exact(self, inputs: ExampleInput) -> Any:
        with torch.inference_mode():
            return in_higher_precision(self.model, self.method, inputs)


def _compiled(shape: PreparedShape) -> Callable[..., Any]:
    assert shape.run is not None, "only a shape with compiled code is on trial"
    return shape.run
