"""Several workers boot at once: one compiles, and whatever becomes of it, the others end as they should."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bentoml_compile.artifacts.fingerprint import Fingerprint
from bentoml_compile.artifacts.lease import Lease
from bentoml_compile.artifacts.store import Store
from bentoml_compile.listener import Listener, Stage
from bentoml_compile.model import compile_model
from tests.forked import Forked
from tests.lease_workers import Crowd, Worker
from tests.models import classifier, ids

FAST = {"backend": "eager", "keep_eager_if_slower": False}


class Workers(Crowd):
    def __init__(self, directory: Path, forked: Forked) -> None:
        super().__init__(directory, forked)
        self.store = Store(directory / "store")

    def start(self, count: int, model: str = "classifier", env: dict[str, str] | None = None, **config: Any) -> None:
        code = "import sys; from tests.lease_process import main; main(*sys.argv[1:])"
        arguments = (str(self.store.root), str(self._gate), model, json.dumps({**FAST, **config}))
        for _ in range(count):
            child = self._forked.start(
                code, self._directory, *arguments, env={**os.environ, **(env or {})}, errors=False
            )
            self.all.append(Worker(child, self._forked))

    def leases(self) -> list[Path]:
        return list(self.store.root.rglob("lease"))


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with Forked("torch._inductor.compile_fx", "tests.lease_process") as forked:
        yield forked


@pytest.fixture
def workers(tmp_path: Path, forked: Forked) -> Iterator[Workers]:
    workers = Workers(tmp_path, forked)
    yield workers
    workers.close()


def outcomes(workers: list[Worker]) -> list[str]:
    return sorted(worker.result["outcome"] for worker in workers)


def test_of_four_workers_one_compiles_and_three_load_its_artifact(workers: Workers) -> None:
    workers.start(4)
    workers.wait_until(compiling=1, waiting=3)
    [holder] = workers.those_in("compile")
    waiting = workers.those_in("wait")
    workers.wait_until_seen(holder, by=waiting)
    workers.let_compile()
    assert holder.result == {"outcome": "compiled", "engine": "jit", "reason": "", "wait": {}}
    assert outcomes(waiting) == ["loaded"] * 3
    for worker in waiting:
        assert worker.result["wait"] == {"outcome": "loaded", "holder": holder.pid}
    assert len(workers.store.artifacts()) == 1
    assert workers.leases() == []


def test_a_holder_killed_while_it_compiles_is_followed_by_one_of_the_three(workers: Workers) -> None:
    workers.start(4)
    workers.wait_until(compiling=1, waiting=3)
    [killed] = workers.those_in("compile")
    workers.wait_until_seen(killed, by=workers.those_in("wait"))
    killed.send(signal.SIGKILL)
    workers.wait_until(compiling=2, waiting=3)
    [successor] = [worker for worker in workers.those_in("compile") if worker is not killed]
    others = [worker for worker in workers.all if worker not in (killed, successor)]
    workers.wait_until_seen(successor, by=others)
    workers.let_compile()
    assert successor.result["outcome"] == "compiled"
    assert successor.result["wait"] == {"outcome": "holder_died", "holder": killed.pid}
    assert outcomes(others) == ["loaded", "loaded"]
    for worker in others:
        assert worker.result["wait"] == {"outcome": "loaded", "holder": successor.pid}
    assert len(workers.store.artifacts()) == 1
    assert workers.leases() == []


def test_a_worker_that_waits_ends_when_it_is_told_to_and_one_that_compiles_is_followed(workers: Workers) -> None:
    workers.start(3)
    workers.wait_until(compiling=1, waiting=2)
    [holder] = workers.those_in("compile")
    told, left = workers.those_in("wait")
    told.send(signal.SIGTERM)
    assert told.wait() == 128 + signal.SIGTERM
    holder.send(signal.SIGTERM)
    assert holder.wait() == 128 + signal.SIGTERM
    workers.let_compile()
    assert left.result["outcome"] == "compiled"
    assert left.result["wait"]["outcome"] == "holder_died"


def test_a_holder_that_fails_is_followed_by_all_at_once(workers: Workers) -> None:
    workers.start(3, backend="fail")
    workers.wait_until(compiling=1, waiting=2)
    waiting = workers.those_in("wait")
    workers.let_compile()
    assert [worker.result["wait"]["outcome"] for worker in waiting] == ["holder_gave_up"] * 2
    for worker in workers.all:
        assert worker.result["engine"] == "eager"
        assert "this compiler always fails" in worker.result["reason"]
    assert workers.leases() == []


def test_a_graph_break_found_by_the_holder_stops_those_that_wait_with_the_same_words(workers: Workers) -> None:
    workers.start(3, model="broken", fullgraph="require")
    workers.wait_until(compiling=1, waiting=2)
    workers.let_compile()
    assert outcomes(workers.all) == ["refused"] * 3
    assert len({worker.result["message"] for worker in workers.all}) == 1
    assert len(workers.those_in("compile")) == 1
    assert workers.leases() == []


def test_without_a_compiler_nobody_waits(workers: Workers) -> None:
    workers.start(2, backend="inductor", engine="jit", env={"PATH": "/nowhere"})
    workers.wait_until(compiling=2, waiting=0)
    workers.let_compile()
    assert outcomes(workers.all) == ["eager", "eager"]
    assert all(worker.result["reason"].startswith("no_compiler") for worker in workers.all)


# one process, and a lease that another one seems to hold


class Stages(Listener):
    def __init__(self) -> None:
        self.stages: list[Stage] = []

    def stage_ended(self, stage: Stage) -> None:
        self.stages.append(stage)

    def names(self) -> list[str]:
        return [stage.name for stage in self.stages if not stage.name.startswith("phase.")]


def boot(store: Path, **config: Any) -> Stages:
    stages = Stages()
    compiled = compile_model(
        classifier(),
        example_inputs=[{"ids": ids(2, 5)}],
        config={**FAST, "verify": False, **config},
        listeners=[stages],
        default_store=store,
    )
    compiled.close()
    return stages


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Lease]:
    """The lease of what `boot` boots, in an otherwise empty store."""
    store = Store(tmp_path / "store")
    boot(store.root)
    [artifact] = store.artifacts()
    assert store.prune(older_than=0)
    with store.lease("model", Fingerprint(dict(artifact.axes), dict(artifact.manifest.attributes))) as lease:
        assert lease.held
        yield lease


def test_nobody_waits_longer_than_the_time_limit(held: Lease, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stages = boot(tmp_path / "store", time_limit=0.5)
    assert stages.names()[:3] == ["lookup", "wait", "compile"]
    [wait] = [stage for stage in stages.stages if stage.name == "wait"]
    assert wait.attributes == {"outcome": "timed_out", "holder": os.getpid()}
    assert f"process {os.getpid()} took longer than time_limit; compiling here" in caplog.text
    assert held.held


@pytest.mark.parametrize("artifacts", [{"write": False}, {"refresh": True}])
def test_a_boot_that_keeps_nothing_or_asked_for_a_compile_waits_for_nobody(
    held: Lease, tmp_path: Path, artifacts: dict[str, Any]
) -> None:
    stages = boot(tmp_path / "store", artifacts=artifacts)
    assert "wait" not in stages.names()
    assert "compile" in stages.names()


def test_a_lone_boot_looks_up_once_and_leaves_no_lease(tmp_path: Path) -> None:
    assert boot(tmp_path / "store").names() == ["lookup", "compile", "store", "startup"]
    assert boot(tmp_path / "store").names() == ["lookup", "load", "startup"]
    assert list((tmp_path / "store").rglob("lease")) == []
