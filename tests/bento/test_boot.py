from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from bentoml_compile.bento import boot as boot_module
from bentoml_compile.bento.boot import Boot
from tests.bento.traced_server import call, new_trace, traced_server
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.servers import Server, value
from tests.waiting import PATIENCE


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@dataclass(frozen=True)
class Served:
    """What one server has exported until its end: `traces` are those of its sampled calls, by method."""

    spans: list[ReceivedSpan]
    traces: dict[str, str]
    processes: list[float]  # when they started, epoch seconds

    def sampled(self, method: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == self.traces[method]]

    @property
    def unsampled(self) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id not in self.traces.values()]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Calls that are not sampled, then such as are by their traceparent, and at once SIGTERM."""
    traces = {"double": new_trace(), "double_async": new_trace()}
    with OtlpReceiver() as receiver:
        with traced_server(tmp_path_factory.mktemp("served"), {"tracing": receiver.tracing_config(0.0)}) as server:
            processes = [process.create_time() for process in server.processes()]
            assert call(server, "double", 1) == 2
            assert call(server, "recompile", 2) == 4
            for method, trace_id in traces.items():
                assert call(server, method, 3, trace_id) == 6
            server.stop(signal.SIGTERM)
        return Served(receiver.spans(), traces, processes)


def one(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    [span] = [span for span in spans if span.name == name]
    return span


def test_a_boot_is_one_tree_from_the_start_of_the_process_to_ready(served: Served) -> None:
    boot, startup = one(served.spans, "bentoml.worker.boot"), one(served.spans, "torch_compile.startup")
    stages = {name: one(served.spans, f"torch_compile.{name}") for name in ("lookup", "compile", "phase.dynamo")}

    assert boot.parent_id == ""
    assert startup.parent_id == boot.span_id
    assert stages["lookup"].parent_id == stages["compile"].parent_id == startup.span_id
    assert stages["phase.dynamo"].parent_id == stages["compile"].span_id
    assert {span.trace_id for span in (startup, *stages.values())} == {boot.trace_id}
    assert {span.scope for span in (boot, startup, *stages.values())} == {"bentoml_compile"}
    assert boot.resource["service.name"] == "Traced"
    assert any(abs(boot.start_ns / 1e9 - started) < 0.02 for started in served.processes)
    assert boot.start_ns < startup.start_ns <= startup.end_ns <= boot.end_ns
    assert startup.attributes["torch_compile.model"] == "toy"
    assert stages["lookup"].attributes["torch_compile.outcome"] == "miss"
    [fallback] = startup.events
    assert (fallback.name, fallback.attributes) == ("torch_compile.fallback", {"torch_compile.reason": "graph_break"})


@pytest.mark.parametrize("method", ["double", "double_async"])
def test_a_sampled_call_is_a_child_of_its_request_and_links_to_its_boot(served: Served, method: str) -> None:
    spans = served.sampled(method)
    inference = one(spans, "torch_compile.inference")

    assert inference.parent_id == one(spans, f"POST /{method}").span_id
    assert [link.span_id for link in inference.links] == [one(served.spans, "torch_compile.startup").span_id]
    attributes = {name.removeprefix("torch_compile."): v for name, v in inference.attributes.items()}
    parts = attributes["compile_seconds"] + attributes["inference_seconds"] + attributes["queue_seconds"]
    assert parts == pytest.approx(inference.seconds, abs=1e-9)
    assert {"model": "toy", "mode": "default", "engine": "jit", "prepared": True}.items() <= attributes.items()
    assert (attributes["shape"], attributes["batch_size"]) == ("x: float32[1]", 1)


def test_without_sampling_only_boots_and_recompiles_are_exported(served: Served) -> None:
    recompile = one(served.unsampled, "torch_compile.recompile")

    assert one(served.unsampled, "torch_compile.startup")
    assert recompile.parent_id != ""  # its request's span, which is not exported
    assert recompile.attributes["torch_compile.recompile_reason"] == "size mismatch at index 0"
    assert recompile.attributes["torch_compile.compile_seconds"] == pytest.approx(recompile.seconds)
    assert {span.scope for span in served.unsampled} == {"bentoml_compile"}
    assert "torch_compile.inference" not in {span.name for span in served.unsampled}


def test_sigterm_right_after_a_request_loses_no_span(served: Served) -> None:
    last = list(served.traces)[-1]
    assert {f"POST /{last}", "torch_compile.inference"} <= {span.name for span in served.sampled(last)}


def test_a_recompile_in_a_sampled_call_is_below_the_inference_and_sigint_loses_neither(
    receiver: OtlpReceiver, tmp_path: Path
) -> None:
    with traced_server(tmp_path, {"tracing": receiver.tracing_config(1.0)}) as server:
        call(server, "recompile", 2)
        server.stop(signal.SIGINT)
    inference = one(receiver.spans(), "torch_compile.inference")
    recompile = one(receiver.spans(), "torch_compile.recompile")

    assert one(receiver.spans(), "POST /recompile").span_id == inference.parent_id
    assert recompile.parent_id == inference.span_id
    assert inference.attributes["torch_compile.compile_seconds"] == pytest.approx(recompile.seconds)


def test_a_service_without_compiled_models_has_no_boot_span(receiver: OtlpReceiver, tmp_path: Path) -> None:
    config, env = {"tracing": receiver.tracing_config(1.0)}, {"OTEL_BSP_SCHEDULE_DELAY": "100"}
    with traced_server(tmp_path, config, env, target="service:Plain") as server:
        call(server, "echo", 1)
        receiver.wait_for("POST /echo")
    assert receiver.spans("bentoml.worker.boot") == []


def test_a_service_without_compiled_models_exports_its_requests_as_the_variables_say(
    receiver: OtlpReceiver, tmp_path: Path
) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.base_url}
    with traced_server(tmp_path, {"tracing": {"sample_rate": 1.0}}, env, target="service:Plain") as server:
        call(server, "echo", 1)
    receiver.wait_for("POST /echo")  # not lost at the worker's end, either


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "RuntimeError: no such weights"),
        pytest.param("exit", "SystemExit: 3", marks=pytest.mark.soak),
        ("crash", "RuntimeError: out of luck"),
    ],
)
def test_a_boot_that_fails_is_exported_with_its_error(
    receiver: OtlpReceiver, tmp_path: Path, how: str, message: str
) -> None:
    server = traced_server(tmp_path, {"tracing": receiver.tracing_config(0.0)}, {"BOOT": how})
    with server.start(wait=False):
        boot = receiver.wait_for("bentoml.worker.boot")[0]
    family = [span for span in receiver.spans() if span.trace_id == boot.trace_id]

    assert {span.name for span in family if span.is_error} == {
        "bentoml.worker.boot",
        "torch_compile.startup",
        "torch_compile.compile",
    }
    assert {span.status_message for span in family if span.is_error} == {message}


def test_an_endpoint_in_the_environment_is_enough_to_export_boots(receiver: OtlpReceiver, tmp_path: Path) -> None:
    with traced_server(tmp_path, {}, {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.base_url}) as server:
        call(server, "double", 1)
    assert one(receiver.spans(), "bentoml.worker.boot")
    assert receiver.spans("torch_compile.inference") == []  # BentoML's sample_rate, 0 by default, still decides


def test_with_an_exporter_from_the_environment_the_sample_rate_of_bentoml_decides(
    receiver: OtlpReceiver, tmp_path: Path
) -> None:
    env = {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": receiver.endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    with traced_server(tmp_path, {"tracing": {"sample_rate": 1.0}}, env) as server:
        call(server, "double", 1)
    [request] = [span for span in receiver.spans() if span.name == "POST /double"]
    assert one(receiver.spans(), "torch_compile.inference").parent_id == request.span_id


def test_a_global_provider_comes_before_the_environment(receiver: OtlpReceiver, tmp_path: Path) -> None:
    with OtlpReceiver() as unused:
        env = {"GLOBAL_ENDPOINT": receiver.endpoint, "OTEL_EXPORTER_OTLP_ENDPOINT": unused.base_url}
        with traced_server(tmp_path, {"tracing": {"sample_rate": 1.0}}, env) as server:
            call(server, "double", 1)
        assert one(receiver.spans(), "torch_compile.startup")
        assert one(receiver.spans(), "torch_compile.inference")
        assert unused.spans() == []


@pytest.mark.soak
def test_the_disabled_sdk_exports_nothing(receiver: OtlpReceiver, tmp_path: Path) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.base_url, "OTEL_SDK_DISABLED": "true"}
    with traced_server(tmp_path, {"tracing": {"sample_rate": 1.0}}, env) as server:
        assert call(server, "recompile", 1) == 2
    assert receiver.spans() == []


@pytest.mark.soak
def test_an_unknown_exporter_is_a_log_line_and_not_an_error(tmp_path: Path) -> None:
    with traced_server(tmp_path, {}, {"OTEL_TRACES_EXPORTER": "carrier_pigeon"}) as server:
        assert call(server, "double", 1) == 2
        assert "OTEL_TRACES_EXPORTER=carrier_pigeon" in server.log


@pytest.mark.parametrize(
    "accepts", [pytest.param(True, id="hangs"), pytest.param(False, id="refuses", marks=pytest.mark.soak)]
)
def test_an_unreachable_collector_changes_no_answer_and_lets_the_server_end(tmp_path: Path, accepts: bool) -> None:
    with socket.socket() as collector:
        collector.bind(("127.0.0.1", 0))
        if accepts:
            collector.listen()  # connections wait in its backlog for ever
        endpoint = f"http://127.0.0.1:{collector.getsockname()[1]}"
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_TIMEOUT": "600", "FLUSH_SECONDS": None}
        with traced_server(tmp_path, {"tracing": {"sample_rate": 1.0}}, env) as server:
            assert [call(server, "recompile", x) for x in range(5)] == [0, 2, 4, 6, 8]
            server.stop(deadline=PATIENCE)  # long before the exporter gives up


def test_metrics_of_two_workers_add_up(tmp_path: Path) -> None:
    with traced_server(tmp_path, {"workers": 2}) as server:
        _wait_for(server, "torch_compile_artifact_lookups_total", 2, model="toy", outcome="miss")
        for x in range(20):
            call(server, "double", x)
        call(server, "recompile", 1)
        samples = server.metrics()

    labels = {"model": "toy", "engine": "jit", "shape": "x: float32[1]"}
    assert value(samples, "torch_compile_inference_seconds_count", **labels) == 21
    assert value(samples, "torch_compile_inference_seconds_bucket", le="0.001", **labels) == 0
    assert value(samples, "torch_compile_inference_seconds_bucket", le="+Inf", **labels) == 21
    assert value(samples, "torch_compile_recompiles_total", model="toy", reason="shape") == 1
    assert value(samples, "torch_compile_startup_seconds", model="toy", engine="jit", outcome="compiled") == 1.5
    assert value(samples, "torch_compile_phase_seconds", model="toy", phase="dynamo") == 0.5
    assert value(samples, "torch_compile_ready", model="toy") == 1


def _wait_for(server: Server, name: str, wanted: float, **labels: str) -> None:
    ends, seen = time.monotonic() + PATIENCE, 0.0
    while seen != wanted:
        assert time.monotonic() < ends, f"{name} is {seen}, not {wanted}"
        time.sleep(0.05)
        with contextlib.suppress(HTTPError):  # 500: prometheus_client reads a file that a worker has made, still empty
            seen = value(server.metrics(), name, **labels)


def test_threads_whose_models_begin_at_once_share_one_boot_span() -> None:
    exporter, provider, boot = InMemorySpanExporter(), TracerProvider(), Boot(1)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer, other = provider.get_tracer("test"), list[Context]()

    class Overtaken(trace.NoOpTracer):
        def start_span(self, *args: Any, **kwargs: Any) -> trace.Span:
            other.append(boot.context(tracer))  # of another thread, from its beginning to its end
            return tracer.start_span(*args, **kwargs)

    own = boot.context(Overtaken())
    boot.end(None)
    [exported] = exporter.get_finished_spans()
    found = [trace.get_current_span(context).get_span_context().span_id for context in (own, *other)]
    assert found == [exported.context.span_id] * 2


def test_a_thread_that_goes_on_when_the_boot_ends_has_its_context_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    boots = [None, Boot(1)]

    class Ending:
        @property
        def boot(self) -> Boot | None:
            return boots.pop()

    monkeypatch.setattr(boot_module, "_process", Ending())
    tracer = TracerProvider().get_tracer("test")
    assert [boot_module._boot_context(tracer) is None for _ in range(2)] == [False, True]
