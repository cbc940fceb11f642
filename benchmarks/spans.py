"""Reads the trace file of a boot (OTLP JSON lines, as bentoml_compile.telemetry.file writes them)."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTUP = "torch_compile.startup"


@dataclass(frozen=True, slots=True)
class Span:
    id: str
    parent: str
    name: str
    started_ns: int  # since the epoch
    ended_ns: int
    attributes: dict[str, str]

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.started_ns) / 1e9


def read(path: Path) -> list[Span]:
    """All spans in the file; an empty list if it does not exist."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [_span(raw) for line in lines for raw in _raw_spans(json.loads(line))]


def startup(spans: list[Span]) -> Span | None:
    """The span of the boot's one `compile_model` call; None if the model was not compiled or nothing was traced."""
    return next((span for span in spans if span.name == STARTUP), None)


def stage_seconds(spans: list[Span]) -> dict[str, float]:
    """Seconds of each stage below the startup span, without the stages inside of it; together they are all of it.

    Names are those of the spans without their prefixes (dynamo, inductor, verify, ...); "other" is the startup
    span's own time. The compiler's phases are siblings of which one runs inside another, so a moment belongs to the
    stage that began last, not to a leaf of the tree.
    """
    root = startup(spans)
    stages = list(_below(root, spans)) if root else []
    moments = sorted({moment for span in stages for moment in (span.started_ns, span.ended_ns)})
    seconds: dict[str, float] = defaultdict(float)
    for start, end in itertools.pairwise(moments):
        running = [span for span in stages if span.started_ns <= start and span.ended_ns >= end]
        innermost = max(running, key=lambda span: (span.started_ns, -span.ended_ns), default=root)
        if innermost is not None:
            seconds["other" if innermost is root else innermost.name.rpartition(".")[2]] += (end - start) / 1e9
    return dict(seconds)


def _below(span: Span, spans: list[Span]) -> Iterator[Span]:
    yield span
    for child in spans:
        if child.parent == span.id:
            yield from _below(child, spans)


def _raw_spans(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for resource in line.get("resourceSpans", []):
        for scope in resource["scopeSpans"]:
            yield from scope["spans"]


def _span(raw: dict[str, Any]) -> Span:
    attributes = {one["key"]: str(next(iter(one["value"].values()))) for one in raw.get("attributes", [])}
    started_ns, ended_ns = int(raw["startTimeUnixNano"]), int(raw["endTimeUnixNano"])
    return Span(raw["spanId"], raw.get("parentSpanId", ""), raw["name"], started_ns, ended_ns, attributes)
