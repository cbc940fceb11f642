"""What a boot did, as plain values: the answer to "was it compiled, what did it cost, and why not?"."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Engine = Literal["jit", "aot", "eager"]
Outcome = Literal["compiled", "loaded", "eager"]


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """One place where Dynamo could not continue the graph."""

    file: str
    line: int
    source: str  # the text of that line
    reason: str
    hint: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else "(unknown place)"
        text = f"{where}: {self.source}\n    reason: {self.reason}"
        return f"{text}\n    hint: {self.hint}" if self.hint else text


@dataclass(frozen=True, slots=True)
class ShapeReport:
    """One prepared shape: what serves it and how that was decided."""

    signature: str  # e.g. "attention_mask: int64[2, 12], input_ids: int64[2, 12]"
    engine: Engine
    speedup: float | None = None  # eager seconds / compiled seconds, median; None: not measured
    max_error: float | None = None  # largest absolute difference to eager; None: not verified
    reason: str = ""  # why this shape is served eagerly, if it is


def in_words(shapes: Iterable[ShapeReport]) -> str:
    """For the log: what serves each shape."""
    return ", ".join(
        f"{shape.signature} → {shape.engine}" + (f" ({shape.speedup:.2f}x)" if shape.speedup else "")
        for shape in shapes
    )


@dataclass(frozen=True, slots=True)
class Rejection:
    """An artifact that was looked at and passed over."""

    artifact: str
    reason: str  # names the axis that differs and both values, or the file that is damaged


@dataclass(frozen=True, slots=True)
class CompileReport:
    """The result of one `compile_model` call.

    `engine` is the one that serves the majority of the prepared shapes. `outcome` is "compiled" if any shape was
    compiled in this boot, else "loaded" if any came from an artifact, else "eager". `seconds` is the whole call;
    `phases` splits its compiling by torch's own phases (seconds, each without the phases inside of it).
    """

    model: str
    engine: Engine
    outcome: Outcome
    seconds: float
    fingerprint: str
    mode: str
    fullgraph: bool  # True: every prepared shape is one graph
    phases: dict[str, float] = field(default_factory=dict)
    shapes: tuple[ShapeReport, ...] = ()
    graph_breaks: tuple[GraphBreak, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    fallback: str = ""  # why the model as a whole is served eagerly, if it is
    engine_reason: str = ""  # why torch.compile serves where the ahead-of-time engine was asked first
    place: str = ""  # where a loaded model's artifact was found: bento, store, remote

    def to_dict(self) -> dict[str, Any]:
        """A copy of plain JSON types: dicts, lists, text, numbers, booleans and None."""
        values = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
