"""Runners with compiled models under the real `bentoml serve`: of a legacy service, and as services of the new SDK.

Each is served twice from one home, and asked everything at once; the receiver has its spans.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.bento.traced_server import is_request, new_trace
from tests.models import classifier
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.servers import BOOT, Server, value
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[2]
CLIENT = "1" * 16  # the span that a request comes from
ROWS = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
SAVE = """
import bentoml
from tests.serving.test_runners import saved_model
bentoml.pytorch.save_model("saved", saved_model(), signatures={"__call__": {"batchable": True}})
"""


def saved_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).eval()


def logits(rows: Any = ROWS) -> Any:
    with torch.inference_mode():
        return classifier()(torch.tensor(rows))["logits"]


def post(server: Server, path: str, rows: Any, trace_id: str | None = None) -> Any:
    answer = response_to(server, path, rows, trace_id)
    assert answer.status_code == 200, answer.text + server.log
    return answer.json()


def response_to(server: Server, path: str, rows: Any, trace_id: str | None = None) -> httpx.Response:
    headers = {} if trace_id is None else {"traceparent": f"00-{trace_id}-{CLIENT}-01"}
    body = rows if server.target.endswith("legacy") else {"rows": rows}
    return httpx.post(f"{server.base_url}{path}", json=body, headers=headers, timeout=PATIENCE)


@pytest.fixture(scope="module", params=["legacy", "Api"])
def boots(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """By boot: what was answered, counted and exported until the server's end."""
    home = tmp_path_factory.mktemp("home")
    env = {**os.environ, "BENTOML_HOME": str(home)}
    subprocess.run([sys.executable, "-c", SAVE], cwd=CHECKOUT, env=env, check=True, capture_output=True)
    seen: dict[str, Any] = {"kind": request.param}
    with OtlpReceiver() as receiver:
        config = config_of(request.param, receiver)
        target = f"tests.serving.runners:{request.param}"
        environment = {"BENTOML_CONFIG_OVERRIDES": json.dumps(config), "OTEL_BSP_SCHEDULE_DELAY": "100"}
        server = Server(CHECKOUT, home, target=target, env=environment)
        for boot in ("cold", "warm"):
            receiver.clear()
            with server.start():
                seen[boot] = ask(server, receiver)
            seen[boot]["spans"] = receiver.spans()  # also those that a process flushed at its end
        yield seen


def config_of(kind: str, receiver: OtlpReceiver) -> dict[str, Any]:
    tracing = receiver.tracing_config(0.0)  # a request is sampled if its traceparent says so
    services: dict[str, Any] = {"embedded": {"torch_compile": {"mode": "max-autotune"}}}
    if kind == "Api":
        services |= {name: {"tracing": tracing} for name in ("Api", "classify", "double", "saved")}
        services["saved"]["torch_compile"] = {"engine": "jit", "backend": "eager"}  # one real compile is enough
        return {"services": services}
    return {
        "tracing": tracing,
        "api_server": {"workers": 1},
        "runners": {"resources": {"cpu": 1}, "double": {"workers_per_resource": 2}},
        "services": services,
    }


def ask(server: Server, receiver: OtlpReceiver) -> dict[str, Any]:
    one, whole = new_trace(), new_trace()
    answers = {"classify": post(server, "/classify", ROWS, one), "all": post(server, "/all", ROWS, whole)}
    batch = burst(server, receiver)
    # a process without a compiled model loses what it has not exported at its end, and one that boots its whole boot
    legacy = server.target.endswith("legacy")
    wait = functools.partial(receiver.wait_until, deadline=BOOT)
    wait(booted, 5 if legacy else 3, "boots")  # `double` has two workers in a legacy service, and is ready with one
    wait(functools.partial(whole_ways, {one}), 1, "the way of /classify")
    wait(functools.partial(whole_ways, {whole}), 3, "the ways of /all")
    wait(functools.partial(whole_ways, set(batch)), 1, "the ways of the batches")
    return {**answers, "traces": {"classify": one, "all": whole}, "batch": batch, "metrics": server.metrics()}


