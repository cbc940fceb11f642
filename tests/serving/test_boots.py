"""Cold and warm boots of a compiled service under the real `bentoml serve`, seen by a client and in the trace."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from bentoml_compile import listener
from bentoml_compile.listener import Listener, Stage
from bentoml_compile.model import compile_model
from tests.models import classifier, ids
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.servers import Server, value

CHECKOUT = Path(__file__).resolve().parents[2]
ROWS = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def serve(home: Path, service: str = "Tiny", env: dict[str, str] | None = None, **overrides: Any) -> Server:
    config = json.dumps({"services": {service: overrides}})
    environment = {"BENTOML_CONFIG_OVERRIDES": config, **(env or {})}
    return Server(CHECKOUT, home, target=f"tests.serving.service:{service}", env=environment)


def classify(server: Server, rows: Any = ROWS) -> httpx.Response:
    return httpx.post(f"{server.base_url}/classify", json={"rows": rows}, timeout=60)


def worker(server: Server) -> int:
    return int(httpx.post(f"{server.base_url}/process", json={}, timeout=60).text)


COMPILERS = ("gcc", "g++", "c++", "clang", "cc1")


def path_without(directory: Path, *words: str) -> str:
    """A PATH that has everything that this one has, except tools with one of the words in their names."""
    tools = directory / "bin"
    tools.mkdir()
    for folder in reversed(os.environ["PATH"].split(os.pathsep)):
        for tool in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if not any(word in tool.name for word in words) and (tool.name != "cc" or "gcc" not in words):
                (tools / tool.name).unlink(missing_ok=True)
                (tools / tool.name).symlink_to(tool)
    return str(tools)


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module", params=["jit", "aot"])
def boots(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver
) -> Iterator[dict[str, Any]]:
    """A cold boot, a warm one, and what each answered, exported and counted; the second server still runs.

    What was compiled ahead of time is loaded without a compiler, from a store that cannot be written.
    """
    seen: dict[str, Any] = {"engine": request.param}
    config: dict[str, Any] = {"torch_compile": {"engine": request.param}, "tracing": receiver.tracing_config(1.0)}
    server = serve(tmp_path_factory.mktemp("home"), **config)
    for name in ("cold", "warm"):
        if (name, request.param) == ("warm", "aot"):
            server.env["PATH"] = path_without(tmp_path_factory.mktemp("tools"), *COMPILERS)
            make_read_only(server.home / "compile")
        receiver.clear()
        server.start()
        try:
            seen[name] = {"answer": classify(server).json(), "metrics": server.metrics()}
        finally:
            if name == "cold":
                server.stop()
        receiver.wait_for("torch_compile.inference")
        receiver.wait_for("POST /classify")
        receiver.wait_for("bentoml.worker.boot")
        seen[name]["spans"] = receiver.spans()
    with server:
        yield {**seen, "server": server}


def make_read_only(store: Path) -> None:
    for path in [*store.rglob("*"), store]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def children(spans: list[ReceivedSpan], parent: ReceivedSpan) -> list[ReceivedSpan]:
    return [span for span in spans if span.parent_id == parent.span_id]


def one(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    [span] = [span for span in spans if span.name == name]
    return span


@pytest.mark.parametrize(("boot", "outcome", "step"), [("cold", "compiled", "compile"), ("warm", "loaded", "load")])
def test_the_first_boot_compiles_and_the_next_loads(boots: dict[str, Any], boot: str, outcome: str, step: str) -> None:
    metrics, spans = boots[boot]["metrics"], boots[boot]["spans"]
    labels = {"model": "tiny", "engine": boots["engine"]}
    assert value(metrics, "torch_compile_startup_seconds", outcome=outcome, **labels) > 0
    startup = one(spans, "torch_compile.startup")
    assert startup.attributes["torch_compile.outcome"] == outcome
    assert startup.attributes["torch_compile.engine"] == boots["engine"]
    assert startup.attributes["torch_compile.mode"] == "default"
    assert startup.attributes["torch_compile.fullgraph"] == "require"
    assert len(startup.attributes["torch_compile.fingerprint"]) == 16
    names = {span.name.removeprefix("torch_compile.") for span in children(spans, startup)}
    assert names == {"lookup", step} | ({"verify", "store"} if step == "compile" else set())


def test_both_boots_answer_as_the_model(boots: dict[str, Any]) -> None:
    assert boots["cold"]["answer"] == boots["warm"]["answer"]
    expected: torch.Tensor = classifier()(torch.tensor(ROWS))["logits"]
    assert boots["cold"]["answer"] == [pytest.approx(row, abs=1e-5) for row in expected.tolist()]


def test_both_boots_have_one_fingerprint(boots: dict[str, Any]) -> None:
    ids = {
        one(boots[b]["spans"], "torch_compile.startup").attributes["torch_compile.fingerprint"]
        for b in ("cold", "warm")
    }
    assert len(ids) == 1


def test_a_warm_boot_compiles_nothing(boots: dict[str, Any]) -> None:
    def phases(boot: str) -> set[str]:
        return {span.name.removeprefix("torch_compile.phase.") for span in boots[boot]["spans"] if "phase" in span.name}

    traced_by = {"jit": "dynamo", "aot": "export"}[boots["engine"]]
    assert {traced_by, "aot_autograd", "inductor", "codegen"} <= phases("cold")
    if boots["engine"] == "aot":
        assert phases("warm") == set()
    else:
        assert "cache_load" in phases("warm")
        assert not phases("warm") & {"inductor", "codegen"}


@pytest.mark.parametrize("boot", ["cold", "warm"])
def test_the_steps_cover_the_startup_span(boots: dict[str, Any], boot: str) -> None:
    spans = boots[boot]["spans"]
    startup = one(spans, "torch_compile.startup")
    steps = sorted(children(spans, startup), key=lambda step: step.end_ns)
    begins, ends = [step.start_ns for step in steps], [step.end_ns for step in steps]
    assert begins == [startup.start_ns, *ends[:-1]]  # what is left is behind the last one
    assert ends[-1] <= startup.end_ns
    assert startup.parent_id == one(spans, "bentoml.worker.boot").span_id


class Stages(Listener):
    def __init__(self) -> None:
        self.ended: list[Stage] = []

    def stage_ended(self, stage: Stage) -> None:
        self.ended.append(stage)


def test_little_is_left_of_a_boot_behind_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # by the thread's own clock: a busy machine may stop a boot of milliseconds for longer than it takes
    monkeypatch.setattr(listener, "time", SimpleNamespace(time_ns=time.thread_time_ns))
    for last_step in ("store", "load"):
        stages = Stages()
        config, examples = {"engine": "aot", "keep_eager_if_slower": False}, [{"ids": ids(2, 5)}]
        compile_model(
            classifier(), example_inputs=examples, config=config, listeners=[stages], default_store=tmp_path
        ).close()
        *steps, startup = [stage for stage in stages.ended if stage.parent is None or stage.parent.parent is None]
        assert steps[-1].name == last_step
        assert startup.ended_ns is not None
        assert steps[-1].ended_ns is not None
        whole = startup.ended_ns - startup.started_ns
        assert startup.ended_ns - steps[-1].ended_ns <= max(0.05 * whole, 0.02e9)


@pytest.mark.parametrize("boot", ["cold", "warm"])
def test_the_inference_span_sits_under_its_request_and_links_to_the_startup(boots: dict[str, Any], boot: str) -> None:
    spans = boots[boot]["spans"]
    inference = one(spans, "torch_compile.inference")
    request = one(spans, "POST /classify")
    assert inference.parent_id == request.span_id
    assert [link.span_id for link in inference.links] == [one(spans, "torch_compile.startup").span_id]
    assert inference.attributes["torch_compile.shape"] == "ids: int64[2, 5]"
    assert inference.attributes["torch_compile.prepared"] is True
    assert inference.attributes["torch_compile.compile_seconds"] == 0
    assert inference.attributes["torch_compile.batch_size"] == 2


def test_metrics_split_the_boot_and_count_the_calls(boots: dict[str, Any]) -> None:
    cold, warm = boots["cold"]["metrics"], boots["warm"]["metrics"]
    assert value(cold, "torch_compile_phase_seconds", model="tiny", phase="codegen") > 0
    assert value(cold, "torch_compile_artifact_lookups_total", model="tiny", outcome="miss") == 1
    assert value(warm, "torch_compile_artifact_lookups_total", model="tiny", outcome="hit") == 1
    calls = {"model": "tiny", "engine": boots["engine"], "shape": "ids: int64[2, 5]"}
    assert value(warm, "torch_compile_inference_seconds_count", **calls) >= 1
    assert value(warm, "torch_compile_prepared_shapes", model="tiny", engine=boots["engine"]) == 1
    assert value(warm, "torch_compile_ready", model="tiny") == 1
    assert value(warm, "torch_compile_graph_breaks", model="tiny") == 0


def test_an_unprepared_shape_is_a_422_that_names_the_prepared_ones(boots: dict[str, Any]) -> None:
    answer = classify(boots["server"], [[1, 2, 3]])
    assert answer.status_code == 422
    assert "ids: int64[1, 3]" in answer.text
    assert "ids: int64[2, 5]" in answer.text
    assert value(boots["server"].metrics(), "torch_compile_unprepared_total", model="tiny", action="reject") >= 1


def test_a_token_outside_of_the_vocabulary_is_an_error_and_the_worker_lives_on(boots: dict[str, Any]) -> None:
    server = boots["server"]
    before = worker(server)
    assert classify(server, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 1_000_000]]).status_code == 500
    assert classify(server).json() == boots["warm"]["answer"]
    assert worker(server) == before
    assert "IndexError" in server.log


def test_disabled_serves_the_same_answers_eagerly(tmp_path: Path) -> None:
    with serve(tmp_path, torch_compile={"enabled": False}) as server:
        expected: torch.Tensor = classifier()(torch.tensor(ROWS))["logits"]
        assert classify(server).json() == [pytest.approx(row, abs=1e-5) for row in expected.tolist()]
        [outcome] = [one.labels for one in server.metrics() if one.name == "torch_compile_startup_seconds"]
        assert outcome == {"model": "tiny", "engine": "eager", "outcome": "eager"}
        assert not (tmp_path / "compile").exists()
