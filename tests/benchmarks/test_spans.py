from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from benchmarks import spans
from bentoml_compile.telemetry.file import TraceFile


def test_a_stage_has_the_time_that_no_stage_inside_of_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "traces.jsonl"
    monkeypatch.setenv("BENTOML_COMPILE_TRACE_FILE", str(path))
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(TraceFile()))
    tracer = provider.get_tracer("test")

    def record(name: str, start: float, end: float, parent: trace.Span | None = None) -> trace.Span:
        context = trace.set_span_in_context(parent) if parent else None
        span = tracer.start_span(name, context, start_time=int(start * 1e9))
        span.end(int(end * 1e9))
        return span

    boot = record("bentoml.worker.boot", 1, 100)
    startup = record("torch_compile.startup", 10, 30, boot)
    compile_ = record("torch_compile.compile", 12, 25, startup)
    record("torch_compile.phase.dynamo", 12, 20, compile_)
    record("torch_compile.phase.inductor", 14, 19, compile_)
    record("torch_compile.phase.dynamo", 20, 21, compile_)
    record("torch_compile.verify", 25, 29, startup)
    record("torch_compile.inference", 50, 60)

    recorded = spans.read(path)

    expected = {"other": 3.0, "compile": 4.0, "dynamo": 4.0, "inductor": 5.0, "verify": 4.0}
    assert spans.stage_seconds(recorded) == pytest.approx(expected)
    assert sum(expected.values()) == 20  # all of the startup span


def test_a_boot_without_a_trace_has_no_stages(tmp_path: Path) -> None:
    recorded = spans.read(tmp_path / "missing.jsonl")
    assert spans.startup(recorded) is None
    assert spans.stage_seconds(recorded) == {}
