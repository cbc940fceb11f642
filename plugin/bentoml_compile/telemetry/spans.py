"""Boots and calls as OpenTelemetry spans.

    tracer = always_on(provider).get_tracer("bentoml_compile")
    listeners = Listeners([SpanListener(tracer)])

A request costs nothing here unless its trace is sampled or a compile happened inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode, Tracer

from bentoml_compile.listener import Call, Compile, Event, Listener, Stage, Value

PREFIX = "torch_compile."

batched_requests: ContextVar[tuple[SpanContext, ...]] = ContextVar("batched_requests", default=())
"""The spans of all requests that the running batch answers; set by `bento.batching`."""


@dataclass(frozen=True, slots=True)
class _Model:
    mode: str
    startup: SpanContext


class SpanListener(Listener):
    """Turns stages and calls into spans of `tracer`, which must sample everything: see `provider.always_on`.

    `boot` gives the context for a startup span that begins outside of any span: that of `bentoml.worker.boot`.
    """

    def __init__(self, tracer: Tracer, boot: Callable[[], Context | None] = lambda: None) -> None:
        self._tracer = tracer
        self._boot = boot
        self._spans: dict[Stage, Span] = {}
        self._models: dict[str, _Model] = {}

    def preparing(self, model: str) -> None:
        self._boot()  # makes its span, which must not count as the startup's time

    def stage_started(self, stage: Stage) -> None:
        self._spans[stage] = self._tracer.start_span(
            PREFIX + stage.name, context=self._parent(stage), start_time=stage.started_ns
        )

    def stage_ended(self, stage: Stage) -> None:
        span = self._spans[stage]
        span.set_attributes(_prefixed(stage.attributes))
        for event in stage.events:
            _add_event(span, event)
        if stage.error is not None:
            _fail(span, stage.error, stage.ended_ns)
        span.end(stage.ended_ns)
        if stage.parent is None:
            name, mode = stage.attributes.get("model"), stage.attributes.get("mode", "default")
            self._models[str(name)] = _Model(str(mode), span.get_span_context())
            # a child may be reported after its parent's end, but not after the root's
            for one in [one for one in list(self._spans) if _root(one) is stage]:
                del self._spans[one]

    def tracing(self) -> bool:
        return trace.get_current_span().get_span_context().trace_flags.sampled

    def called(self, call: Call) -> None:
        if not self.tracing():
            if call.compiles:
                self._add_recompiles(call.compiles, get_current())
            return
        executable = call.executable
        model = self._models.get(executable.model)
        span = self._tracer.start_span("torch_compile.inference", start_time=call.started_ns, links=_links(model))
        attributes: dict[str, Value | None] = {
            "model": executable.model,
            "mode": model.mode if model else None,
            "engine": call.engine,
            "shape": call.shape or executable.label,
            "prepared": executable.prepared,
            "batch_size": call.batch_size,
            "device_seconds": call.device_seconds,
            **split_seconds(call),
        }
        span.set_attributes(_prefixed(attributes))
        self._add_recompiles(call.compiles, trace.set_span_in_context(span))
        if call.fallback is not None:
            _add_event(span, Event("fallback", call.started_ns, {"reason": call.fallback}))
        if call.error is not None:
            _fail(span, call.error, call.ended_ns)
        span.end(call.ended_ns)

    def _add_recompiles(self, compiles: Sequence[Compile], parent: Context) -> None:
        for compile_ in compiles:
            span = self._tracer.start_span("torch_compile.recompile", context=parent, start_time=compile_.started_ns)
            seconds = (compile_.ended_ns - compile_.started_ns) / 1e9
            span.set_attributes(_prefixed({"recompile_reason": compile_.reason, "compile_seconds": seconds}))
            span.end(compile_.ended_ns)

    def _parent(self, stage: Stage) -> Context | None:
        """None stands for the current context."""
        if stage.parent is not None:
            return trace.set_span_in_context(self._spans[stage.parent])
        if trace.get_current_span().get_span_context().is_valid:
            return None
        return self._boot()


def split_seconds(call: Call) -> dict[str, float]:
    """A call's length as compile_seconds, inference_seconds and queue_seconds, which sum to it.

    Compiles that overlap (a nested frame) count once, and only as far as they lie inside of the call.
    """
    length = call.ended_ns - call.started_ns
    compiling, covered_to = 0, call.started_ns
    for compile_ in sorted(call.compiles, key=lambda one: one.started_ns):
        end = min(compile_.ended_ns, call.ended_ns)
        compiling += max(0, end - max(compile_.started_ns, covered_to))
        covered_to = max(covered_to, end)
    queued = min(max(0, int(call.queue_seconds * 1e9)), length - compiling)
    return {
        "compile_seconds": compiling / 1e9,
        "inference_seconds": (length - compiling - queued) / 1e9,
        "queue_seconds": queued / 1e9,
    }


def _links(model: _Model | None) -> list[Link]:
    requests = batched_requests.get()
    links = [Link(request) for request in requests] if len(requests) > 1 else []
    if model is not None:
        links.append(Link(model.startup))
    return links


def _prefixed(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {PREFIX + name: value for name, value in attributes.items() if value is not None}


def _add_event(span: Span, event: Event) -> None:
    span.add_event(PREFIX + event.name, _prefixed(event.attributes), event.time_ns)


def _fail(span: Span, error: BaseException, time_ns: int | None) -> None:
    span.record_exception(error, timestamp=time_ns)
    span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))


def _root(stage: Stage) -> Stage:
    while stage.parent is not None:
        stage = stage.parent
    return stage
