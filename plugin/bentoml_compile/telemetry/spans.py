"""Boots and calls as OpenTelemetry spans.

    tracer = always_on(provider).get_tracer("bentoml_compile")
    listeners = Listeners([SpanListener(tracer)])

A request costs nothing here unless its trace is sampled or a compile happened inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanContext, TraceFlags, Tracer

from bentoml_compile.listener import Call, Compile, Event, Listener, Stage, Value
from bentoml_compile.telemetry.attributes import PREFIX, fail, prefixed, split_seconds
from bentoml_compile.telemetry.batches import Batch, running_batch

[_SPAN_KEY] = trace.set_span_in_context(INVALID_SPAN, Context())  # what `trace.get_current_span` looks up
_SAMPLED = int(TraceFlags.SAMPLED)


@dataclass(frozen=True, slots=True)
class _Model:
    mode: str
    startup: SpanContext


class SpanListener(Listener):
    """Turns stages and calls into spans of `tracer`, which must sample everything: see `provider.always_on`.

    `boot` gives the context for a startup span that begins outside of any span: that of `bentoml.worker.boot`.
    """

    hears_plain_calls = False

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
        span.set_attributes(prefixed(stage.attributes))
        for event in stage.events:
            _add_event(span, event)
        if stage.error is not None:
            fail(span, stage.error, stage.ended_ns)
        span.end(stage.ended_ns)
        if stage.parent is None:
            name, mode = stage.attributes.get("model"), stage.attributes.get("mode", "default")
            self._models[str(name)] = _Model(str(mode), span.get_span_context())
            # a child may be reported after its parent's end, but not after the root's
            for one in [one for one in list(self._spans) if _root(one) is stage]:
                del self._spans[one]

    def tracing(self) -> bool:
        # every call asks; `trace.get_current_span` takes twice as long, for it checks an abstract base class
        span: Any = get_current().get(_SPAN_KEY)
        return span is not None and span.get_span_context().trace_flags & _SAMPLED != 0

    def called(self, call: Call) -> None:
        if not self.tracing():
            if call.compiles:
                self._add_recompiles(call.compiles, get_current())
            return
        model, batch = self._models.get(call.executable.model), running_batch.get()
        span = self._tracer.start_span(
            "torch_compile.inference",
            attributes=prefixed(_attributes(call, model)),
            links=_links(model, batch),
            start_time=call.started_ns,
        )
        if call.compiles:
            self._add_recompiles(call.compiles, trace.set_span_in_context(span))
        if call.fallback is not None:
            _add_event(span, Event("fallback", call.started_ns, {"reason": call.fallback}))
        if call.error is not None:
            fail(span, call.error, call.ended_ns)
        span.end(call.ended_ns)
        if batch is not None:
            batch.add(self._tracer, call, span.get_span_context())

    def _add_recompiles(self, compiles: Sequence[Compile], parent: Context) -> None:
        for compile_ in compiles:
            span = self._tracer.start_span("torch_compile.recompile", context=parent, start_time=compile_.started_ns)
            seconds = (compile_.ended_ns - compile_.started_ns) / 1e9
            span.set_attributes(prefixed({"recompile_reason": compile_.reason, "compile_seconds": seconds}))
            span.end(compile_.ended_ns)

    def _parent(self, stage: Stage) -> Context | None:
        """None stands for the current context."""
        if stage.parent is not None:
            return trace.set_span_in_context(self._spans[stage.parent])
        if trace.get_current_span().get_span_context().is_valid:
            return None
        return self._boot()


def _attributes(call: Call, model: _Model | None) -> dict[str, Value | None]:
    executable = call.executable
    return {
        "model": executable.model,
        "mode": model.mode if model else None,
        "engine": call.engine,
        "shape": call.shape or executable.label,
        "prepared": executable.prepared,
        "batch_size": call.batch_size,
        "padding_ratio": call.padding_ratio,
        "device_seconds": call.device_seconds,
        **split_seconds(call),
    }


def _links(model: _Model | None, batch: Batch | None) -> list[Link]:
    links = [Link(request) for request in batch.spans] if batch is not None and len(batch.spans) > 1 else []
    if model is not None:
        links.append(Link(model.startup))
    return links


def _add_event(span: Span, event: Event) -> None:
    span.add_event(PREFIX + event.name, prefixed(event.attributes), event.time_ns)


def _root(stage: Stage) -> Stage:
    while stage.parent is not None:
        stage = stage.parent
    return stage
