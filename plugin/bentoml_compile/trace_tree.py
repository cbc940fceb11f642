"""Traces in OTLP JSON lines as indented trees: where a boot's or a request's time went, without a collector.

Source of the format: https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from bentoml_compile.words import one_line

_PREFIX = "torch_compile."
_LONG = 60  # characters of an attribute's value
_ERROR = (2, "STATUS_CODE_ERROR")
_STATUS = ("http.response.status_code", "http.status_code")  # by the conventions of 2023, and before


@dataclass(frozen=True, slots=True)
class Span:
    """One span; times in nanoseconds since the epoch."""

    trace: str
    id: str
    parent: str
    name: str
    started: int
    ended: int
    attributes: dict[str, Any] = field(default_factory=dict)
    events: tuple[tuple[str, dict[str, Any]], ...] = ()
    error: str | None = None

    @property
    def length(self) -> int:
        return self.ended - self.started


@dataclass(frozen=True, slots=True)
class Traces:
    """All traces of a file, the one that began last at the end, and how many lines could not be read."""

    traces: tuple[tuple[Span, ...], ...]
    unreadable: int


def read_traces(lines: Iterable[str]) -> Traces:
    """Collect the spans of each trace; a line that is cut off, e.g. by a kill, is counted and skipped."""
    by_trace: dict[str, dict[str, Span]] = defaultdict(dict)
    unreadable = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            spans = list(_spans(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError):
            unreadable += 1
            continue
        for span in spans:
            by_trace[span.trace][span.id] = span
    traces = [tuple(sorted(spans.values(), key=lambda span: span.started)) for spans in by_trace.values()]
    return Traces(tuple(sorted(traces, key=lambda trace: trace[0].started)), unreadable)


def render(trace: tuple[Span, ...]) -> Iterator[str]:
    """A heading, then one line for each span and each of its events.

    A span shows its length in ms, its share of its parent's length and its `torch_compile.*` attributes. One whose
    parent is not in the file (it was not sampled, or is still open) stands at the top.
    """
    known = {span.id for span in trace}
    children: dict[str, list[Span]] = defaultdict(list)
    for span in trace:
        children[span.parent if span.parent in known and span.parent != span.id else ""].append(span)
    began = datetime.fromtimestamp(trace[0].started / 1e9).astimezone()
    yield f"trace {trace[0].trace}  {began:%Y-%m-%d %H:%M:%S}"
    rows = list(_rows(children, "", None, depth=1))
    width = max((len(label) for label, _ in rows), default=0)
    yield from (f"{label:{width}}  {text}".rstrip() for label, text in rows)


def _rows(
    children: dict[str, list[Span]], parent_id: str, parent: Span | None, depth: int
) -> Iterator[tuple[str, str]]:
    indent = "  " * depth
    for span in children[parent_id]:
        share = (
            f"{100 * span.length / parent.length:3.0f}%"
            if parent is not None and span.length <= parent.length > 0
            else "    "
        )
        yield (
            f"{indent}{span.name}",
            f"{span.length / 1e6:10.1f} ms  {share}  {_shown(span.attributes)}{_failure(span)}",
        )
        for name, attributes in span.events:
            yield f"{indent}  * {name}", _shown(attributes)
        yield from _rows(children, span.id, span, depth + 1)


def _failure(span: Span) -> str:
    """A server's span says of an answer like 500 no more than its status."""
    if span.error is None:
        return ""
    status = next((span.attributes[name] for name in _STATUS if name in span.attributes), None)
    return f"  error: {one_line(span.error) or ('unknown' if status is None else f'HTTP status {status}')}"


def _shown(attributes: dict[str, Any]) -> str:
    names = [name for name in attributes if name.startswith(_PREFIX) or name in ("reason", "exception.message")]
    return " ".join(f"{name.removeprefix(_PREFIX)}={_short(attributes[name])}" for name in names)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else one_line(value)
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def _spans(request: dict[str, Any]) -> Iterator[Span]:
    for resource in request.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                status = span.get("status") or {}
                yield Span(
                    trace=span["traceId"],
                    id=span["spanId"],
                    parent=span.get("parentSpanId") or "",
                    name=span["name"],
                    started=int(span["startTimeUnixNano"]),
                    ended=int(span["endTimeUnixNano"]),
                    attributes=_attributes(span),
                    events=tuple((event["name"], _attributes(event)) for event in span.get("events", ())),
                    error=status.get("message", "") if status.get("code") in _ERROR else None,
                )


def _attributes(owner: dict[str, Any]) -> dict[str, Any]:
    return {entry["key"]: _value(entry.get("value") or {}) for entry in owner.get("attributes", ())}


def _value(value: dict[str, Any]) -> Any:
    """An AnyValue; 64-bit integers come as strings."""
    for kind, content in value.items():
        if kind == "intValue":
            return int(content)
        if kind == "arrayValue":
            return [_value(item) for item in content.get("values", ())]
        if kind == "kvlistValue":
            return {entry["key"]: _value(entry.get("value") or {}) for entry in content.get("values", ())}
        return content
    return None
