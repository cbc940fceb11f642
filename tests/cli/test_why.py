"""artifacts why: what fits, and what differs, of a tiny model that was compiled once."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from bentoml_compile.artifacts.artifact import Artifact
from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.bundle import Bundle
from bentoml_compile.artifacts.hashing import hash_sources
from bentoml_compile.artifacts.remote import Remote
from bentoml_compile.artifacts.signing import PrivateKey
from bentoml_compile.artifacts.store import Store
from tests.cli.conftest import Project, Ran


def artifact(project: Project) -> Artifact:
    [found] = Store(project.store).artifacts()
    assert found.engine == "aot"
    return found


def why(project: Project, *arguments: str, target: str = "service:Entry", **config: Any) -> Ran:
    """With keys laid over the service's config."""
    overrides = {"services": {"Entry": {"torch_compile": config}}}
    return project.run("artifacts", "why", target, *arguments, BENTOML_CONFIG_OVERRIDES=json.dumps(overrides))


def verdicts(done: Ran, place: str) -> list[dict[str, Any]]:
    [model] = json.loads(done.stdout)
    return [verdict for each in model["places"] if each["name"] == place for verdict in each["verdicts"]]


def test_an_artifact_of_an_earlier_boot_fits(project: Project) -> None:
    done = why(project)
    assert done.returncode == 0, done.stderr
    found = artifact(project)
    first, bento, store, verdict = done.stdout.splitlines()
    assert first == f"tiny  {found.fingerprint}  has an artifact that fits"
    assert bento == f"  Bento: {project.folder}/compiled: nothing of this model"
    assert store == f"  store: {project.store}"
    assert verdict.startswith(f"    fits  tiny/{found.fingerprint}/{found.path.name}  aot  ")
    assert re.search(r"  \d+[smh] old$", verdict)
    assert "not made: service:Entry.dependency" in done.stderr


def test_an_empty_store_has_nothing_that_fits(project: Project) -> None:
    shutil.rmtree(project.store)
    done = why(project)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[0].endswith("nothing fits")
    assert f"  store: {project.store}: nothing of this model" in done.stdout
    assert not project.store.exists()


def test_axes_that_differ_are_named_with_both_values(project: Project) -> None:
    done = why(project, "--json", mode="max-autotune", verify={"rtol": 0.5})
    assert done.returncode == 1, done.stderr
    [verdict] = verdicts(done, "store")
    assert not verdict["fits"]
    assert "config.mode: max-autotune here, default there" in verdict["reasons"]
    assert any(reason.startswith("config.verify: ") for reason in verdict["reasons"])
    assert len(verdict["reasons"]) == 2


def test_a_source_that_changed_is_named(project: Project) -> None:
    read = project.folder / "table.txt"
    read.write_text("1")
    found = artifact(project)
    with Store(project.store).draft("tiny", Fingerprint(found.axes, found.manifest.attributes)) as draft:
        other = draft.seal({}, hash_sources([str(read)]), "aot")
    shutil.rmtree(found.path)
    assert why(project).returncode == 0
    read.write_text("2")
    done = why(project, "--json")
    assert done.returncode == 1, done.stderr
    [verdict] = verdicts(done, "store")
    assert (Path(verdict["artifact"]).name, verdict["reasons"]) == (other.path.name, [f"source changed: {read}"])


def test_what_is_damaged_or_incomplete_is_named_and_left_where_it_is(project: Project) -> None:
    found = artifact(project)
    for name in ("damaged", "unreadable", "incomplete"):
        shutil.copytree(found.path, found.path.with_name(name))
    library = next(found.path.with_name("damaged").rglob("*.so"))
    library.write_bytes(library.read_bytes()[:-1] + b"?")
    (found.path.with_name("unreadable") / "manifest.json").write_text("{")
    (found.path.with_name("incomplete") / "manifest.json").unlink()
    before = sorted(project.store.rglob("*"))
    done = why(project, "--json")
    assert done.returncode == 0, done.stderr
    by_name = {Path(verdict["artifact"]).name: verdict["reasons"] for verdict in verdicts(done, "store")}
    assert by_name.pop("damaged") == [f"{library.relative_to(found.path.with_name('damaged'))} was altered"]
    assert by_name.pop("unreadable") == ["manifest.json is damaged"]
    assert by_name.pop("incomplete") == ["incomplete: it is being written, or its writer is gone"]
    assert by_name == {found.path.name: []}
    assert sorted(project.store.rglob("*")) == before


def test_a_store_that_others_can_write_has_nothing_that_fits(project: Project) -> None:
    project.store.chmod(0o777)
    done = why(project)
    assert done.returncode == 1, done.stderr
    assert f"nothing of it is loaded: {project.store} can be written by other users" in done.stdout
    assert "chmod -R go-w" in done.stdout


