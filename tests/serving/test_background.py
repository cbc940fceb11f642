"""`startup: background` under the real `bentoml serve`: requests, probes, metrics and traces while a model is compiled,
and what is left of a compiler that fails.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bentoml_compile import model as core
from bentoml_compile.listener import Listener, Stage
from tests.models import classifier, ids
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.servers import Server, value
from tests.serving.test_boots import CHECKOUT, children, classify, one, serve, worker
from tests.serving.test_failures import script
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

PATIENCE = 300.0  # seconds until a boot counts as failed; a busy machine takes minutes
IN_BACKGROUND = {"startup": "background"}


def status(server: Server, path: str) -> int:
    return httpx.get(f"{server.base_url}/{path}", timeout=PATIENCE).status_code


def wait_alive(server: Server) -> None:
    """Returns when `__init__` is over."""

    def alive() -> bool:
        try:
            return status(server, "livez") == 200
        except httpx.TransportError:
            return False

    server._poll(alive, PATIENCE, "/livez did not answer 200")


class Gate:
    """A g++, first on PATH, that touches `came` when it is to compile, and waits for `go`."""

    def __init__(self, directory: Path) -> None:
        self.came, self.go = directory / "came", directory / "go"
        compiler = directory / "gate"
        compiler.mkdir()
        wait = f'touch {self.came}; while [ ! -e {self.go} ]; do sleep 0.05; done; exec {shutil.which("g++")} "$@"'
        script(compiler, "g++", f'[ "$1" = --version ] && exec {shutil.which("g++")} "$@"; {wait}')
        self.env = {"PATH": f"{compiler}{os.pathsep}{os.environ['PATH']}"}


def compilers(server: Server) -> list[psutil.Process]:
    """The processes that compile for the worker, without what stands between them."""
    return [one for one, command in server.commands() if "aot.child import main" in " ".join(command[:3])]


def inferences(server: Server, engine: str, model: str = "tiny") -> float:
    return value(server.metrics(), "torch_compile_inference_seconds_count", model=model, engine=engine)


# from eager to compiled


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A cold boot whose compiler waits for a request to be answered, and a warm one; what each showed."""
    directory = tmp_path_factory.mktemp("story")
    gate = Gate(directory)
    seen: dict[str, Any] = {}
    with OtlpReceiver() as receiver:
        config: dict[str, Any] = {
            "torch_compile": {**IN_BACKGROUND, "engine": "aot"},
            "tracing": receiver.tracing_config(1.0),
        }
        with serve(directory / "home", env=gate.env, **config).start(wait=False) as server:
            wait_alive(server)
            server._poll(gate.came.exists, PATIENCE, "the compile did not begin")
            server.wait_for_log("compiler_process for")
            seen["while compiling"] = look(server)
            gate.go.touch()
            server.wait_ready(PATIENCE)
            seen["compiled"] = look(server)
            receiver.wait_for("torch_compile.inference", count=2)
            seen["log"], seen["cold"] = server.log, receiver.wait_until(list, count=1)

            server.stop()
            receiver.clear()
            gate.go.unlink()
            gate.came.unlink()
            server.start(wait=False)
            wait_alive(server)
            seen["warm"] = look(server)
            receiver.wait_for("torch_compile.inference")
            seen["warm spans"], seen["compiled again"] = receiver.spans(), gate.came.exists()
            yield seen


def look(server: Server) -> dict[str, Any]:
    answer = classify(server)
    return {
        "ready": status(server, "readyz"),
        "alive": status(server, "livez"),
        "answer": answer.json(),
        "engines": {engine: inferences(server, engine) for engine in ("eager", "aot")},
        "compilers": len(compilers(server)),
    }


def test_requests_are_answered_eagerly_while_the_model_is_compiled(story: dict[str, Any]) -> None:
    seen = story["while compiling"]
    assert seen["compilers"] == 1
    assert len(seen["answer"]) == 2
    assert seen["engines"] == {"eager": 1, "aot": 0}
    assert (seen["alive"], seen["ready"]) == (200, 503)