def booted(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    """The boots of models that are over, with their workers'."""
    workers = {span.span_id for span in named(spans, "bentoml.worker.boot")}
    return [span for span in named(spans, "torch_compile.startup") if span.parent_id in workers]


def whole_ways(traces: set[str], spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    """An inference of each model in these traces, if they are there with all that is above them."""
    by_id = {span.span_id: span for span in spans}
    found = {}
    for inference in (span for span in named(spans, "torch_compile.inference") if span.trace_id in traces):
        above = inference
        while above.parent_id != CLIENT:
            if above.parent_id not in by_id:
                return []
            above = by_id[above.parent_id]
        found[inference.attributes["torch_compile.model"]] = inference
    return list(found.values())


def burst(server: Server, receiver: OtlpReceiver) -> dict[str, float]:
    """Concurrent requests of one row, again until some shared a batch: the value of each one's trace."""
    ends = time.monotonic() + PATIENCE
    with ThreadPoolExecutor(16) as pool:
        while time.monotonic() < ends:
            traces = [new_trace() for _ in range(16)]
            rows = [[[i % 11] * 5] for i in range(16)]
            found = list(pool.map(lambda trace, row: response_to(server, "/classify", row, trace), traces, rows))
            if not all(response.is_success for response in found):
                continue  # BentoML 1.4.40's client renews its connections every 100 requests, and ends those under way
            batches = receiver.wait_until(functools.partial(batches_of, set(traces)), 1, "batches of these traces")
            served = sum(span.attributes["torch_compile.batch_size"] for span in batches)
            if len(batches) < len(traces) == served:  # else with requests of a burst before that was ended
                return {trace: response.json()[0][0] for trace, response in zip(traces, found, strict=True)}
    raise AssertionError("no two requests shared a batch")


def batches_of(traces: set[str], spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    """The inferences in these traces, once all traces are answered."""
    mine = [span for span in named(spans, "torch_compile.inference") if span.trace_id in traces]
    answered = {link.trace_id for span in mine for link in span.links} | {span.trace_id for span in mine}
    return mine if traces <= answered else []


def named(spans: list[ReceivedSpan], name: str, **attributes: str) -> list[ReceivedSpan]:
    wanted = {f"torch_compile.{key}": text for key, text in attributes.items()}
    return [span for span in spans if span.name == name and wanted.items() <= span.attributes.items()]


BOOTS = pytest.mark.parametrize("boot", ["cold", "warm"])


@BOOTS
def test_every_runner_answers_as_its_model(boots: dict[str, Any], boot: str) -> None:
    seen, expected = boots[boot], logits()
    near: dict[str, Any] = {"rel": 1e-5, "abs": 1e-5}
    with torch.inference_mode():
        saved = saved_model()(torch.tensor(ROWS)[:, :4].float())

    def equal(answer: Any, tensor: torch.Tensor) -> None:
        assert answer == [pytest.approx(row, **near) for row in tensor.tolist()]

    equal(seen["classify"], expected)
    equal(seen["all"]["double"]["logits"], expected * 2)
    equal(seen["all"]["saved"], saved)
    if boots["kind"] == "legacy":
        equal(seen["all"]["embedded"]["logits"], expected * 3)
        return
    equal(seen["all"]["by name"]["logits"], expected * 3)
    assert seen["all"]["title"] == "double"
    for kind in ("tensor", "array", "list"):
        equal(seen["all"][kind], expected)
    equal(seen["all"]["both"][0], expected)
    assert seen["all"]["both"][1] == [0, 2]
    # split by BentoML, and joined again
    for kind in ("large", "large array"):
        equal(seen["all"][kind], expected.repeat(20, 1))
    equal(seen["all"]["large both"][0], expected.repeat(20, 1))
    assert seen["all"]["large both"][1] == [2 * number for number in range(40)]


@BOOTS
def test_requests_that_share_a_batch_have_their_own_rows_results(boots: dict[str, Any], boot: str) -> None:
    expected = [float(logits([[i % 11] * 5])[0, 0]) for i in range(16)]
    assert list(boots[boot]["batch"].values()) == [pytest.approx(one, abs=1e-5) for one in expected]


@pytest.mark.parametrize(("boot", "outcome"), [("cold", "compiled"), ("warm", "loaded")])
def test_each_process_boots_its_model_which_the_first_compiles_and_the_second_loads(
    boots: dict[str, Any], boot: str, outcome: str
) -> None:
    spans = boots[boot]["spans"]
    workers = {"classify": "classify", "double": "double", "saved": "saved"}
    if boots["kind"] == "legacy":
        workers["embedded"] = "legacy"  # the API worker's process
    startups = named(spans, "torch_compile.startup")
    assert {span.attributes["torch_compile.model"]: span.resource["service.name"] for span in startups} == workers
    parents = {span.span_id: span for span in named(spans, "bentoml.worker.boot")}
    assert all(parents[span.parent_id].resource["service.name"] in workers.values() for span in startups)
    engines = {span.attributes["torch_compile.model"]: span.attributes["torch_compile.engine"] for span in startups}
    assert engines == {**dict.fromkeys(workers, "jit"), "saved": "aot" if boots["kind"] == "legacy" else "jit"}
    once = [span for span in startups if span.attributes["torch_compile.model"] != "double"]  # it has two workers
    assert {span.attributes["torch_compile.outcome"] for span in once} == {outcome}
    assert value(boots[boot]["metrics"], "torch_compile_startup_seconds", model="classify", outcome=outcome) > 0


@BOOTS
def test_config_comes_from_the_class_the_init_params_and_bentomls_config(boots: dict[str, Any], boot: str) -> None:
    spans = boots[boot]["spans"]
    modes = {"classify": "default", "double": "reduce-overhead", "saved": "default", "embedded": "max-autotune"}
    for span in named(spans, "torch_compile.startup"):
        assert span.attributes["torch_compile.mode"] == modes[span.attributes["torch_compile.model"]]


@BOOTS
def test_models_are_called_in_their_runners_processes(boots: dict[str, Any], boot: str) -> None:
    answers = boots[boot]["all"]
    api, classify = answers["processes"]
    assert len({api, classify, answers["double"]["process"]}) == 3
    if boots["kind"] == "legacy":
        assert answers["embedded"]["process"] == api


@BOOTS
def test_a_request_is_one_trace_through_all_of_its_processes(boots: dict[str, Any], boot: str) -> None:
    spans, traces = boots[boot]["spans"], boots[boot]["traces"]
    by_id = {span.span_id: span for span in spans}
    api = "legacy" if boots["kind"] == "legacy" else "Api"

    def way(span: ReceivedSpan) -> list[str]:
        """The services of the request spans from the inference's own up."""
        found = []
        while (span := by_id.get(span.parent_id)) is not None:  # type: ignore[assignment]
            found += [span.resource["service.name"]] if is_request(span) else []
        return found

    [inference] = [span for span in named(spans, "torch_compile.inference") if span.trace_id == traces["classify"]]
    assert way(inference) == ["classify", api]
    of_all = [span for span in named(spans, "torch_compile.inference") if span.trace_id == traces["all"]]
    ways = {span.attributes["torch_compile.model"]: way(span) for span in of_all}
    expected = {"double": ["double", api], "saved": ["saved", api]}
    expected |= {"embedded": [api]} if boots["kind"] == "legacy" else {"classify": ["classify", api]}
    assert ways == expected


@BOOTS
def test_a_batch_is_in_one_of_its_requests_traces_and_links_to_all(boots: dict[str, Any], boot: str) -> None:
    spans, traces = boots[boot]["spans"], set(boots[boot]["batch"])
    inferences = [span for span in named(spans, "torch_compile.inference") if span.trace_id in traces]
    answered: list[str] = []
    for span in inferences:
        answered += [link.trace_id for link in span.links if link.trace_id in traces] or [span.trace_id]
    assert sorted(answered) == sorted(traces)
    assert sum(span.attributes["torch_compile.batch_size"] for span in inferences) == len(traces)
    assert len(inferences) < len(traces)


def test_a_runner_with_two_workers_is_compiled_once(boots: dict[str, Any]) -> None:
    if boots["kind"] == "legacy":
        startups = named(boots["cold"]["spans"], "torch_compile.startup", model="double")
        assert len(startups) == 2
        assert sorted(span.attributes["torch_compile.outcome"] for span in startups) == ["compiled", "loaded"]
