from __future__ import annotations

import contextlib
import timeit

import pytest
from opentelemetry.context import attach, detach
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, StatusCode, TraceFlags, set_span_in_context

from bentoml_compile.listener import Call, Compile, Listeners, Timeline
from bentoml_compile.telemetry.attributes import split_seconds
from bentoml_compile.telemetry.spans import SpanListener
from tests.executable import Shape


class Traced:
    """A span listener and what it exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("bentoml_compile")
        self.listener = SpanListener(self.tracer)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == f"torch_compile.{name}"]

    def call(self, compiles: list[Compile] | None = None, **changed: object) -> None:
        self.listener.called(Call(Shape(), 1_000, 2_000, compiles or [], **changed))  # type: ignore[arg-type]


@pytest.fixture
def traced() -> Traced:
    return Traced()


def test_stages_nest_and_keep_their_own_times_attributes_and_events(traced: Traced) -> None:
    timeline = Timeline(Listeners([traced.listener]))
    with timeline.stage("startup", model="encoder"), timeline.stage("compile") as compile_:
        timeline.past("phase.inductor", compile_, 10, 20, graphs=2)
        timeline.event("fallback", reason="no_compiler")
    [startup], [compile_span], [phase] = map(traced.spans, ("startup", "compile", "phase.inductor"))
    assert startup.parent is None
    assert compile_span.parent == startup.context
    assert phase.parent == compile_span.context
    assert (phase.start_time, phase.end_time) == (10, 20)
    assert phase.attributes == {"torch_compile.graphs": 2}
    assert startup.attributes == {"torch_compile.model": "encoder"}
    assert [event.name for event in compile_span.events] == ["torch_compile.fallback"]
    times = [startup.start_time, compile_span.start_time, compile_span.end_time, startup.end_time]
    assert times == sorted(times, key=lambda time: time or 0)


def test_a_startup_inside_of_a_span_is_its_child(traced: Traced) -> None:
    with traced.tracer.start_as_current_span("mine") as mine, Timeline(Listeners([traced.listener])).stage("startup"):
        pass
    [startup] = traced.spans("startup")
    assert startup.parent == mine.get_span_context()


def test_an_error_marks_every_stage_that_it_passed(traced: Traced) -> None:
    timeline = Timeline(Listeners([traced.listener]))
    with contextlib.suppress(ValueError), timeline.stage("startup"):
        with timeline.stage("lookup"):
            pass
        with timeline.stage("compile"):
            raise ValueError("bad")
    status = {span.name: span.status.status_code for span in traced.exporter.get_finished_spans()}
    assert status == {
        "torch_compile.lookup": StatusCode.UNSET,
        "torch_compile.compile": StatusCode.ERROR,
        "torch_compile.startup": StatusCode.ERROR,
    }


def test_a_phase_reported_after_its_stage_ended_still_finds_its_parent(traced: Traced) -> None:
    timeline = Timeline(Listeners([traced.listener]))
    with timeline.stage("startup"):
        with timeline.stage("compile") as compile_:
            pass
        timeline.past("phase.dynamo", compile_, 10, 20)
    [phase], [compile_span] = traced.spans("phase.dynamo"), traced.spans("compile")
    assert phase.parent == compile_span.context


def test_a_listener_keeps_nothing_of_a_boot_that_is_over(traced: Traced) -> None:
    timeline = Timeline(Listeners([traced.listener]))
    with timeline.stage("startup"), timeline.stage("compile"):
        pass
    assert traced.listener._spans == {}


def test_each_models_calls_link_to_its_own_startup(traced: Traced) -> None:
    listeners = Listeners([traced.listener])
    for model in ("encoder", "decoder"):
        with Timeline(listeners).stage("startup", model=model):
            pass
    with traced.tracer.start_as_current_span("request"):
        traced.call()
    [call], [encoder, _] = traced.spans("inference"), traced.spans("startup")
    assert [link.context for link in call.links] == [encoder.context]


def test_a_call_outside_of_any_trace_makes_no_span(traced: Traced) -> None:
    traced.call()
    assert traced.exporter.get_finished_spans() == ()


def test_a_call_tells_its_fallback_its_error_and_its_device_time(traced: Traced) -> None:
    with traced.tracer.start_as_current_span("request"):
        traced.call(
            fallback="out_of_memory",
            error=RuntimeError("no memory"),
            device_seconds=0.5,
            batch_size=2,
            padding_ratio=0.25,
        )
    [call] = traced.spans("inference")
    assert call.attributes is not None
    assert call.attributes["torch_compile.device_seconds"] == 0.5
    assert call.attributes["torch_compile.batch_size"] == 2
    assert call.attributes["torch_compile.padding_ratio"] == 0.25
    assert call.status.status_code is StatusCode.ERROR
    assert {event.name for event in call.events} == {"torch_compile.fallback", "exception"}
    assert (call.start_time, call.end_time) == (1_000, 2_000)


@pytest.mark.parametrize(
    ("compiles", "queue_seconds", "expected"),
    [
        ([], 0.0, (0, 1000, 0)),
        ([(1100, 1400)], 0.0, (300, 700, 0)),
        ([(1100, 1400), (1200, 1300), (1350, 1500)], 0.0, (400, 600, 0)),  # nested and overlapping count once
        ([(500, 1100), (1900, 2500)], 0.0, (200, 800, 0)),  # only what lies inside of the call
        ([(1000, 1900)], 600e-9, (900, 0, 100)),  # two clocks disagree: never more than the call's length
        ([], 250e-9, (0, 750, 250)),
    ],
)
def test_compile_inference_and_queue_sum_to_the_calls_length(
    compiles: list[tuple[int, int]], queue_seconds: float, expected: tuple[int, int, int]
) -> None:
    parts = split_seconds(
        Call(Shape(), 1000, 2000, [Compile(*times, "") for times in compiles], queue_seconds=queue_seconds)
    )
    names = ("compile_seconds", "inference_seconds", "queue_seconds")
    assert tuple(round(parts[name] * 1e9) for name in names) == expected


@pytest.mark.parametrize(("flags", "sampled"), [(0, False), (1, True), (2, False), (3, True)])
def test_a_call_is_traced_where_the_current_span_is_sampled(traced: Traced, flags: int, sampled: bool) -> None:
    remote = NonRecordingSpan(SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(flags)))
    assert traced.listener.tracing() is False
    token = attach(set_span_in_context(remote))
    try:
        assert traced.listener.tracing() is sampled
    finally:
        detach(token)


def test_what_an_unsampled_call_costs_is_printed(traced: Traced) -> None:
    unsampled = NonRecordingSpan(SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(0)))
    token = attach(set_span_in_context(unsampled))
    try:
        listeners, shape = Listeners([traced.listener]), Shape()

        def call() -> None:
            if not listeners.tracing():
                listeners.answered(shape, 1, 2)

        runs = timeit.repeat(call, number=10_000, repeat=5)
    finally:
        detach(token)
    print(f"an unsampled call costs the span listener {min(runs) / 10_000 * 1e9:.0f} ns")
    assert traced.exporter.get_finished_spans() == ()
