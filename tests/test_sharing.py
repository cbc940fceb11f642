"""A boot looks in the Bento, in this machine's store and at the remote, waits for other machines, and shares."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bentoml_compile.artifacts.artifact import Artifact
from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.bundle import Bundle
from bentoml_compile.artifacts.hashing import file_hash
from bentoml_compile.artifacts.manifest import MANIFEST, FileEntry, read_manifest, write_checked
from bentoml_compile.artifacts.remote import Remote, uploads
from bentoml_compile.artifacts.signing import KEY, PrivateKey
from bentoml_compile.artifacts.store import Store
from bentoml_compile.compiled_model import CompiledModel, open_models
from bentoml_compile.errors import ConfigError
from bentoml_compile.listener import Listener, Stage
from bentoml_compile.model import compile_model
from tests.models import classifier, ids

PATIENCE = 300.0  # seconds until something that should happen counts as failed


class Heard(Listener):
    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.fallbacks: list[str] = []
        self.waiting = threading.Event()

    def stage_started(self, stage: Stage) -> None:
        if stage.name == "wait":
            self.waiting.set()

    def stage_ended(self, stage: Stage) -> None:
        self.stages.append(stage)

    def fallback(self, model: str, reason: str) -> None:
        self.fallbacks.append(reason)

    def place(self) -> object:
        """Where the artifact was found."""
        return next((s.attributes["place"] for s in reversed(self.stages) if "place" in s.attributes), None)

    def outcomes(self, name: str) -> list[object]:
        return [stage.attributes.get("outcome") for stage in self.stages if stage.name == name]


class Machine:
    """Boots the same model, as a worker of one machine after the other would."""

    def __init__(self, directory: Path, remote: str | None, key: PrivateKey) -> None:
        self.directory, self.remote, self.key = directory, remote, key
        self.heard = Heard()

    @property
    def store(self) -> Store:
        return Store(self.directory / "store")

    def remote_of_others(self) -> Remote:
        """Their view of it, with the same key."""
        return Remote(self.remote or "", timeout=PATIENCE, public_keys=[self.key.public], key=self.key)

    def boot(self, *, bundle: Path | None = None, **artifacts: Any) -> CompiledModel:
        self.heard.stages.clear()
        config: dict[str, Any] = {"store": str(self.store.root), "remote": self.remote, "remote_timeout": PATIENCE}
        config["public_keys"] = [str(self.key.public)]
        torch.manual_seed(0)
        return compile_model(
            classifier(),
            example_inputs=[{"ids": ids()}],
            name="classifier",
            config={"engine": "aot", "keep_eager_if_slower": False, "artifacts": {**config, **artifacts}},
            listeners=[self.heard],
            bundle=bundle,
        )


@pytest.fixture(scope="module")
def key() -> PrivateKey:
    return PrivateKey.new()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, key: PrivateKey) -> tuple[Machine, list[object]]:
    """A builder that has compiled and uploaded, and what it did."""
    here = tmp_path_factory.mktemp("builder")
    machine = Machine(here, f"file://{here}/remote", key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, key.to_pem().decode())
        compiled = machine.boot()
        assert uploads.wait(PATIENCE)
    compiled.close()
    return machine, [compiled.report.outcome, machine.heard.fallbacks]


@pytest.fixture
def replica(built: tuple[Machine, list[object]], tmp_path: Path, key: PrivateKey) -> Machine:
    """A machine that has nothing yet."""
    return Machine(tmp_path, built[0].remote, key)


@pytest.fixture(params=[True, False], ids=["with a key", "without a key"])
def first(request: pytest.FixtureRequest, tmp_path: Path, key: PrivateKey, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine at whose remote there is nothing yet."""
    if request.param:
        monkeypatch.setenv(KEY, key.to_pem().decode())
    return Machine(tmp_path, f"file://{tmp_path}/remote", key)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for compiled in list(open_models.values()):
        compiled.close()


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not found is not made: a boot that finds nothing ends in eager at once."""
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("PATH", "/nowhere")


def stored_artifact(machine: Machine) -> Artifact:
    [artifact] = machine.store.artifacts()
    return artifact


def right(compiled: CompiledModel) -> bool:
    torch.manual_seed(0)
    with torch.inference_mode():
        expected = classifier()(ids=ids())["logits"]
    return torch.allclose(compiled(ids=ids())["logits"], expected)


def test_a_builder_uploads_what_it_compiled_and_leaves_no_lease(built: tuple[Machine, list[object]]) -> None:
    machine, happened = built
    assert happened == ["compiled", []]
    names = sorted(path.name for path in (machine.directory / "remote").rglob("*") if path.is_file())
    envelopes = [name for name in names if name.endswith(".json")]
    assert len(envelopes) == 1
    assert set(names) - set(envelopes) == {entry.sha256 for entry in stored_artifact(machine).manifest.files.values()}


@pytest.mark.usefixtures("without_compiler")
def test_another_machine_loads_it_and_then_has_it(replica: Machine) -> None:
    compiled = replica.boot()
    assert (compiled.report.outcome, replica.heard.place(), replica.heard.outcomes("lookup")) == (
        "loaded",
        "remote",
        ["hit"],
    )
    assert right(compiled)
    compiled.close()
    again = replica.boot(remote="file:///nowhere")
    assert (again.report.outcome, replica.heard.place()) == ("loaded", "store")


@pytest.mark.usefixtures("without_compiler")
def test_a_machine_that_keeps_nothing_loads_it_too(replica: Machine) -> None:
    compiled = replica.boot(write=False)
    assert (compiled.report.outcome, replica.heard.place(), right(compiled)) == ("loaded", "remote", True)
    assert not replica.store.root.exists()


PRIVATE = """
import os, signal
from bentoml_compile.sharing import private_store
root = private_store().root
assert private_store().root == root
print(root, oct(root.stat().st_mode & 0o777), flush=True)
"""


def private(folder: Path, then: str = "") -> str:
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", PRIVATE + then], env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.stdout


def test_private_copies_lie_in_a_new_directory_that_goes_with_its_process_or_the_next(tmp_path: Path) -> None:
    planted = tmp_path / f"bentoml-compile-{os.geteuid()}" / "model" / "0123456789abcdef"
    planted.mkdir(parents=True)  # at a name that was once foreseen
    killed, mode = private(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)").split()
    assert (Path(killed).parent, mode) == (tmp_path, "0o700")
    assert Path(killed).exists()
    assert private(tmp_path).split()[0] != killed
    assert [path.name for path in tmp_path.iterdir()] == [planted.parents[1].name]
    assert planted.exists()


@pytest.mark.usefixtures("without_compiler")
def test_what_another_key_signed_is_not_loaded(replica: Machine) -> None:
    compiled = replica.boot(public_keys=[str(PrivateKey.new().public)])
    assert compiled.report.outcome == "eager"
    [rejection] = compiled.report.rejected
    assert "key" in rejection.reason
    assert replica.store.artifacts() == []
    assert right(compiled)


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("key_in_use", ["no key", PrivateKey.new().to_pem().decode()], ids=["unusable", "not listed"])
def test_a_key_that_cannot_sign_does_not_keep_from_reading(
    replica: Machine, monkeypatch: pytest.MonkeyPatch, key_in_use: str
) -> None:
    monkeypatch.setenv(KEY, key_in_use)
    failed = uploads.failed
    compiled = replica.boot()
    assert (compiled.report.outcome, compiled.report.place) == ("loaded", "remote")
    assert replica.heard.fallbacks == ["upload_failed"]
    assert uploads.failed == failed + 1  # which `bentoml-compile warm` tells by its status


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize(("remote", "failed"), [("nosuchsystem://x", True), ("file:///nowhere", False)])
def test_a_remote_that_is_not_there_costs_no_more_than_itself(replica: Machine, remote: str, failed: bool) -> None:
    replica.remote = remote
    compiled = replica.boot()
    assert (compiled.report.outcome, right(compiled)) == ("eager", True)
    assert ("remote_failed" in replica.heard.fallbacks) == failed


@pytest.mark.usefixtures("without_compiler")
def test_the_bento_s_artifact_comes_first_and_is_only_read(
    built: tuple[Machine, list[object]], replica: Machine
) -> None:
    bundle = Bundle(replica.directory / "compiled")
    bundle.add(stored_artifact(built[0]))
    before = sorted(replica.directory.rglob("*"))
    compiled = replica.boot(bundle=bundle.root)
    assert (compiled.report.outcome, replica.heard.place(), right(compiled)) == ("loaded", "bento", True)
    assert sorted(replica.directory.rglob("*")) == before


@pytest.mark.usefixtures("without_compiler")
def test_where_the_bento_s_does_not_load_the_next_place_is_asked(
    built: tuple[Machine, list[object]], replica: Machine
) -> None:
    bundle = Bundle(replica.directory / "compiled")
    unfit = bundle.add(stored_artifact(built[0])).path
    (unfit / "cache/package-0/package.json").write_text("{}")  # and the manifest says that it is to be so
    manifest = read_manifest(unfit)
    entry = FileEntry(size=2, sha256=file_hash(unfit / "cache/package-0/package.json"))
    files = {**manifest.files, "cache/package-0/package.json": entry}
    write_checked(unfit / MANIFEST, manifest.model_copy(update={"files": files}).model_dump(mode="json"))

    compiled = replica.boot(bundle=bundle.root)

    assert (compiled.report.outcome, replica.heard.place(), right(compiled)) == ("loaded", "remote", True)
    assert "could not be loaded" in compiled.report.rejected[0].reason


def test_a_boot_that_looked_before_another_machine_was_done_does_not_compile_after_it(
    built: tuple[Machine, list[object]], first: Machine, tmp_path: Path
) -> None:
    remote = first.remote_of_others()

    class OtherMachine(Heard):
        def stage_ended(self, stage: Stage) -> None:
            super().stage_ended(stage)
            if self.outcomes("lookup") == ["miss"]:
                remote.upload(stored_artifact(built[0]))

    first.heard = OtherMachine()
    compiled = first.boot()

    assert (compiled.report.outcome, first.heard.place(), right(compiled)) == ("loaded", "remote", True)
    assert first.heard.outcomes("lookup") == ["miss", "hit"]
    assert first.heard.outcomes("wait") == []
    assert not list((tmp_path / "remote").rglob("lease"))


@pytest.mark.parametrize(("error", "is_left"), [(KeyboardInterrupt, True), (SystemExit, True), (ConfigError, False)])
def test_a_boot_that_is_told_to_end_leaves_its_lease_to_those_that_wait(
    tmp_path: Path, key: PrivateKey, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], is_left: bool
) -> None:
    monkeypatch.setenv(KEY, key.to_pem().decode())
    machine = Machine(tmp_path, f"file://{tmp_path}/remote", key)

    def end(*_: object, **__: object) -> None:
        raise error("now")

    monkeypatch.setattr("bentoml_compile.compiler.Compiler.compile", end)
    with pytest.raises(error):
        machine.boot()
    assert bool(list((tmp_path / "remote").rglob("lease"))) == is_left


def test_a_boot_waits_for_the_machine_that_compiles(
    built: tuple[Machine, list[object]], first: Machine, tmp_path: Path
) -> None:
    artifact = stored_artifact(built[0])
    remote = first.remote_of_others()
    lease = remote.lease(artifact.model, Fingerprint(artifact.axes))
    assert lease.take()

    def compile_elsewhere() -> None:
        assert first.heard.waiting.wait(PATIENCE)
        remote.upload(artifact)
        lease.release()

    other = threading.Thread(target=compile_elsewhere)
    other.start()
    compiled = first.boot()
    other.join()

    assert (compiled.report.outcome, first.heard.place(), right(compiled)) == ("loaded", "remote", True)
    assert first.heard.outcomes("wait") == ["loaded"]
    assert uploads.wait(PATIENCE)
    assert not list((tmp_path / "remote").rglob("lease"))
