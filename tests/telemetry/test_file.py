from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.util._importlib_metadata import entry_points

ENTRY_POINT = {"group": "opentelemetry_traces_exporter", "name": "bentoml_compile_file"}


def test_spans_of_two_exporters_are_appended_to_the_file_that_the_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "traces.jsonl"
    monkeypatch.setenv("BENTOML_COMPILE_TRACE_FILE", str(path))
    [entry_point] = entry_points(**ENTRY_POINT)
    exporter_class = entry_point.load()
    assert issubclass(exporter_class, SpanExporter)

    for name in ("first worker", "second worker"):
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter_class()))
        provider.get_tracer("test").start_span(name, attributes={"filler": "x" * 100_000}).end()
        provider.shutdown()

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [_only_span(line)["name"] for line in lines] == ["first worker", "second worker"]


def test_the_whole_path_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker is in its Bento's folder, and not where the command was typed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BENTOML_COMPILE_TRACE_FILE", "relative.jsonl")
    [entry_point] = entry_points(**ENTRY_POINT)
    with caplog.at_level(logging.INFO, "bentoml_compile"):
        entry_point.load()().shutdown()
    assert [record.getMessage() for record in caplog.records] == [f"traces go to {tmp_path / 'relative.jsonl'}"]


def _only_span(line: dict[str, Any]) -> dict[str, Any]:
    [resource] = line["resourceSpans"]
    [scope] = resource["scopeSpans"]
    [span] = scope["spans"]
    return span
