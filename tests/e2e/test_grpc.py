"""The legacy service behind `bentoml serve-grpc`, with compiled models in its runners; BentoML 1.4.40 serves no other.

BentoML's stubs need protobuf below 6, and its server grpcio at most 1.80, grpcio-health-checking and
opentelemetry-instrumentation-grpc.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import PIL.Image
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.bento.traced_server import new_trace
from tests.conftest import CHECKOUT
from tests.e2e.eager import eager_image, eager_logits, eager_rows, near, near_image, pixels_of
from tests.otlp_receiver import OtlpReceiver
from tests.servers import Server, reserved_port, value
from tests.waiting import PATIENCE

json_format, struct_pb2 = map(import_module, ("google.protobuf.json_format", "google.protobuf.struct_pb2"))

try:
    grpc = import_module("grpc")
    pb, services = map(import_module, ("bentoml.grpc.v1.service_pb2", "bentoml.grpc.v1.service_pb2_grpc"))
    health, health_services = map(import_module, ("grpc_health.v1.health_pb2", "grpc_health.v1.health_pb2_grpc"))
    version("opentelemetry-instrumentation-grpc")
    if import_module("bentoml.grpc.interceptors.opentelemetry")._OpenTelemetryServicerContext.__abstractmethods__:
        raise ImportError(f"its interceptor lacks methods of grpcio {grpc.__version__}")
except ImportError as missing:
    pytest.skip(f"BentoML cannot serve gRPC here: {missing}", allow_module_level=True)

pytestmark = pytest.mark.slow

SERVE_GRPC = (sys.executable, "-c", "import sys; from bentoml_cli.cli import cli; sys.argv[1] = 'serve-grpc'; cli()")
ROWS = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


@dataclass
class Served:
    server: Server
    receiver: OtlpReceiver
    channel: Any
    metrics_port: int

    def call(self, api_name: str, metadata: tuple[tuple[str, str], ...] = (), **content: Any) -> Any:
        stub = services.BentoServiceStub(self.channel)
        return stub.Call(pb.Request(api_name=api_name, **content), timeout=PATIENCE, metadata=metadata)

    def json(self, api_name: str, value: Any, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
        sent = json_format.ParseDict(value, struct_pb2.Value())
        return json_format.MessageToDict(self.call(api_name, metadata, json=sent).json)


@pytest.fixture(scope="module")
def served(config: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with OtlpReceiver() as receiver, reserved_port() as metrics_port:
        merged = json.loads(config(classify={}, score={}, blend={})) | {
            "tracing": receiver.tracing_config(0.0),
            "runners": {"resources": {"cpu": 1}},
            "api_server": {"workers": 1, "grpc": {"metrics": {"host": "127.0.0.1", "port": metrics_port}}},
        }
        home = tmp_path_factory.mktemp("home")
        # BentoML tells all processes but the one that answers for metrics where they are
        env = {"PROMETHEUS_MULTIPROC_DIR": str(home / "prometheus_multiproc_dir")}
        env["BENTOML_CONFIG_OVERRIDES"] = json.dumps(merged)
        server = Server(CHECKOUT, home, target="tests.e2e.legacy_service:svc", env=env, command=SERVE_GRPC)
        with server.start(wait=False), grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            grpc.channel_ready_future(channel).result(300)
            yield Served(server, receiver, channel, metrics_port)


def image_file(path: Path) -> Any:
    return pb.File(content=path.read_bytes())


def opened(file: Any) -> np.ndarray:
    return pixels_of(PIL.Image.open(io.BytesIO(file.content)))


def test_the_service_is_healthy_and_names_its_methods(served: Served) -> None:
    asked = health.HealthCheckRequest(service="bentoml.grpc.v1.BentoService")
    answer = health_services.HealthStub(served.channel).Check(asked, timeout=PATIENCE)
    assert answer.status == health.HealthCheckResponse.SERVING
    stub = services.BentoServiceStub(served.channel)
    metadata = stub.ServiceMetadata(pb.ServiceMetadataRequest(), timeout=PATIENCE)
    assert {"classify_json", "score_shape", "mirror"} <= {api.name for api in metadata.apis}


def test_the_model_is_compiled_ahead_of_time_and_json_goes_in_and_out(served: Served) -> None:
    assert served.json("report", {})["engine"] == "aot"
    for method in ("classify_json", "classify_json_sync"):
        assert served.json(method, ["one", "two"]) == near(eager_logits("one", "two"))


def test_arrays_go_in_and_out_and_their_shape_is_enforced(served: Served) -> None:
    array = pb.NDArray(dtype=pb.NDArray.DTYPE_FLOAT, shape=ROWS.shape, float_values=ROWS.ravel())
    answer = served.call("score_shape", ndarray=array).ndarray
    assert np.reshape(answer.float_values, answer.shape).tolist() == near(eager_rows(ROWS))
    with pytest.raises(grpc.RpcError) as refused:
        served.call("score_shape", ndarray=pb.NDArray(dtype=pb.NDArray.DTYPE_FLOAT, shape=[1], float_values=[1.0]))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_images_go_in_and_out(served: Served, images: list[Path]) -> None:
    original, compared = map(pixels_of, images)
    mirrored = served.call("mirror", file=image_file(images[0]))
    assert near_image(opened(mirrored.file), eager_image(original, original[:, ::-1].copy()))
    fields = {name: pb.Part(file=image_file(path)) for name, path in zip(("original", "compared"), images, strict=True)}
    both = served.call("blend_images", multipart=pb.Multipart(fields=fields)).multipart.fields
    assert near_image(opened(both["one"].file), eager_image(original, compared))
    assert near_image(opened(both["other"].file), eager_image(compared, original))


def test_a_call_is_one_trace_down_to_the_compiled_model(served: Served) -> None:
    trace = new_trace()
    served.json("classify_json", ["traced"], metadata=(("traceparent", f"00-{trace}-{'1' * 16}-01"),))

    def inferences(spans: list[Any]) -> list[Any]:
        return [span for span in spans if span.name == "torch_compile.inference" and span.trace_id == trace]

    [inference] = served.receiver.wait_until(inferences, 1, "the call's inference span")
    assert inference.attributes["torch_compile.engine"] == "aot"
    assert inference.attributes["torch_compile.model"] == "classify"


def test_metrics_have_the_compiled_calls(served: Served) -> None:
    served.json("classify_json", ["counted"])
    text = httpx.get(f"http://127.0.0.1:{served.metrics_port}", timeout=PATIENCE).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    calls = "torch_compile_inference_seconds_count"
    assert value(samples, calls, model="classify", engine="aot") > 0
    assert value(samples, calls, engine="eager") == 0
