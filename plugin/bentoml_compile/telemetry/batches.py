"""What an adaptive batch cost each of its requests, as a span in the request's own trace.

    batch = Batch([Request(context, queued_ns, rows) for ...])
    token = running_batch.set(batch)
    ...  # SpanListener adds each call of a compiled model that is made in here
    running_batch.reset(token)
    batch.end(errors)

`torch_compile.batch` is a child of the request's span and lasts from the moment that the request queued to the batch's
end: `queue_seconds`, then `batch_seconds`, of which the request's part is `share_seconds`, by its rows. It links to the
batch's inference spans, which are in one trace only. Its `compile_seconds` are the whole batch's, since all wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, Tracer

from bentoml_compile.listener import Call, Value
from bentoml_compile.telemetry.attributes import PREFIX, fail, prefixed, split_seconds


@dataclass(frozen=True, slots=True)
class Request:
    """One that a batch answers, or as much of it as is in the batch. `queued_ns` is in nanoseconds since the epoch."""

    context: Context
    queued_ns: int
    rows: int

    @property
    def span(self) -> SpanContext:
        return trace.get_current_span(self.context).get_span_context()


class Batch:
    """A batch at least one of whose requests is sampled; it runs from now on, or from `begin`, until `end`."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = tuple(requests)
        self._started_ns = time.time_ns()
        self._has_begun = False
        self._calls: list[tuple[Call, SpanContext]] = []
        self._tracer: Tracer | None = None
        spans = (request.span for request in self._requests)
        self.spans = tuple({span.span_id: span for span in spans if span.is_valid}.values())  # unsampled ones, too

    def begin(self) -> None:
        """Its method runs now: until here, it waited for a thread."""
        if not self._has_begun:
            self._has_begun = True
            self._started_ns = time.time_ns()

    def add(self, tracer: Tracer, call: Call, span: SpanContext) -> None:
        """A call of a compiled model, and its span."""
        self._tracer = tracer
        self._calls.append((call, span))

    def end(self, errors: Sequence[BaseException | None]) -> None:
        """Exports a span for each sampled request, if a compiled model was called.

        Args:
            errors: what each request was answered with in place of a result.
        """
        if self._tracer is None:
            return
        ended_ns = time.time_ns()
        links = [Link(span) for _, span in self._calls]
        for request, error in zip(self._requests, errors, strict=True):
            if request.span.trace_flags.sampled:
                attributes = prefixed(self._attributes(request, ended_ns))
                span = self._tracer.start_span(
                    PREFIX + "batch", request.context, attributes=attributes, links=links, start_time=request.queued_ns
                )
                if error is not None:
                    fail(span, error, ended_ns)
                span.end(ended_ns)

    def _attributes(self, request: Request, ended_ns: int) -> dict[str, Value | None]:
        rows = sum(one.rows for one in self._requests)
        share = request.rows / rows if rows else 1 / len(self._requests)
        seconds = (ended_ns - self._started_ns) / 1e9
        return {
            "batch_size": rows,
            "batch_requests": len(self._requests),
            "share": share,
            "queue_seconds": max(0, self._started_ns - request.queued_ns) / 1e9,
            "batch_seconds": seconds,
            "share_seconds": share * seconds,
            "compile_seconds": sum(split_seconds(call)["compile_seconds"] for call, _ in self._calls),
        }


running_batch: ContextVar[Batch | None] = ContextVar("running_batch", default=None)
"""The batch that is being answered here, if any of its requests is sampled; set by `bento.batching`."""
