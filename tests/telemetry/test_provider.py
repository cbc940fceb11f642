from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from bentoml_compile.telemetry.provider import always_on, attach_exporter, flush
from tests.otlp_receiver import OtlpReceiver
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(PATIENCE))  # seconds
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", str(int(PATIENCE * 1000)))  # only `flush` exports


@pytest.fixture
def base() -> Iterator[TracerProvider]:
    provider = TracerProvider(shutdown_on_exit=False)
    yield provider
    provider.shutdown()


def export_one(provider: TracerProvider) -> None:
    provider.get_tracer("test").start_span("one").end()
    assert flush(provider, PATIENCE)


def test_the_always_on_provider_exports_what_its_base_does_not_sample() -> None:
    exporter = InMemorySpanExporter()
    base = TracerProvider(sampler=ALWAYS_OFF, resource=Resource({"service.name": "Embedder"}))
    base.add_span_processor(SimpleSpanProcessor(exporter))
    base.get_tracer("test").start_span("dropped").end()
    always_on(base).get_tracer("test").start_span("kept").end()
    [span] = exporter.get_finished_spans()
    assert (span.name, span.resource.attributes["service.name"]) == ("kept", "Embedder")


def test_the_always_on_provider_follows_a_processor_that_its_base_gets_later(base: TracerProvider) -> None:
    provider, exporter = always_on(base), InMemorySpanExporter()
    base.add_span_processor(SimpleSpanProcessor(exporter))
    provider.get_tracer("test").start_span("late").end()
    assert [span.name for span in exporter.get_finished_spans()] == ["late"]


def test_nothing_is_attached_where_nothing_is_configured(base: TracerProvider) -> None:
    assert attach_exporter(base) is False


def test_a_provider_that_exports_is_left_alone(base: TracerProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    base.add_span_processor(SimpleSpanProcessor(exporter))
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.base_url)
        assert attach_exporter(base) is True
        export_one(base)
        assert receiver.spans() == []
    assert len(exporter.get_finished_spans()) == 1


@pytest.mark.parametrize(
    "variables",
    [
        {"EXPORTER_OTLP_ENDPOINT": "{base_url}"},
        {"EXPORTER_OTLP_TRACES_ENDPOINT": "{endpoint}"},
        {"EXPORTER_OTLP_ENDPOINT": "{base_url}", "TRACES_EXPORTER": "otlp_proto_http"},
        {"EXPORTER_OTLP_ENDPOINT": "{base_url}", "TRACES_EXPORTER": "no_such_thing, otlp"},
        {"EXPORTER_OTLP_ENDPOINT": "{base_url}", "EXPORTER_OTLP_PROTOCOL": "http/protobuf", "TRACES_EXPORTER": "otlp"},
    ],
)
def test_the_variables_of_opentelemetry_name_the_exporter(
    base: TracerProvider, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    with OtlpReceiver() as receiver:
        for name, value in variables.items():
            text = value.format(base_url=receiver.base_url, endpoint=receiver.endpoint)
            monkeypatch.setenv(f"OTEL_{name}", text)
        assert attach_exporter(base) is True
        export_one(base)
        assert [span.name for span in receiver.spans()] == ["one"]


def test_any_installed_exporter_is_found_by_its_entry_point(
    base: TracerProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "bentoml_compile_file")
    monkeypatch.setenv("BENTOML_COMPILE_TRACE_FILE", str(tmp_path / "traces.jsonl"))
    assert attach_exporter(base) is True
    export_one(base)
    assert '"one"' in (tmp_path / "traces.jsonl").read_text()


@pytest.mark.parametrize(
    ("variables", "logged"),
    [
        ({"TRACES_EXPORTER": "none", "EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, ""),
        ({"SDK_DISABLED": "TRUE", "TRACES_EXPORTER": "console"}, ""),
        ({"TRACES_EXPORTER": "carrier_pigeon"}, "no such exporter is installed (installed: "),
        ({"TRACES_EXPORTER": "otlp", "EXPORTER_OTLP_PROTOCOL": "smoke"}, "OTEL_EXPORTER_OTLP_PROTOCOL=smoke"),
    ],
)
def test_what_cannot_export_is_not_attached_and_says_why(
    base: TracerProvider,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variables: dict[str, str],
    logged: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    with caplog.at_level(logging.WARNING, "bentoml_compile"):
        assert attach_exporter(base) is False
    said = [record.getMessage() for record in caplog.records if record.thread == threading.get_ident()]
    assert logged in "".join(said)
    assert bool(logged) == bool(said)


def test_a_flush_gives_up_on_a_collector_that_does_not_answer(
    base: TracerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert attach_exporter(base)
        base.get_tracer("test").start_span("one").end()
        assert flush(base, 0.1) is False
        [exporting] = [thread for thread in threading.enumerate() if thread.name == "bentoml_compile flush"]
        connection, _ = silent.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")  # not to be tried again
            exporting.join(PATIENCE)
    assert not exporting.is_alive()
