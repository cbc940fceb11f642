"""Machines that share a remote boot at once: one compiles, and whatever becomes of it or of the remote, all end."""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from moto.server import ThreadedMotoServer

from bentoml_compile.artifacts.signing import KEY, PrivateKey
from tests.artifacts.faulty_proxy import Fault, FaultyProxy
from tests.artifacts.remotes import CREDENTIALS
from tests.forked import Forked
from tests.lease_workers import DEADLINE, Crowd, Worker

pytestmark = pytest.mark.slow

TTL = 30.0  # seconds, where a holder dies; also a busy machine has a lease's holder write within them
BEARABLE = 20.0  # seconds that a remote may take, where it falls silent
NO_COMPILER = {"PATH": "/nowhere"}
MACHINE = """
import sys
from bentoml_compile.artifacts.remote import uploads
from bentoml_compile.artifacts.remote_lease import RemoteLease
from tests.lease_process import main

RemoteLease.__init__.__kwdefaults__["ttl"] = float(sys.argv[1])
main(*sys.argv[3:])
uploads.wait(float(sys.argv[2]))
"""


class Herd(Crowd):
    """Machines, as processes that each have a store of their own; see lease_process.py."""

    def __init__(self, directory: Path, forked: Forked, key: PrivateKey) -> None:
        super().__init__(directory, forked)
        self.remote = f"file://{directory}/remote"
        self.ttl = DEADLINE  # nobody is taken for dead
        self._key = key

    def start(
        self, count: int, *, env: dict[str, str] | None = None, timeout: float = DEADLINE, uploads: float = DEADLINE
    ) -> list[Worker]:
        """Processes that give the remote `timeout` seconds, and before they end the uploads as many as it says."""
        artifacts = {"remote": self.remote, "remote_timeout": timeout, "public_keys": [str(self._key.public)]}
        config = json.dumps({"engine": "aot", "keep_eager_if_slower": False, "artifacts": artifacts})
        started = []
        for _ in range(count):
            store = self._directory / f"store-{len(self.all)}"
            arguments = (str(self.ttl), str(uploads), str(store), str(self._gate), "classifier", config)
            everything = {**os.environ, KEY: self._key.to_pem().decode(), **(env or {})}
            worker = Worker(
                self._forked.start(MACHINE, self._directory, *arguments, env=everything, errors=False), self._forked
            )
            started.append(worker)
            self.all.append(worker)
        return started

    def shared(self, name: str) -> list[Path]:
        return list((self._directory / "remote").rglob(name))


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with Forked("torch._inductor.compile_fx", "tests.lease_process", "s3fs", "bentoml_compile.sharing") as forked:
        yield forked


@pytest.fixture(scope="module")
def key() -> PrivateKey:
    return PrivateKey.new()


@pytest.fixture
def herd(tmp_path: Path, forked: Forked, key: PrivateKey) -> Iterator[Herd]:
    herd = Herd(tmp_path, forked, key)
    yield herd
    herd.close()


@pytest.fixture
def proxy() -> Iterator[FaultyProxy]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with FaultyProxy(*server.get_host_and_port()) as proxy:
        yield proxy
    server.stop()


def new_bucket(proxy: FaultyProxy) -> str:
    name = f"bucket-{secrets.token_hex(4)}"
    httpx.put(f"{proxy.url}/{name}").raise_for_status()
    return name


LOADED = {"outcome": "loaded", "engine": "aot", "reason": "", "wait": {"outcome": "loaded", "place": "remote"}}


def results(workers: list[Worker]) -> list[dict[str, Any]]:
    return [worker.result for worker in workers]


@pytest.mark.soak  # the next test has a holder that uploads, too, after one that is killed
def test_of_four_machines_one_compiles_and_three_load_its_artifact(herd: Herd) -> None:
    herd.start(4)
    herd.wait_until(compiling=1, waiting=3)
    [holder], waiting = herd.those_in("compile"), herd.those_in("wait")
    herd.let_compile()
    assert holder.result == {"outcome": "compiled", "engine": "aot", "reason": "", "wait": {}}
    assert results(waiting) == [LOADED] * 3
    assert (len(herd.shared("*.json")), herd.shared("lease")) == (1, [])


def test_a_machine_killed_while_it_compiles_is_followed_by_one_of_the_three(herd: Herd) -> None:
    herd.ttl = TTL
    herd.start(4)
    herd.wait_until(compiling=1, waiting=3)
    [killed], waiting = herd.those_in("compile"), herd.those_in("wait")
    killed.send(signal.SIGKILL)
    killed.wait()
    herd.wait_until(compiling=2, waiting=3)
    [successor] = [worker for worker in herd.those_in("compile") if worker is not killed]
    herd.let_compile()
    followed = {"outcome": "compiled", "engine": "aot", "reason": "", "wait": {"outcome": "holder_died"}}
    assert successor.result == followed
    assert results([worker for worker in waiting if worker is not successor]) == [LOADED] * 2
    assert (len(herd.shared("*.json")), herd.shared("lease")) == (1, [])


@pytest.mark.parametrize("death", [pytest.param("silence", marks=pytest.mark.soak), "reset"])
def test_a_remote_that_dies_while_machines_wait_leaves_each_to_its_own_compiler(
    herd: Herd, proxy: FaultyProxy, death: str
) -> None:
    herd.remote = f"s3://{new_bucket(proxy)}"
    env = {**CREDENTIALS, "AWS_ENDPOINT_URL": proxy.url}
    timeout = BEARABLE if death == "silence" else DEADLINE  # a reset is an answer
    [holder] = herd.start(1, env=env, timeout=timeout, uploads=0)
    herd.wait_until(compiling=1, waiting=0)
    waiting = herd.start(2, env={**env, **NO_COMPILER}, timeout=timeout, uploads=0)
    waiting += herd.start(1, env=env, timeout=timeout, uploads=0) if death == "reset" else []
    herd.wait_until(compiling=1, waiting=len(waiting))
    proxy.fault = Fault(death)
    herd.wait_until(compiling=1 + len(waiting), waiting=len(waiting))
    if death == "reset":
        holder.send(signal.SIGKILL)  # for one compile less: the other test has its holder end
        holder.wait()
    herd.let_compile()
    assert [worker.result["wait"] for worker in waiting] == [{"outcome": "holder_gave_up"}] * len(waiting)
    assert all(worker.result["reason"].startswith("no_compiler") for worker in waiting[:2])
    [able] = waiting[2:] or [holder]
    assert able.result["outcome"] == "compiled"
