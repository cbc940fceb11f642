"""A real OTLP/HTTP trace receiver for tests: decodes what an exporter posts and keeps the spans.

with OtlpReceiver() as receiver:
    ...  # point an exporter at receiver.endpoint
    [span] = receiver.wait_for("torch_compile.startup")
    assert span.attributes["torch_compile.model"] == "encoder"
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanProto
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.waiting import PATIENCE


@dataclass(frozen=True)
class SpanEvent:
    name: str
    time_ns: int
    attributes: dict[str, Any]


@dataclass(frozen=True)
class SpanLink:
    trace_id: str
    span_id: str


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it was exported; ids are lower-case hex, `parent_id` is "" for a root, times are epoch nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[SpanEvent, ...]
    links: tuple[SpanLink, ...]
    is_error: bool
    status_message: str
    scope: str
    resource: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class OtlpReceiver:
    """Listens on a free port of 127.0.0.1 from construction until `close()` (or the end of a `with`)."""

    def __init__(self) -> None:
        self._spans: list[ReceivedSpan] = []
        self._arrived = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler_class())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def base_url(self) -> str:
        """For OTEL_EXPORTER_OTLP_ENDPOINT, to which exporters add /v1/traces."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def endpoint(self) -> str:
        """The full address, for BentoML's `tracing.otlp.endpoint` and OTEL_EXPORTER_OTLP_TRACES_ENDPOINT."""
        return f"{self.base_url}/v1/traces"

    def tracing_config(self, sample_rate: float) -> dict[str, Any]:
        """The `tracing` section that exports to this receiver; BentoML 1.4 reads it under `services.<name>`."""
        otlp = {"protocol": "http", "endpoint": self.endpoint}
        return {"exporter_type": "otlp", "sample_rate": float(sample_rate), "otlp": otlp}

    def spans(self, name: str | None = None) -> list[ReceivedSpan]:
        """What arrived so far, in order of arrival; only spans called `name` if given."""
        with self._arrived:
            return [span for span in self._spans if name is None or span.name == name]

    def wait_for(self, name: str, count: int = 1, deadline: float = PATIENCE) -> list[ReceivedSpan]:
        """At least `count` spans called `name`; AssertionError naming what came instead after `deadline` seconds."""
        return self.wait_until(lambda spans: [span for span in spans if span.name == name], count, name, deadline)

    def wait_until(
        self,
        select: Callable[[list[ReceivedSpan]], list[ReceivedSpan]],
        count: int = 1,
        what: str = "spans",
        deadline: float = PATIENCE,
    ) -> list[ReceivedSpan]:
        """Like `wait_for`, for any choice among all spans that arrived."""
        ends = time.monotonic() + deadline
        with self._arrived:
            while len(found := select(list(self._spans))) < count:
                left = ends - time.monotonic()
                if left <= 0:
                    names = sorted(span.name for span in self._spans)
                    raise AssertionError(f"{count} x {what} wanted, {len(found)} came in {deadline} s; spans: {names}")
                self._arrived.wait(left)
            return found

    def clear(self) -> None:
        with self._arrived:
            self._spans.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> OtlpReceiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self, body: bytes) -> None:
        decoded = _decode(body)
        with self._arrived:
            self._spans.extend(decoded)
            self._arrived.notify_all()

    def _handler_class(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path == "/v1/traces":
                    receiver._receive(body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


def _decode(body: bytes) -> list[ReceivedSpan]:
    request = ExportTraceServiceRequest()
    request.ParseFromString(body)
    return [
        _span(span, scope_spans.scope.name, _attributes(resource_spans.resource.attributes))
        for resource_spans in request.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


def _span(span: SpanProto, scope: str, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=tuple(SpanEvent(e.name, e.time_unix_nano, _attributes(e.attributes)) for e in span.events),
        links=tuple(SpanLink(link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        status_message=span.status.message,
        scope=scope,
        resource=resource,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs if isinstance(pair, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return None if kind is None else getattr(value, kind)
