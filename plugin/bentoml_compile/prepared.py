"""PreparedShape: one example input, what serves its signature, and how that was decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bentoml_compile.engines.bounds import Bound
from bentoml_compile.report import Engine, ShapeReport
from bentoml_compile.shapes import ExampleInput, Signature


@dataclass(eq=False, slots=True)
class PreparedShape:
    """Filled step by step by a boot, read by every call; implements listener.Executable.

    `run` is compiled code for this signature, None while (or where) eager serves it.
    """

    model: str
    label: str
    signature: Signature | None
    example: ExampleInput
    engine: Engine = "eager"
    run: Callable[..., Any] | None = None
    bounds: tuple[Bound, ...] | None = None  # None: not looked for yet
    computes_indices: bool = False
    writes_inputs: bool = False  # then a call's tensors must not be replaced by copies with other strides
    speedup: float | None = None
    max_error: float | None = None
    reason: str = ""
    prepared: bool = True

    def serve_by(self, engine: Engine, run: Callable[..., Any]) -> None:
        self.engine, self.run, self.reason = engine, run, ""

    def serve_eagerly(self, reason: str) -> None:
        run, self.engine, self.run, self.reason = self.run, "eager", None, reason
        if close := getattr(run, "close", None):  # a library has memory of its own
            close()

    def forget(self) -> None:
        """Back to what it was before anything was found out about it."""
        self.serve_eagerly("")
        self.speedup = self.max_error = self.bounds = None
        self.computes_indices = self.writes_inputs = False

    def report(self) -> ShapeReport:
        return ShapeReport(self.label, self.engine, self.speedup, self.max_error, self.reason)

    def decisions(self) -> dict[str, Any]:
        """What an artifact keeps, so that a warm boot neither verifies nor measures; plain JSON types."""
        bounds = [{**dataclasses.asdict(bound), "path": list(bound.path)} for bound in self.bounds or ()]
        found = {"bounds": bounds, "computes_indices": self.computes_indices, "writes_inputs": self.writes_inputs}
        return {**dataclasses.asdict(self.report()), **found}

    def decide_as(self, decisions: Mapping[str, Any]) -> None:
        """The inverse of `decisions`; whoever loads the code sets `run`."""
        self.engine, self.reason = decisions["engine"], decisions["reason"]
        self.speedup, self.max_error = decisions["speedup"], decisions["max_error"]
        self.bounds = tuple(Bound(**bound) for bound in decisions["bounds"])
        self.computes_indices, self.writes_inputs = decisions["computes_indices"], decisions["writes_inputs"]
