"""Verify and measure one prepared shape: may its compiled code serve, and is it worth it?"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bentoml_compile.config import VerifyConfig
from bentoml_compile.engines.eager import call, device_of
from bentoml_compile.engines.failures import Failure, classify
from bentoml_compile.engines.measure import measure
from bentoml_compile.engines.verify import compare, in_higher_precision, varied
from bentoml_compile.prepared import PreparedShape, Target
from bentoml_compile.shapes import ExampleInput, describe
from bentoml_compile.words import first_line

logger = logging.getLogger("bentoml_compile")


@dataclass(frozen=True, slots=True)
class Trial:
    """Compares the compiled code of a target's shapes with the model."""

    target: Target

    def verify(self, shape: PreparedShape, config: VerifyConfig) -> Failure | None:
        """Notes the largest error on the shape; the failure if a compiled result is not eager's.

        Its inputs are the example, one of other values, and one of other values at each corner of its ranges.
        """
        shape.max_error = 0.0
        example, *corners = shape.inputs()
        for inputs in (example, self._other(shape, example), *(self._other(shape, corner) for corner in corners)):
            failure = self._verify_input(shape, inputs, config)
            if failure is not None:
                return failure
        return None

    def _other(self, shape: PreparedShape, example: ExampleInput) -> ExampleInput:
        """Not every value of an input need make sense to a model: then it is the example."""
        other = varied(example, shape.bounds or (), self.target.names)
        try:
            call(self.target.trial, other.clone())
            return other
        except Exception:
            logger.debug("model %r: no other values of %s to verify with", shape.model, shape.label, exc_info=True)
            return example

    def measure(self, shape: PreparedShape) -> Failure | None:
        """Notes the speed-up on the shape, and serves it eagerly if compiled is slower; a failure if a run raises."""
        run, eager = _compiled(shape), self.target.trial
        inputs = shape.example.clone()
        try:
            speedup = measure(
                lambda: run(*inputs.args, **inputs.kwargs), lambda: call(eager, inputs), device_of(self.target.model)
            )
        except Exception as error:
            return classify(error)
        shape.speedup = speedup.ratio
        if speedup.slower:
            ratio = f"{speedup.ratio:.2f} of eager's speed in {speedup.pairs} runs of each"
            shape.serve_eagerly(f"compiled is slower: {ratio}")
        return None

    def _verify_input(self, shape: PreparedShape, inputs: ExampleInput, config: VerifyConfig) -> Failure | None:
        at = f" at ({describe(inputs, shape.names)})" if shape.sizes else ""
        try:
            expected, actual = call(self.target.trial, inputs.clone()), call(_compiled(shape), inputs.clone())
            comparison = compare(expected, actual, config=config, reference=lambda: self._exact(inputs.clone()))
            again = comparison
            if comparison.problem:
                again = compare(expected, call(self.target.trial, inputs.clone()), config=config)
        except Exception as error:
            return Failure("verification", f"could not be compared{at}: {type(error).__name__}: {first_line(error)}")
        shape.max_error = max(shape.max_error or 0.0, comparison.max_error)
        if not comparison.problem:
            return None
        if again.problem:
            words = (
                f"eager gives another result each time ({again.problem}); does it draw random numbers or keep state?"
            )
            return Failure("verification", words)
        return Failure("verification", f"compiled differs from eager{at}: {comparison.problem}")

    def _exact(self, inputs: ExampleInput) -> Any:
        with torch.inference_mode():
            return in_higher_precision(self.target.model, self.target.method, inputs)


def _compiled(shape: PreparedShape) -> Callable[..., Any]:
    assert shape.run is not None, "only a shape with compiled code is on trial"
    return shape.run