def test_what_came_with_the_bento_fits_or_not(project: Project) -> None:
    found = artifact(project)
    Bundle(project.folder / "compiled").add(found)
    axes = {**found.axes, "device": "cuda: NVIDIA H200, capability 9.0, CUDA 13.0"}
    with Store(project.folder / "other").draft("tiny", Fingerprint(axes)) as draft:
        (draft.cache / "code.so").write_bytes(b"x")
        Bundle(project.folder / "compiled").add(draft.seal({}, {}, "aot"))
    shutil.rmtree(project.store)
    done = why(project, "--json")
    assert done.returncode == 0, done.stderr
    fitting, other = verdicts(done, "Bento")
    assert fitting["fits"]
    assert fitting["artifact"].startswith(f"compiled/tiny/{found.fingerprint}/")
    assert other["reasons"] == [f"device: cpu here, {axes['device']} there"]
    assert verdicts(done, "store") == []


def test_a_damaged_artifact_of_the_bento_is_named(project: Project) -> None:
    copy = Bundle(project.folder / "compiled").add(artifact(project))
    next(copy.path.rglob("*.so")).unlink()
    done = why(project, "--json")
    assert done.returncode == 0, done.stderr
    [reason] = verdicts(done, "Bento")[0]["reasons"]
    assert reason.endswith(".so is missing")


@pytest.fixture(scope="module")
def key() -> PrivateKey:
    return PrivateKey.new()


def at_remote(project: Project, key: PrivateKey, **config: Any) -> Ran:
    artifacts = {"remote": f"file://{project.folder}/shared", "public_keys": [str(key.public)], **config}
    return why(project, "--json", artifacts=artifacts)


def upload(project: Project, key: PrivateKey, found: Artifact) -> None:
    Remote(f"file://{project.folder}/shared", timeout=60, public_keys=[], key=key).upload(found)


def test_what_the_remote_has_is_judged_by_its_signature_first(project: Project, key: PrivateKey) -> None:
    found, stranger = artifact(project), PrivateKey.new()
    upload(project, key, found)
    upload(project, stranger, found)
    directory = project.folder / "shared" / "tiny" / found.fingerprint
    (directory / f"{0:064x}.json").write_text(json.dumps({"payload": "", "payloadType": "x", "signatures": []}))
    with Store(project.folder / "other").draft("tiny", Fingerprint({**found.axes, "threads": "96"})) as draft:
        (draft.cache / "code.so").write_bytes(b"x")
        upload(project, key, draft.seal({}, {}, "aot"))
    shutil.rmtree(project.store)
    done = at_remote(project, key)
    assert done.returncode == 0, done.stderr
    by_signature = {verdict["signature"]: verdict for verdict in verdicts(done, "remote")[:3]}
    assert by_signature.pop(f"signed by {key.public}")["fits"]
    unlisted = by_signature.pop(f"signed by {stranger.public}, which artifacts.public_keys does not list")
    assert (unlisted["fingerprint"], unlisted["fits"]) == (found.fingerprint, False)
    assert by_signature.pop("not signed")["reasons"][0].startswith("not a DSSE envelope")
    [other] = verdicts(done, "remote")[3:]
    assert (other["reasons"][0].endswith(" here, 96 there"), other["signature"]) == (True, f"signed by {key.public}")


def test_a_shared_artifact_whose_file_is_missing_does_not_fit(project: Project, key: PrivateKey) -> None:
    upload(project, key, artifact(project))
    next((project.folder / "shared" / "blobs").iterdir()).unlink()
    shutil.rmtree(project.store)
    done = at_remote(project, key)
    assert done.returncode == 1, done.stderr
    [reason] = verdicts(done, "remote")[0]["reasons"]
    assert "is missing" in reason


def test_a_shared_artifact_with_a_flipped_byte_does_not_fit(project: Project, key: PrivateKey) -> None:
    upload(project, key, artifact(project))
    blob = max((project.folder / "shared" / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(content)
    shutil.rmtree(project.store)
    done = at_remote(project, key)
    assert done.returncode == 1, done.stderr
    assert verdicts(done, "remote")[0]["reasons"] == [f"blobs/{blob.name} was altered"]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"public_keys": []}, "artifacts.public_keys is empty"),
        ({"remote": "nope://bucket"}, "fsspec knows no file system for nope://"),
    ],
)
def test_a_remote_of_which_nothing_can_be_loaded_is_named(
    project: Project, key: PrivateKey, config: dict[str, Any], problem: str
) -> None:
    upload(project, key, artifact(project))
    [model] = json.loads(at_remote(project, key, **config).stdout)
    place = model["places"][-1]
    assert problem in place["problem"]
    assert not place["fits"]
    assert model["fits"]  # by the store


def test_what_keeps_a_boot_from_looking_is_said(project: Project) -> None:
    assert "  compiling is switched off (enabled: false" in why(project, enabled=False).stdout
    assert "  artifacts.refresh is true: every boot compiles" in why(project, artifacts={"refresh": True}).stdout


def test_a_service_without_models_needs_none(project: Project) -> None:
    done = why(project, target="service:Nothing")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "service:Nothing compiles no model; call compile_model(...) in its __init__" in done.stderr


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("service:Missing", "Missing"),
        ("nowhere:Any", "nowhere"),
        ("service:Crash", "no weights"),
    ],
)
def test_a_service_that_cannot_be_made_ends_with_2(project: Project, target: str, words: str) -> None:
    done = why(project, target=target)
    assert done.returncode == 2
    assert words in done.stderr