def test_compiled_code_answers_once_the_service_is_ready(story: dict[str, Any]) -> None:
    seen = story["compiled"]
    assert seen["compilers"] == 0
    assert seen["engines"] == {"eager": 1, "aot": 1}
    for compiled, eager in zip(seen["answer"], story["while compiling"]["answer"], strict=True):
        assert compiled == pytest.approx(eager, abs=1e-5)
    engines = [span.attributes["torch_compile.engine"] for span in in_order(story["cold"], "torch_compile.inference")]
    assert engines == ["eager", "aot"]


def in_order(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_ns)


def test_the_startup_span_ends_when_compiled_code_takes_over(story: dict[str, Any]) -> None:
    spans = story["cold"]
    startup, boot = one(spans, "torch_compile.startup"), one(spans, "bentoml.worker.boot")
    eager, compiled = in_order(spans, "torch_compile.inference")
    assert startup.parent_id == boot.span_id
    assert boot.end_ns < eager.start_ns < startup.end_ns <= compiled.start_ns
    assert startup.attributes["torch_compile.outcome"] == "compiled"
    assert [link.span_id for link in compiled.links] == [startup.span_id]


def test_the_compilers_phases_are_below_the_startup_span(story: dict[str, Any]) -> None:
    spans = story["cold"]
    startup = one(spans, "torch_compile.startup")
    names = {span.name.removeprefix("torch_compile.") for span in children(spans, startup)}
    assert names == {"lookup", "compile", "verify", "store"}
    below = one(spans, "torch_compile.compile")
    for phase in ("export", "compiler_process"):  # the latter's are those that the process has sent
        [below] = [span for span in children(spans, below) if span.name == f"torch_compile.phase.{phase}"]
    assert "torch_compile.phase.cpp_compile" in {span.name for span in descendants(spans, below)}


def descendants(spans: list[ReceivedSpan], parent: ReceivedSpan) -> list[ReceivedSpan]:
    return [span for child in children(spans, parent) for span in (child, *descendants(spans, child))]


def test_the_log_says_what_is_going_on(story: dict[str, Any]) -> None:
    lines = story["log"].splitlines()
    assert any("'tiny': answers eagerly while it is compiled in the background" in line for line in lines)
    assert any("'tiny': ids: int64[2, 5] (1 of 1): compiler_process for " in line for line in lines)


def test_the_next_boot_is_warm_and_ready_at_once(story: dict[str, Any]) -> None:
    seen = story["warm"]
    assert (seen["alive"], seen["ready"]) == (200, 200)
    assert seen["engines"] == {"eager": 0, "aot": 1}
    assert not story["compiled again"]
    assert one(story["warm spans"], "torch_compile.startup").attributes["torch_compile.outcome"] == "loaded"
    assert seen["answer"] == story["compiled"]["answer"]


# readiness


def waiting(home: Path, target: str, **overrides: Any) -> Server:
    return Server(
        CHECKOUT, home, target=f"tests.serving.background_service:{target}", env={"GO": str(home / "go"), **overrides}
    )


class HeldEnd(Listener):
    """Holds up the end of a boot's span."""

    def __init__(self) -> None:
        self.came, self.go = threading.Event(), threading.Event()

    def stage_ended(self, stage: Stage) -> None:
        if stage.name == "startup":
            self.came.set()
            assert self.go.wait(PATIENCE)


def test_a_model_is_ready_once_the_span_of_its_boot_has_ended() -> None:
    end = HeldEnd()
    model = core.compile_model(
        classifier(),
        example_inputs=[{"ids": ids(2, 5)}],
        config={"backend": "eager", "keep_eager_if_slower": False, "startup": "background"},
        listeners=[end],
    )
    try:
        assert end.came.wait(PATIENCE)
        assert not model.is_ready
        end.go.set()
        wait_for(lambda: model.is_ready, PATIENCE)
        assert model.report.outcome == "compiled"
    finally:
        end.go.set()
        model.close()


@pytest.mark.soak  # in every run: tests/bento/test_readiness.py, without a server
def test_a_service_that_may_serve_eagerly_is_ready_at_once(tmp_path: Path) -> None:
    option = "services.Waiting.torch_compile.ready_when=eager"
    with waiting(tmp_path, "Waiting", BENTOML_CONFIG_OPTIONS=option).start(wait=False) as server:
        server.wait_ready(PATIENCE)
        assert len(classify(server).json()) == 2
        assert inferences(server, "eager", model="waiting") == 1
        assert "model 'waiting': compiled" not in server.log


