"""Where a worker's spans would go, and what becomes of them there."""

from __future__ import annotations

import socket
import sys

import pytest

from bentoml_compile.bento.doctor import exporter
from tests.doctor.findings import expect, only
from tests.otlp_receiver import OtlpReceiver


def test_an_exporter_that_answers_is_sent_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "none is configured" in only(exporter()).text
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.base_url)
        assert only(exporter()).text == f"OTEL_TRACES_EXPORTER=otlp: {receiver.endpoint} takes spans"
        assert receiver.spans() == []


def test_an_exporter_that_nobody_listens_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        text = f"nobody listens at {endpoint}/v1/traces: ConnectionRefusedError"
        expect(only(exporter()), "problem", text, f"start what is to listen at {endpoint}/v1/traces, or export OTEL_")


def test_an_exporter_that_is_refused(monkeypatch: pytest.MonkeyPatch, s3: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{s3}/v1/traces")
    finding = only(exporter())
    expect(finding, "problem", f"{s3}/v1/traces takes no spans: Failed to export", "start what is to listen at")
    assert "code: 500" in finding.text  # of a server for something else


def test_an_exporter_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nope")
    expect(only(exporter()), "problem", "no such exporter is installed", "unset OTEL_TRACES_EXPORTER")


def test_the_package_of_the_trace_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "bentoml_compile_file")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.json.file", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "bentoml_compile.telemetry.file", raising=False)
    expect(only(exporter()), "problem", "opentelemetry.exporter.otlp.json", "pip install 'bentoml-compile[trace]'")


def test_tracing_that_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    expect(only(exporter()), "warning", "no spans are made", "unset OTEL_SDK_DISABLED")
