"""What spans and metrics say of a call, in the names that they share."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.trace import Span, Status, StatusCode

from bentoml_compile.listener import Call, Value

PREFIX = "torch_compile."


def prefixed(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    """As a span's attributes; those that are None are left out."""
    return {PREFIX + name: value for name, value in attributes.items() if value is not None}


def fail(span: Span, error: BaseException, time_ns: int | None) -> None:
    span.record_exception(error, timestamp=time_ns)
    span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))


def split_seconds(call: Call) -> dict[str, float]:
    """A call's length as compile_seconds, inference_seconds and queue_seconds, which sum to it.

    Compiles that overlap (a nested frame) count once, and only as far as they lie inside of the call.
    """
    length = call.ended_ns - call.started_ns
    compiling = _compiling_ns(call) if call.compiles else 0
    queued = min(max(0, int(call.queue_seconds * 1e9)), length - compiling)
    return {
        "compile_seconds": compiling / 1e9,
        "inference_seconds": (length - compiling - queued) / 1e9,
        "queue_seconds": queued / 1e9,
    }


def _compiling_ns(call: Call) -> int:
    compiling, covered_to = 0, call.started_ns
    for compile_ in sorted(call.compiles, key=lambda one: one.started_ns):
        end = min(compile_.ended_ns, call.ended_ns)
        compiling += max(0, end - max(compile_.started_ns, covered_to))
        covered_to = max(covered_to, end)
    return compiling
