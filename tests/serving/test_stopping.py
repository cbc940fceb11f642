"""SIGTERM and Ctrl-C under the real `bentoml serve`, whatever its workers are at: they answer what they have begun, and
leave no process. What a signal does to a compile in the foreground of a plain service is in test_failures.py.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from moto.server import ThreadedMotoServer

from bentoml_compile.artifacts.signing import KEY, PrivateKey
from tests.artifacts.faulty_proxy import Fault, FaultyProxy
from tests.artifacts.remotes import CREDENTIALS
from tests.models import classifier
from tests.servers import END, Server
from tests.serving.test_background import Gate, compilers, wait_alive

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[2]
PATIENCE = 300.0  # seconds until something that should happen counts as failed; a busy machine takes minutes
ROWS = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
EAGER = {"engine": "jit", "backend": "eager"}
HUNG = {"engine": "jit", "backend": "wait_forever"}
IN_BACKGROUND = {"startup": "background"}

Signal = Callable[[Server], None]


def sigterm(server: Server) -> None:
    """As Docker, Kubernetes and systemd do: to the supervisor, which tells the workers and their children."""
    os.kill(server.pid, signal.SIGTERM)


def ctrl_c(server: Server) -> None:
    """As a terminal does: to the supervisor and the workers at once."""
    os.killpg(server.pid, signal.SIGINT)


def serve(home: Path, kind: str, config: dict[str, Any], **env: str) -> Server:
    environment = {"TORCH_COMPILE": json.dumps(config), **env}
    if kind == "legacy":
        environment["BENTOML_CONFIG_OPTIONS"] = (
            "api_server.workers=1 runners.resources.cpu=1 api_server.traffic.timeout=600 runners.traffic.timeout=600"
        )
    return Server(CHECKOUT, home, target=f"tests.serving.stopping_services:{kind}", env=environment)


def classify(server: Server) -> httpx.Response:
    return httpx.post(f"{server.base_url}/classify", json={"rows": ROWS}, timeout=PATIENCE)


def check_answer(answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text
    with torch.inference_mode():
        expected = classifier()(torch.tensor(ROWS))["logits"]
    torch.testing.assert_close(torch.tensor(answer.json()), expected, rtol=1e-4, atol=1e-5)


def has_ended(server: Server, deadline: float = END) -> None:
    """Raises if a process is left."""
    assert server.stop(signal.SIGCONT, deadline) == 0  # which does nothing: it was told before


def listeners(server: Server) -> int:
    """How many workers can take connections; one that is told to end does not from then on."""
    workers = [process for process in server.processes() if process.pid != server.pid]
    return sum(
        any(one.status == psutil.CONN_LISTEN and one.laddr.port == server.port for one in connections(worker))
        for worker in workers  # that of a runner, too, which has the socket and does not use it
    )


def connections(process: psutil.Process) -> list[Any]:
    try:
        return list(process.net_connections("tcp"))
    except psutil.Error:
        return []


def tell_and_wait(server: Server, tell: Signal) -> None:
    """Returns when the signal has arrived."""
    before = listeners(server)
    tell(server)
    server._poll(lambda: listeners(server) < before, PATIENCE, "the signal did not arrive")


@pytest.mark.parametrize(
    ("kind", "tell"),
    [
        pytest.param("Plain", sigterm, id="plain-sigterm", marks=pytest.mark.soak),
        pytest.param("Plain", ctrl_c, id="plain-ctrl_c"),
        pytest.param("Front", sigterm, id="runner_service-sigterm"),
        pytest.param("Front", ctrl_c, id="runner_service-ctrl_c", marks=pytest.mark.soak),
        pytest.param("legacy", sigterm, id="legacy-sigterm", marks=pytest.mark.soak),
        pytest.param("legacy", ctrl_c, id="legacy-ctrl_c", marks=pytest.mark.soak),
    ],
)
def test_a_request_in_flight_is_answered_before_the_server_ends(tmp_path: Path, kind: str, tell: Signal) -> None:
    hold = tmp_path / "hold"
    hold.mkdir()
    with (
        serve(tmp_path / "home", kind, EAGER, HOLD=str(hold)).start(deadline=PATIENCE) as server,
        ThreadPoolExecutor(1) as client,
    ):
        answer = client.submit(classify, server)
        try:
            server._poll((hold / "came").exists, PATIENCE, "the request did not come")
            tell_and_wait(server, tell)
        finally:
            (hold / "go").touch()
        check_answer(answer.result())
        has_ended(server)
        assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("kind", "tell"),
    [
        pytest.param("Plain", ctrl_c, id="plain-ctrl_c", marks=pytest.mark.soak),
        pytest.param("Front", sigterm, id="runner_service-sigterm", marks=pytest.mark.soak),
        pytest.param("Front", ctrl_c, id="runner_service-ctrl_c", marks=pytest.mark.soak),
        pytest.param("legacy", sigterm, id="legacy-sigterm", marks=pytest.mark.soak),
        pytest.param("legacy", ctrl_c, id="legacy-ctrl_c"),
    ],
)
def test_a_compile_that_hangs_ends_with_the_boot_and_in_few_words(tmp_path: Path, kind: str, tell: Signal) -> None:
    with serve(tmp_path / "home", kind, HUNG).start(wait=False) as server:
        server._poll(lambda: "sleep" in server.names(), PATIENCE, "no compile began")
        tell(server)
        has_ended(server)
        assert "told to end during the boot" in server.log
        assert "wait_forever" not in server.log  # Starlette's traceback does not go down to the compiler


@pytest.mark.parametrize(
    ("kind", "engine", "tell"),
    [
        pytest.param("Plain", "aot", sigterm, id="plain-aot-sigterm"),
        pytest.param("Plain", "jit", sigterm, id="plain-jit-sigterm", marks=pytest.mark.soak),
        pytest.param("Plain", "jit", ctrl_c, id="plain-jit-ctrl_c", marks=pytest.mark.soak),
        pytest.param("Front", "aot", ctrl_c, id="runner_service-aot-ctrl_c", marks=pytest.mark.soak),
        pytest.param("legacy", "aot", sigterm, id="legacy-aot-sigterm", marks=pytest.mark.soak),
        pytest.param("legacy", "jit", ctrl_c, id="legacy-jit-ctrl_c"),
    ],
)
def test_a_compile_in_the_background_ends_with_its_worker(tmp_path: Path, kind: str, engine: str, tell: Signal) -> None:
    """Each C++ compiler that is started hangs; so would the next one, which Inductor starts when one is ended."""
    gate = Gate(tmp_path)
    with serve(tmp_path / "home", kind, {**IN_BACKGROUND, "engine": engine}, **gate.env).start(wait=False) as server:
        wait_alive(server)
        server._poll(gate.came.exists, PATIENCE, "the compile did not begin")
        tell(server)
        has_ended(server)
        assert "Traceback" not in server.log
        if engine == "aot":  # in the worker itself, the supervisor's signal may reach a C++ compiler first
            assert "served eagerly" not in server.log  # by a compiler's fault, which it is not
            assert list(server.home.rglob("lease")) != []  # left by one that was ended, so that another takes over
            assert list(server.home.rglob(".child-*")) == []


def test_a_compile_in_the_background_goes_on_while_a_request_is_answered(tmp_path: Path) -> None:
    """The supervisor also tells the worker's children to end; the compiler ends after the last answer."""
    gate, hold = Gate(tmp_path), tmp_path / "hold"
    hold.mkdir()
    config = {**IN_BACKGROUND, "engine": "aot"}
    with (
        serve(tmp_path / "home", "Plain", config, HOLD=str(hold), **gate.env).start(wait=False) as server,
        ThreadPoolExecutor(1) as client,
    ):
        wait_alive(server)
        answer = client.submit(classify, server)
        try:
            server._poll(gate.came.exists, PATIENCE, "the compile did not begin")
            server._poll((hold / "came").exists, PATIENCE, "the request did not come")
            tell_and_wait(server, sigterm)
            assert len(compilers(server)) == 1
            gate.go.touch()
            server.wait_for_log("model 'tiny': compiled in", PATIENCE)
        finally:
            (hold / "go").touch()
        check_answer(answer.result())  # by code that was compiled meanwhile
        has_ended(server)
    with serve(tmp_path / "home", "Plain", config).start(deadline=PATIENCE) as server:
        assert "model 'tiny': loaded" in server.log


def test_an_upload_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    moto, key = ThreadedMotoServer("127.0.0.1", 0, verbose=False), PrivateKey.new()
    moto.start()
    try:
        with FaultyProxy(*moto.get_host_and_port()) as proxy:
            httpx.put(f"{proxy.url}/bucket").raise_for_status()
            proxy.fault = Fault("silence", when="PUT /bucket/blobs/")
            artifacts = {"remote": "s3://bucket", "public_keys": [str(key.public)]}
            env = {**CREDENTIALS, "AWS_ENDPOINT_URL": proxy.url, KEY: key.to_pem().decode()}
            with serve(tmp_path / "home", "Plain", {"engine": "aot", "artifacts": artifacts}, **env) as server:
                server._poll(lambda: any("PUT /bucket/blobs/" in r for r in proxy.requests), PATIENCE, "no upload")
                sigterm(server)
                has_ended(server, deadline=60)
                assert "Traceback" not in server.log
    finally:
        moto.stop()
