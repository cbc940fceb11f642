"""A remote that somebody else can write: what the trusted key has not signed for this place is refused, and not run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bentoml_compile.artifacts.remote_files import RemoteFiles
from bentoml_compile.artifacts.signing import PrivateKey
from bentoml_compile.artifacts.store import Artifact, Store
from tests.artifacts.conftest import make_uri
from tests.artifacts.remotes import FILES, FINGERPRINT, KEY, OTHER, STRANGER, is_empty, make, reasons, remote

DIRECTORY = f"encoder/{FINGERPRINT.id}"
BLOB = "cache/1/model.so"


KINDS = pytest.mark.parametrize("uri", ["file", "memory", "s3"], indirect=True)


@pytest.fixture(params=["file", "memory"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of these kinds, where it makes no difference to the test; else of all KINDS."""
    return make_uri(request, tmp_path)


@pytest.fixture
def made(uri: str, there: Store) -> Artifact:
    """An artifact that is at the remote, and fits."""
    made = make(there)
    remote(uri, key=KEY).upload(made)
    return made


def envelope_of(uri: str, directory: str = DIRECTORY) -> tuple[str, bytes]:
    files = RemoteFiles(uri)
    [listed] = [listed for listed in files.list(directory) if listed.name.endswith(".json")]
    return f"{directory}/{listed.name}", files.read(f"{directory}/{listed.name}", 1 << 20)


def replace(uri: str, manifest: dict[str, Any] | bytes, key: PrivateKey = KEY) -> None:
    """Lay another manifest in place of the one that is there."""
    path, _ = envelope_of(uri)
    payload = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    RemoteFiles(uri).write(path, key.sign(payload))


def add_blob(uri: str, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    RemoteFiles(uri).write(f"blobs/{digest}", content)
    return {"size": len(content), "sha256": digest}


def dumped(made: Artifact, **changed: object) -> dict[str, Any]:
    return {**made.manifest.model_dump(mode="json"), **changed}


def refused(uri: str, here: Store) -> str:
    [reason] = reasons(uri, here)
    assert is_empty(here)
    assert [path for path in here.root.rglob("*") if path.is_symlink()] == []
    return reason


@KINDS
def test_what_nobody_has_touched_is_found(uri: str, here: Store, made: Artifact) -> None:
    found = remote(uri).lookup("encoder", FINGERPRINT, here).artifact
    assert found is not None
    assert found.manifest == made.manifest


def test_without_listed_keys_nothing_is_loaded(uri: str, here: Store, made: Artifact) -> None:
    [rejection] = remote(uri, trusted=()).lookup("encoder", FINGERPRINT, here).rejected
    assert "artifacts.public_keys" in rejection.reason
    assert is_empty(here)


@KINDS
def test_a_strangers_signature_does_not_count(uri: str, here: Store, made: Artifact) -> None:
    replace(uri, dumped(made), STRANGER)
    assert refused(uri, here) == "no key of artifacts.public_keys signed it"


@pytest.mark.parametrize("wrap", [lambda body: body, lambda body: {"payload": body, "signatures": []}])
def test_a_manifest_without_a_signature_is_refused(
    uri: str, here: Store, made: Artifact, wrap: Callable[[Any], Any]
) -> None:
    path, _ = envelope_of(uri)
    RemoteFiles(uri).write(path, json.dumps(wrap(dumped(made))).encode())
    assert "not a DSSE envelope" in refused(uri, here)


def test_a_manifest_that_was_edited_after_it_was_signed_is_refused(uri: str, here: Store, made: Artifact) -> None:
    evil = add_blob(uri, b"evil")
    path, envelope = envelope_of(uri)
    content = json.loads(envelope)
    stranger = json.loads(STRANGER.sign(json.dumps(dumped(made, files={BLOB: evil})).encode()))
    RemoteFiles(uri).write(path, json.dumps({**content, "payload": stranger["payload"]}).encode())
    assert refused(uri, here) == "no key of artifacts.public_keys signed it"


def test_valid_files_under_another_manifest_are_refused(uri: str, here: Store, there: Store, made: Artifact) -> None:
    other = make(there, OTHER, files={"1/model.so": b"another"})
    remote(uri, key=KEY).upload(other)
    files = RemoteFiles(uri)
    valid = files.read(f"blobs/{other.manifest.files[BLOB].sha256}", 100)
    files.write(f"blobs/{made.manifest.files[BLOB].sha256}", valid)
    assert "is shorter than" in refused(uri, here)


@KINDS
@pytest.mark.parametrize(("model", "fingerprint"), [("encoder", OTHER), ("decoder", FINGERPRINT)])
def test_a_signed_manifest_of_another_place_is_refused(
    uri: str, here: Store, there: Store, model: str, fingerprint: Any
) -> None:
    remote(uri, key=KEY).upload(make(there, fingerprint, model))
    path, envelope = envelope_of(uri, f"{model}/{fingerprint.id}")
    RemoteFiles(uri).write(f"{DIRECTORY}/{path.rpartition('/')[2]}", envelope)
    assert refused(uri, here) == f"made for {model!r} {fingerprint.id}, and put here"


def test_a_manifest_that_lies_about_its_fingerprint_is_refused(uri: str, here: Store, made: Artifact) -> None:
    replace(uri, dumped(made, axes=dict(OTHER.axes)))
    assert "its axes do not give its fingerprint" in refused(uri, here)


@pytest.mark.parametrize(
    "name", ["cache/../../evil", "../evil", "/etc/evil", "cache//evil", "cache", "cache/a\0b", "lock"]
)
def test_a_path_that_leads_out_of_the_artifact_is_refused(uri: str, here: Store, made: Artifact, name: str) -> None:
    replace(uri, dumped(made, files={name: add_blob(uri, b"evil")}))
    assert "is damaged" in refused(uri, here)
    assert list(here.root.parent.rglob("evil")) == []


def test_a_file_that_another_needs_as_its_directory_is_refused(uri: str, here: Store, made: Artifact) -> None:
    entry = add_blob(uri, b"evil")
    replace(uri, dumped(made, files={"cache/a": entry, "cache/a/b": entry}))
    assert "Error" in refused(uri, here)


@pytest.mark.parametrize("hashed", ["0" * 64, "../" * 21 + "x", "", "A" * 64])
def test_a_hash_that_is_none_is_refused(uri: str, here: Store, made: Artifact, hashed: str) -> None:
    replace(uri, dumped(made, files={BLOB: {"size": 4, "sha256": hashed}}))
    assert refused(uri, here)


@pytest.mark.parametrize("size", [10 * 10**9, 3 * 10**9, 10**30, -1, "many"])
def test_a_size_that_is_not_so_is_refused(uri: str, here: Store, made: Artifact, size: object) -> None:
    entry = add_blob(uri, b"evil")
    replace(uri, dumped(made, files={BLOB: {**entry, "size": size}}))
    assert refused(uri, here)


def test_too_many_files_are_refused(uri: str, here: Store, made: Artifact) -> None:
    entry = {"size": 0, "sha256": hashlib.sha256().hexdigest()}
    replace(uri, dumped(made, files={f"cache/{number}": entry for number in range(10_001)}))
    assert "at most" in refused(uri, here)


@KINDS
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda content: content + b"x", "is longer than"),
        (lambda content: content[:-1], "is shorter than"),
        (lambda content: b"", ""),
        (lambda content: content[:-1] + b"x", "was altered"),
    ],
)
def test_a_blob_that_is_not_what_was_signed_is_refused(
    uri: str, here: Store, made: Artifact, harm: Callable[[bytes], bytes], words: str
) -> None:
    RemoteFiles(uri).write(f"blobs/{made.manifest.files[BLOB].sha256}", harm(FILES["1/model.so"]))
    assert words in refused(uri, here)


