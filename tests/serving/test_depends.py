"""An API service and the model services it depends on under the real `bentoml serve`: who compiles, and whose trace."""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from tests.bento.traced_server import is_request, new_trace
from tests.models import classifier
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.servers import Server
from tests.waiting import PATIENCE, wait_for

CHECKOUT = Path(__file__).resolve().parents[2]
ROWS = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
BENTOML_S_WORDS = "An unexpected error has occurred, please check the server log."
FOREVER = 10**9  # steps of a stream
MODELS = {"Model": "tiny", "Ranker": "ranker"}
GATED = {"engine": "jit", "backend": "gated", "startup": "background", "mode": "default"}

pytestmark = pytest.mark.slow


@dataclass
class Front:
    """The server, its traces, and what was seen while one of its two model services still compiled."""

    server: Server
    receiver: OtlpReceiver
    ready_before: int
    livez_before: int
    answer_before: Any
    processes_before: dict[str, Any]
    processes: dict[str, Any]

    def ask(self, method: str, trace_id: str | None = None, **body: Any) -> Any:
        return self.post(method, trace_id, **body).raise_for_status().json()

    def post(self, method: str, trace_id: str | None = None, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.server.base_url}/{method}", json=body, headers=headers(trace_id), timeout=PATIENCE)

    def get(self, path: str, **params: Any) -> httpx.Response:
        return httpx.get(f"{self.server.base_url}/{path}", params=params, timeout=PATIENCE)

    def spans(self, trace_id: str, inferences: int = 1) -> list[ReceivedSpan]:
        """The trace's spans, when both services' requests and so many inferences have ended; without the middleware's
        own children."""

        def select(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
            mine = [span for span in spans if span.trace_id == trace_id and " http " not in span.name]
            services = {service(span) for span in mine if is_request(span)}
            enough = sum(span.name == "torch_compile.inference" for span in mine) >= inferences
            return mine if enough and services >= self.services else []

        return self.receiver.wait_until(select, 1, f"a whole trace {trace_id}")

    services = frozenset({"Front", "Model"})


@dataclass
class Development(Front):
    services = frozenset({"Front"})


def start(
    home: Path, receiver: OtlpReceiver, gated: str, kind: type[Front], arguments: Sequence[str] = ()
) -> Iterator[Front]:
    """Serves with one model service's compiler gated; the gate is opened after a look at what is there before."""
    config: dict[str, Any] = {name: {"tracing": receiver.tracing_config(0.0)} for name in ("Front", "Model", "Ranker")}
    config[gated]["torch_compile"] = GATED
    if gated != "Ranker":
        config["Ranker"]["torch_compile"] = {"enabled": False}
        config["Front"]["workers"] = 1  # each would hold a Model of its own, also in development
    gate = home.parent / "open"
    env = {
        "BENTOML_CONFIG_OVERRIDES": json.dumps({"services": config}),
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "CUDA_VISIBLE_DEVICES": None,  # else BentoML assigns no GPUs
        "GATE": str(gate),
    }
    target = "tests.serving.depends_service:Front"
    server = Server(CHECKOUT, home, target=target, env=env, arguments=arguments).start(wait=False)
    with server:
        front = kind(server, receiver, wait_until_it_answers(server), 0, None, {}, {})
        front.livez_before = front.get("livez").status_code
        front.answer_before = front.ask("classify", rows=ROWS)
        front.processes_before = front.ask("processes")
        gate.touch()
        models = 2 if gated == "Ranker" else 1  # of each worker; /readyz and `processes` ask any of them
        wait_for(lambda: len(re.findall(rf"model '{MODELS[gated]}': (?:compiled|loaded)", server.log)) == models)
        server.wait_ready(PATIENCE)
        front.processes = front.ask("processes")
        yield front


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Model is really compiled before it serves, Ranker in the background."""
    with OtlpReceiver() as receiver:
        yield from start(tmp_path_factory.mktemp("front") / "home", receiver, "Ranker", Front)


@pytest.fixture(scope="module")
def development(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """All services in one process; Model is compiled in the background."""
    home = tmp_path_factory.mktemp("development") / "home"
    with OtlpReceiver() as receiver:
        yield from start(home, receiver, "Model", Development, ["--development"])


@pytest.fixture(params=["front", "development"])
def either(request: pytest.FixtureRequest) -> Front:
    return request.getfixturevalue(request.param)


def wait_until_it_answers(server: Server) -> int:
    """The status of the first /readyz after every model service is up."""
    ends = time.monotonic() + 300
    while time.monotonic() < ends:
        assert psutil.pid_exists(server.pid), server.log
        try:
            httpx.post(f"{server.base_url}/processes", json={}, timeout=PATIENCE).raise_for_status()
            return httpx.get(f"{server.base_url}/readyz", timeout=PATIENCE).status_code
        except httpx.HTTPError:
            time.sleep(0.1)
    raise AssertionError(f"the services did not come up\n{server.log}")


def headers(trace_id: str | None) -> dict[str, str]:
    return {} if trace_id is None else {"traceparent": f"00-{trace_id}-{'1' * 16}-01"}


def expected(rows: list[list[int]] = ROWS) -> Any:
    return [pytest.approx(row, abs=1e-5) for row in classifier()(torch.tensor(rows))["logits"].tolist()]


def service(span: ReceivedSpan) -> str:
    return str(span.resource["service.name"])


def requests(spans: Sequence[ReceivedSpan]) -> dict[str, ReceivedSpan]:
    """The request's span in each service."""
    return {service(span): span for span in spans if is_request(span)}


def inferences(spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == "torch_compile.inference"]


def model_of(process: Mapping[str, Any], name: str) -> dict[str, Any]:
    return process["models"][name]


# who compiles, with what


def test_only_the_model_s_worker_compiles(front: Front) -> None:
    api, model = front.processes["front"], front.processes["model"]
    assert api["pid"] != model["pid"]
    assert api["models"] == {}
    assert (model_of(model, "tiny")["engine"], model_of(model, "tiny")["outcome"]) == ("aot", "compiled")
    store = str(front.server.home / "compile")
    mapped = {role: files_of(front.processes[role]["pid"]) for role in ("front", "model")}
    assert not any(file.startswith(store) for file in mapped["front"])
    assert any(file.startswith(store) for file in mapped["model"])
    starts = front.receiver.wait_for("torch_compile.startup", 3)
    boots = front.receiver.wait_for("bentoml.worker.boot", 3)
    assert {service(span) for span in starts} == {service(span) for span in boots} == {"Model", "Ranker"}


def files_of(pid: int) -> list[str]:
    return [map_.path for map_ in psutil.Process(pid).memory_maps()]


def test_each_model_service_has_its_own_section_as_its_deployment_overrides_it(front: Front) -> None:
    assert model_of(front.processes["model"], "tiny")["mode"] == "default"
    ranker = model_of(front.processes["ranker"], "ranker")
    assert (ranker["mode"], ranker["engine"]) == ("default", "jit")  # its decorator says max-autotune


def test_a_worker_sees_the_gpus_that_bentoml_assigns_to_its_service(front: Front) -> None:
    # workers of one service share its GPUs: each takes the one of its index
    assert {name: process["gpus"] for name, process in front.processes.items()} == {
        "front": None,
        "model": "0",
        "ranker": "1,2",
    }
    rankers = [process for process, command in front.server.commands() if "Ranker" in command]
    assert [process.environ()["CUDA_VISIBLE_DEVICES"] for process in rankers] == ["1,2"] * 2
    assert {worker_index(process) for process in rankers} == {"1", "2"}


def worker_index(process: psutil.Process) -> str:
    arguments = process.cmdline()
    return arguments[arguments.index("--worker-id") + 1]


def test_the_whole_is_ready_when_the_model_in_the_background_is(either: Front) -> None:
    assert either.livez_before == 200
    assert either.ready_before == 503
    assert either.answer_before == expected()
    role = "model" if isinstance(either, Development) else "ranker"
    name = MODELS[role.capitalize()]
    assert model_of(either.processes_before[role], name)["outcome"] == "eager"
    assert model_of(either.processes[role], name)["outcome"] in ("compiled", "loaded")
    assert either.get("readyz").status_code == 200


# one request, one trace


@pytest.mark.parametrize("method", ["classify", "classify_async", "classify_in_thread"])
def test_a_request_is_one_trace_through_both_processes(front: Front, method: str) -> None:
    trace_id = new_trace()
    assert front.ask(method, trace_id, rows=ROWS) == expected()
    spans = front.spans(trace_id)
    asked = requests(spans)
    assert asked["Model"].parent_id == asked["Front"].span_id
    [inference] = inferences(spans)
    assert (inference.parent_id, service(inference)) == (asked["Model"].span_id, "Model")


def test_in_development_the_inference_is_the_api_s(development: Front) -> None:
    trace_id = new_trace()
    assert development.ask("classify", trace_id, rows=ROWS) == expected()
    spans = development.spans(trace_id)
    assert [span.parent_id for span in inferences(spans)] == [requests(spans)["Front"].span_id]


def test_a_batch_serves_requests_of_several_api_processes(front: Front) -> None:
    spans, answers = shared_batch(front)
    assert all(answer["logits"] == expected([[index % 10] * 5]) for index, answer in enumerate(answers.values()))
    for trace_id in answers:
        mine = [span for span in spans if span.trace_id == trace_id]
        asked = requests(mine)
        assert asked["Model"].parent_id == asked["Front"].span_id
        [batch] = [span for span in mine if span.name == "torch_compile.batch"]
        assert batch.parent_id == asked["Model"].span_id
        [inference] = [span for span in spans if span.span_id == batch.links[0].span_id]
        assert asked["Model"].span_id in {inference.parent_id, *(link.span_id for link in inference.links)}


def shared_batch(front: Front) -> tuple[list[ReceivedSpan], dict[str, dict[str, Any]]]:
    """The spans and, by trace, the answers of requests two of which, of different processes, shared a batch."""

    def ask(index: int, trace_id: str) -> httpx.Response:
        return front.post("classify_batch", trace_id, rows=[[index % 10] * 5])

    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        traces = [new_trace() for _ in range(16)]
        with ThreadPoolExecutor(16) as pool:
            given = list(pool.map(ask, range(16), traces))
        if not all(response.is_success for response in given):
            continue  # BentoML 1.4.40's client renews its connections every 100 requests, and ends those under way
        answers = {trace: response.json() for trace, response in zip(traces, given, strict=True)}
        whole = functools.partial(whole_batches, traces=traces)
        spans = front.receiver.wait_until(whole, 1, "batches of these traces")
        for inference in inferences(spans):
            pids = {answers[link.trace_id]["pid"] for link in inference.links if link.trace_id in answers}
            if len(pids) > 1:
                return spans, answers
    raise AssertionError("no requests of two API processes shared a batch")


def whole_batches(spans: list[ReceivedSpan], traces: Sequence[str]) -> list[ReceivedSpan]:
    mine = [span for span in spans if span.trace_id in traces and " http " not in span.name]
    batched = {span.trace_id for span in mine if span.name == "torch_compile.batch"}
    asked = sum(is_request(span) for span in mine)
    return mine if len(batched) == len(traces) and asked == 2 * len(traces) else []


# streams


@pytest.mark.parametrize("method", ["stream", "stream_async"])
def test_a_stream_s_inferences_belong_to_its_request(either: Front, method: str) -> None:
    trace_id = new_trace()
    lines = either.post(method, trace_id, rows=ROWS, steps=3).raise_for_status().text.splitlines()
    assert [json.loads(line) for line in lines] == [expected()] * 3
    spans = either.spans(trace_id, inferences=3)
    request = requests(spans).get("Model") or requests(spans)["Front"]
    assert [span.parent_id for span in inferences(spans)] == [request.span_id] * 3
    assert all(request.start_ns <= span.start_ns <= span.end_ns <= request.end_ns for span in inferences(spans))


@pytest.mark.parametrize("method", ["stream", "stream_async"])
def test_a_stream_ends_when_its_client_leaves(either: Front, method: str) -> None:
    trace_id = new_trace()
    closed = either.ask("streams_closed").count(method)
    body = {"rows": ROWS, "steps": FOREVER}
    url = f"{either.server.base_url}/{method}"
    with httpx.stream("POST", url, json=body, headers=headers(trace_id), timeout=PATIENCE) as stream:
        assert json.loads(next(stream.iter_lines())) == expected()
    wait_for(lambda: either.ask("streams_closed").count(method) > closed)  # answered by the model's only thread
    spans = either.spans(trace_id)  # both requests' spans have ended
    request = requests(spans).get("Model") or requests(spans)["Front"]
    assert {span.parent_id for span in inferences(spans)} == {request.span_id}
    assert either.ask("classify", rows=ROWS) == expected()


# tasks


def test_a_task_s_inference_belongs_to_the_request_that_submitted_it(either: Front) -> None:
    trace_id = new_trace()
    task = either.ask("classify_later/submit", trace_id, rows=ROWS)
    wait_for(lambda: either.get("classify_later/status", **task).json()["status"] == "completed")
    assert either.get("classify_later/get", **task).json() == expected()
    spans = either.spans(trace_id)
    asked = requests(spans)
    [inference] = inferences(spans)
    assert inference.parent_id == asked.get("Model", asked["Front"]).span_id
    assert inference.start_ns >= asked["Front"].end_ns  # the answer to the submission was out


def test_a_task_that_is_waited_for_runs_inside_of_its_request(either: Front) -> None:
    trace_id = new_trace()
    assert either.ask("classify_later", trace_id, rows=ROWS) == expected()
    spans = either.spans(trace_id)
    asked = requests(spans)
    [inference] = inferences(spans)
    assert inference.parent_id == asked.get("Model", asked["Front"]).span_id
    assert inference.end_ns <= asked["Front"].end_ns


# a worker that dies


def test_a_killed_model_worker_boots_warm_and_clients_see_bentoml_s_errors_only(front: Front) -> None:
    killed = psutil.Process(front.ask("processes")["model"]["pid"])
    answers: list[httpx.Response] = []
    over = threading.Event()

    def load() -> None:
        while not over.is_set():
            answers.append(front.post("classify", rows=ROWS))

    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(load) for _ in range(4)]
        try:
            wait_for(lambda: len(answers) > 20)
            killed.kill()
            killed.wait(PATIENCE)
            wait_for(lambda: (now := front.post("processes")).is_success and now.json()["model"]["pid"] != killed.pid)
            enough = len(answers) + 20
            wait_for(lambda: len(answers) > enough)
        finally:
            over.set()
        for one in loads:
            one.result()  # raises where a client had no answer at all
    for answer in answers:
        if answer.is_success:
            assert answer.json() == expected()
        else:
            assert (answer.status_code, answer.json()) == (500, {"error": BENTOML_S_WORDS})
    for _ in range(10):  # one by one: BentoML 1.4.40's client renews its connections, and ends those under way
        assert front.ask("classify", rows=ROWS) == expected()
    assert model_of(front.ask("processes")["model"], "tiny")["outcome"] == "loaded"
