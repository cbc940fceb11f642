"""Processes are killed at random moments; afterwards a boot works, its result is right, and nothing has grown."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bentoml_compile.artifacts.artifact import TRASH
from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.remote import Remote
from bentoml_compile.artifacts.signing import PrivateKey
from bentoml_compile.artifacts.store import Artifact, Store
from tests.artifacts.killed import MODEL, OPERATIONS, fingerprint_of
from tests.artifacts.processes import CONFIG, Processes
from tests.forked import Child, Forked

COMPILES: dict[str, dict[str, Any]] = {
    "aot": CONFIG,
    "jit": {**CONFIG, "engine": "jit"},
    "unkept": {**CONFIG, "artifacts": {"write": False}},
}
SAMPLE = {"seal": 3, "adopt": 2, "prune": 2, "look_up": 1, "refuse": 1, "upload": 2}
SOAK = {"seal": 45, "adopt": 35, "prune": 40, "look_up": 25, "refuse": 15, "upload": 25}
SOAK_COMPILES = 5  # of each kind: 200 kills with those of SOAK


def cases(sample: dict[str, int], soak: dict[str, int]) -> list[Any]:
    """(what is killed, seed), the seed being part of the id, so that a failure can be had again."""
    return [
        pytest.param(name, seed, id=f"{name}-{seed}", marks=[pytest.mark.soak] if seed >= sample.get(name, 0) else [])
        for name in soak
        for seed in range(sample.get(name, 0) + soak[name])
    ]


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with Forked("torch", "tests.artifacts.killed") as forked:
        yield forked


@pytest.fixture
def processes(forked: Forked, tmp_path: Path) -> Processes:
    return Processes(forked, tmp_path)


@dataclass(frozen=True)
class Made:
    """A store with one artifact, and how many seconds the boot took that compiled it."""

    store: Store
    artifact: Artifact
    seconds: float


@pytest.fixture(scope="module")
def made(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Made:
    directory = tmp_path_factory.mktemp("made")
    store, started = Store(directory / "compile"), time.monotonic()
    assert Processes(forked, directory).boot(store) == "compiled"
    (artifact,) = store.artifacts()
    assert artifact.engine == "aot"
    return Made(store, artifact, time.monotonic() - started)


@pytest.fixture(scope="module")
def lines(forked: Forked, made: Made, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How many lines each operation runs, if it is not killed."""
    counts = {}
    for name in OPERATIONS:
        processes = Processes(forked, tmp_path_factory.mktemp(name))
        child = operate(processes, name, made, 0)
        assert forked.wait(child) == 0, child.errors.read_text()
        counts[name] = int(child.output.read_text())
    return counts


def operate(processes: Processes, name: str, made: Made, last: int) -> Child:
    """On a copy of what was made, with an empty remote."""
    store = processes.directory / "compile"
    shutil.copytree(made.store.root, store)
    processes.env["BENTOML_COMPILE_SIGNING_KEY"] = PrivateKey.new().to_pem().decode()
    return processes.start("operate", name, store, made.store.root, remote_of(processes), last)


def remote_of(processes: Processes) -> str:
    return f"file://{processes.directory}/remote"


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def check_nothing_is_left(processes: Processes, store: Store, fingerprint: Fingerprint) -> None:
    """But the artifact that is in use, once the store has been pruned."""
    used = store.lookup(MODEL, fingerprint).artifact
    assert used is not None
    store.prune(older_than=0, max_bytes=0)
    path = used.path.relative_to(store.root)
    files = {"lock", "manifest.json", "used", *used.manifest.files}
    left = {name for name in tree(store.root) if (store.root / name).is_file()}
    locks = {name for name in left if name.startswith(f"{path}/cache/locks/")}  # Inductor's, one for each of its keys
    assert left - locks == {str(path / file) for file in files}
    assert [child.name for child in used.path.parent.iterdir()] == [used.path.name]
    assert [child.name for child in store.root.iterdir()] == [MODEL]
    used.release()
    # torch.compile's, one for each kind of command line
    headers = set(processes.temporary.glob("torchinductor_*/precompiled_headers/**/*"))
    assert not {path for path in processes.temporary.rglob("*") if path.is_file()} - headers


@pytest.mark.parametrize(("name", "seed"), cases(SAMPLE, SOAK))
def test_a_kill_in_the_midst_of_it_harms_no_boot_and_leaves_nothing(
    processes: Processes, made: Made, lines: dict[str, int], name: str, seed: int
) -> None:
    last = random.Random(f"{name} {seed}").randint(1, lines[name])
    child = operate(processes, name, made, last)
    assert processes.forked.wait(child) == -signal.SIGKILL, child.errors.read_text()
    store = Store(processes.directory / "compile")
    assert processes.boot(store) == "loaded"
    left = list(store.directory(MODEL, made.artifact.fingerprint).iterdir())
    assert not [path for path in left if path.name.startswith(TRASH)]
    check_nothing_is_left(processes, store, fingerprint_of(made.artifact.manifest))
    if name == "upload":
        check_remote(processes, made)


def check_remote(processes: Processes, made: Made) -> None:
    """What an upload that was killed has left is no artifact or a whole one, and the next upload completes it."""
    uri, key = remote_of(processes), PrivateKey.new()
    remote = Remote(uri, timeout=60.0, public_keys=(key.public,), key=key)
    stores = (Store(processes.directory / str(number)) for number in itertools.count())
    remote.upload(made.artifact)
    assert not remote.upload(made.artifact)  # all is there
    files = {path for path in (processes.directory / "remote").rglob("*") if path.is_file()}
    blobs = {entry.sha256 for entry in made.artifact.manifest.files.values()}
    assert {path.name for path in files if path.parent.name == "blobs" and path.suffix != ".tmp"} == blobs
    assert len([path for path in files if path.suffix == ".tmp"]) <= 1
    found = remote.lookup(MODEL, fingerprint_of(made.artifact.manifest), next(stores)).artifact
    assert found is not None
    assert found.manifest == made.artifact.manifest
    found.release()
    config = {**CONFIG, "artifacts": {"remote": uri, "public_keys": [str(key.public)]}}
    assert processes.boot(next(stores), config) == "loaded"


@pytest.mark.parametrize(("kind", "seed"), cases({"aot": 1}, dict.fromkeys(COMPILES, SOAK_COMPILES)))
def test_a_kill_in_the_midst_of_a_boot_that_compiles_harms_no_boot_and_leaves_nothing(
    processes: Processes, made: Made, kind: str, seed: int
) -> None:
    store, config = Store(processes.directory / "compile"), COMPILES[kind]
    moment = random.Random(f"{kind} {seed}").uniform(0, made.seconds)
    while boot_and_kill(processes, store, config, moment) == 0:  # it was over sooner
        shutil.rmtree(store.root, ignore_errors=True)
        moment /= 2
    assert processes.boot(store, config) in ("compiled", "loaded")
    if kind == "unkept":
        assert tree(store.root) == set()
        assert not [path for path in processes.temporary.rglob("*") if path.is_file()]
    else:
        assert processes.boot(store, config) == "loaded"
        check_nothing_is_left(processes, store, fingerprint_of(store.artifacts()[0].manifest))


def boot_and_kill(processes: Processes, store: Store, config: dict[str, Any], seconds: float) -> int:
    """A boot's exit status, if it is killed after so many seconds."""
    child = processes.start("boot", store.root, json.dumps(config))
    time.sleep(seconds)  # not to wait: the moment of the kill
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    status = processes.forked.wait(child)
    assert status in (0, -signal.SIGKILL), child.errors.read_text()
    return status
