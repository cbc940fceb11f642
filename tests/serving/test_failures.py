"""What goes wrong while a worker compiles, provoked for real: it serves eagerly, or ends when it was asked to."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.otlp_receiver import OtlpReceiver
from tests.servers import BOOT, Server, value
from tests.serving.test_boots import COMPILERS, classify, path_without, serve


def script(directory: Path, name: str, text: str) -> str:
    """An executable file for the compiler's place; returns its path."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def check_serves_eagerly(server: Server, reason: str) -> None:
    assert len(classify(server).json()) == 2
    metrics = server.metrics()
    assert value(metrics, "torch_compile_fallbacks_total", model="tiny", reason=reason) >= 1
    assert value(metrics, "torch_compile_startup_seconds", model="tiny", engine="eager") > 0
    assert value(metrics, "torch_compile_inference_seconds_count", model="tiny", engine="eager") >= 1


def test_a_machine_without_a_compiler_serves_eagerly_and_says_what_to_install(tmp_path: Path) -> None:
    environment = {"PATH": path_without(tmp_path, *COMPILERS)}
    with (
        OtlpReceiver() as receiver,
        serve(tmp_path / "home", env=environment, tracing=receiver.tracing_config(0.0)) as server,
    ):
        check_serves_eagerly(server, "no_compiler")
        [startup] = receiver.wait_for("torch_compile.startup")
        events = [event for span in receiver.spans() for event in span.events if event.name == "torch_compile.fallback"]
        assert [event.attributes["torch_compile.reason"] for event in events] == ["no_compiler"]
        assert startup.attributes["torch_compile.engine"] == "eager"
        lines = [line for line in server.log.splitlines() if "apt-get install g++" in line]
        assert len(lines) == 1


def test_an_image_without_openssl_compiles_all_the_same(tmp_path: Path) -> None:
    env = {"PATH": path_without(tmp_path, "openssl")}
    with serve(tmp_path / "home", env=env, torch_compile={"engine": "jit"}) as server:
        assert len(classify(server).json()) == 2
        assert value(server.metrics(), "torch_compile_startup_seconds", model="tiny", engine="jit") > 0


def test_a_compiler_that_fails_means_eager_serving(tmp_path: Path) -> None:
    compiler = script(tmp_path, "g++", '[ "$1" = --version ] && exec g++ "$@"; echo "internal error" >&2; exit 1')
    with serve(tmp_path / "home", env={"CXX": compiler}) as server:
        check_serves_eagerly(server, "compiler_failed")
        assert "served eagerly: compiler_failed: " in server.log


@pytest.mark.soak
def test_a_compiler_that_hangs_is_ended_by_the_time_limit(tmp_path: Path) -> None:
    compiler = script(tmp_path, "g++", "exec sleep 3600")
    with serve(tmp_path / "home", env={"CXX": compiler}, torch_compile={"time_limit": 15}) as server:
        check_serves_eagerly(server, "time_limit")
        assert "sleep" not in server.names()


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_a_worker_that_compiles_ends_when_it_is_told_to_and_leaves_no_child(
    tmp_path: Path, how: signal.Signals
) -> None:
    server = serve(tmp_path / "home", torch_compile={"backend": "wait_forever"}).start(wait=False)
    with server:
        server._poll(lambda: "sleep" in server.names(), BOOT, "the compile did not begin")
        server.stop(how)  # raises if a process is left


def test_a_graph_break_stops_the_boot_and_the_next_one_does_not_compile(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        server = serve(tmp_path / "home", "InParts", tracing=receiver.tracing_config(0.0)).start(wait=False)
        with server:
            first, second = receiver.wait_for("torch_compile.startup", count=2, deadline=BOOT)[:2]
        spans = receiver.spans()
        steps = [[span.name for span in spans if span.parent_id == startup.span_id] for startup in (first, second)]
        assert steps == [["torch_compile.lookup", "torch_compile.compile"], ["torch_compile.lookup"]]
        assert first.is_error
        assert second.is_error
        for words in ("torch._dynamo.graph_break()", "if x.sum() > 1000:", "models.py:", "hint:", "'prefer'"):
            assert server.log.count(words) >= 2


@pytest.mark.soak
def test_the_same_model_is_served_in_parts_if_whole_graphs_are_only_preferred(tmp_path: Path) -> None:
    with serve(tmp_path / "home", "InParts", torch_compile={"fullgraph": "prefer", "backend": "eager"}) as server:
        assert value(server.metrics(), "torch_compile_graph_breaks", model="broken") == 2
        assert server.log.count("compiled in parts") == 1