@KINDS
def test_a_blob_that_is_gone_is_refused(uri: str, here: Store, made: Artifact) -> None:
    RemoteFiles(uri).remove(f"blobs/{made.manifest.files[BLOB].sha256}")
    assert "not found" in refused(uri, here)


def test_an_artifact_of_another_engine_is_refused(uri: str, here: Store, made: Artifact) -> None:
    replace(uri, dumped(made, engine="jit"))
    assert "only 'aot'" in refused(uri, here)


@pytest.mark.parametrize("payload", [b"", b"[]", b"\x80", b"[" * 100_000, b'{"format": 2}', b'{"format": 3}'])
def test_a_signed_payload_that_is_no_manifest_is_refused(uri: str, here: Store, made: Artifact, payload: bytes) -> None:
    replace(uri, payload)
    assert refused(uri, here)


@KINDS
def test_an_envelope_that_is_too_large_is_not_read(uri: str, here: Store, made: Artifact) -> None:
    path, envelope = envelope_of(uri)
    RemoteFiles(uri).write(path, envelope + b" " * (5 << 20))
    assert "an envelope of" in refused(uri, here)


class Bomb:
    """Whoever unpickles it makes a directory."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


@pytest.mark.parametrize("target", ["envelope", "payload", "signed", "lease", *(f"cache/{name}" for name in FILES)])
def test_a_pickle_does_not_go_off(uri: str, here: Store, made: Artifact, tmp_path: Path, target: str) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "crater"))
    path, _ = envelope_of(uri)
    files = RemoteFiles(uri)
    if target == "lease":
        files.write(f"{DIRECTORY}/lease", bomb)
        assert not remote(uri).lease("encoder", FINGERPRINT).exists()
    elif target == "envelope":
        files.write(path, bomb)
        assert "not a DSSE envelope" in refused(uri, here)
    elif target == "payload":
        replace(uri, bomb, STRANGER)
        assert "no key" in refused(uri, here)
    elif target == "signed":
        replace(uri, bomb)
        assert "no JSON" in refused(uri, here)
    else:
        entry = made.manifest.files[target]
        files.write(f"blobs/{entry.sha256}", bomb.ljust(entry.size, b"\0"))
        if entry.size:
            assert refused(uri, here)
        else:  # of an empty file nothing is fetched
            assert remote(uri).lookup("encoder", FINGERPRINT, here).artifact is not None
    assert not (tmp_path / "crater").exists()
    pickle.loads(bomb)
    assert (tmp_path / "crater").exists()