def test_a_dependency_that_is_not_ready_makes_the_service_not_ready(tmp_path: Path) -> None:
    with waiting(tmp_path, "Front").start(wait=False) as server:
        wait_alive(server)
        server.wait_for_log("model 'waiting': answers eagerly", PATIENCE)
        server._poll(lambda: classify(server).status_code == 200, PATIENCE, "the dependency did not answer")
        assert status(server, "readyz") == 503
        (tmp_path / "go").touch()
        server.wait_ready(PATIENCE)
        assert len(classify(server).json()) == 2
        assert inferences(server, "jit", model="waiting") == 1


# a compiler that fails


def check_serves_eagerly(server: Server, receiver: OtlpReceiver, reason: str) -> str:
    """Returns the message of the event on the startup span, which ended with the giving up."""
    server.wait_ready(PATIENCE)
    assert len(classify(server).json()) == 2
    assert inferences(server, "eager") >= 1
    assert value(server.metrics(), "torch_compile_fallbacks_total", model="tiny", reason=reason) == 1
    [startup] = receiver.wait_for("torch_compile.startup")
    [compile_] = [span for span in children(receiver.spans(), startup) if span.name == "torch_compile.compile"]
    [event] = [event for event in compile_.events if event.name == "torch_compile.fallback"]
    assert event.attributes["torch_compile.reason"] == reason
    assert startup.attributes["torch_compile.outcome"] == "eager"
    assert f"model 'tiny': served eagerly: {reason}: {event.attributes['torch_compile.message']}" in server.log
    assert compilers(server) == []
    assert not server.names() & {"sleep", "g++", "cc1plus"}
    assert list(server.home.rglob(".child-*")) == []
    return str(event.attributes["torch_compile.message"])


def test_a_compiler_that_is_killed_leaves_the_worker_alive_and_serving(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with OtlpReceiver() as receiver:
        config: dict[str, Any] = {"torch_compile": IN_BACKGROUND, "tracing": receiver.tracing_config(0.0)}
        with serve(tmp_path / "home", env=gate.env, **config).start(wait=False) as server:
            wait_alive(server)
            server._poll(gate.came.exists, PATIENCE, "the compile did not begin")
            before = worker(server)
            [compiler] = compilers(server)
            compiler.kill()
            message = check_serves_eagerly(server, receiver, "compiler_died")
            assert "was killed by signal 9" in message
            assert worker(server) == before


def test_a_compiler_that_hangs_is_ended_by_the_time_limit(tmp_path: Path) -> None:
    hanging = tmp_path / "hanging"
    hanging.mkdir()
    script(hanging, "g++", "exec sleep 3600")
    path = {"PATH": f"{hanging}{os.pathsep}{os.environ['PATH']}"}
    with OtlpReceiver() as receiver:
        config: dict[str, Any] = {
            "torch_compile": {**IN_BACKGROUND, "time_limit": 30},  # long after the worker is alive
            "tracing": receiver.tracing_config(0.0),
        }
        with serve(tmp_path / "home", env=path, **config).start(wait=False) as server:
            wait_alive(server)
            assert status(server, "readyz") == 503
            assert "30 s" in check_serves_eagerly(server, receiver, "time_limit")


@pytest.mark.soak  # in every run: tests/bento/test_readiness.py, without a server
def test_a_graph_break_that_was_refused_keeps_the_service_from_being_ready(tmp_path: Path) -> None:
    config = {**IN_BACKGROUND, "backend": "eager"}
    with serve(tmp_path / "home", "InParts", torch_compile=config).start(wait=False) as server:
        wait_alive(server)
        server.wait_for_log("model 'broken': will not be ready", PATIENCE)
        assert (status(server, "livez"), status(server, "readyz")) == (200, 503)
        assert httpx.post(f"{server.base_url}/run", json={}, timeout=60).status_code == 200
        assert inferences(server, "eager", model="broken") == 1
        for words in ("torch._dynamo.graph_break()", "if x.sum() > 1000:", "models.py:", "hint:", "'prefer'"):
            assert words in server.log
