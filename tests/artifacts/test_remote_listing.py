"""What lies at a remote for a model, of whatever kind the remote is and whoever put it there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bentoml_compile.artifacts import blobs
from bentoml_compile.artifacts.remote_files import RemoteFiles
from bentoml_compile.artifacts.store import Store
from tests.artifacts.faulty_proxy import Fault, FaultyProxy
from tests.artifacts.remotes import FINGERPRINT, KEY, OTHER, STRANGER, make, remote


def test_an_empty_remote_has_nothing(uri: str) -> None:
    assert remote(uri).stored("encoder", FINGERPRINT) == []


def test_those_of_the_fingerprint_come_first_and_others_models_not_at_all(uri: str, there: Store) -> None:
    for fingerprint, model in ((OTHER, "encoder"), (FINGERPRINT, "encoder"), (FINGERPRINT, "decoder")):
        remote(uri, key=KEY).upload(make(there, fingerprint, model))
    found = remote(uri).stored("encoder", FINGERPRINT)
    assert [each.fingerprint for each in found] == [FINGERPRINT.id, OTHER.id]
    assert [each.manifest.axes for each in found if each.manifest] == [FINGERPRINT.axes, OTHER.axes]
    assert {each.signature for each in found} == {f"signed by {KEY.public}"}
    assert {each.problem for each in found} == {""}


def test_nothing_is_read_of_what_an_unlisted_key_has_signed_or_none_has(uri: str, there: Store) -> None:
    remote(uri, key=STRANGER).upload(make(there))
    RemoteFiles(uri).write(f"encoder/{FINGERPRINT.id}/{0:064x}.json", b'{"signatures": [{"keyid": "ed25519:x"}]}')
    found = remote(uri).stored("encoder", FINGERPRINT)
    assert {each.manifest for each in found} == {None}
    assert {each.signature for each in found} == {
        f"signed by {STRANGER.public}, which artifacts.public_keys does not list",
        "not signed by a key that it names",
    }
    assert all(each.problem for each in found)


def test_an_artifact_at_another_ones_place_or_without_its_files_is_a_problem(uri: str, there: Store) -> None:
    made = make(there)
    remote(uri, key=KEY).upload(made)
    [own] = remote(uri).stored("encoder", FINGERPRINT)
    files = RemoteFiles(uri)
    files.write(f"decoder/{FINGERPRINT.id}/{0:064x}.json", files.read(own.path, 1 << 20))
    [moved] = remote(uri).stored("decoder", FINGERPRINT)
    assert moved.problem == f"made for 'encoder' {FINGERPRINT.id}, and put here"
    files.remove(f"blobs/{next(iter(made.manifest.files.values())).sha256}")
    [own] = remote(uri).stored("encoder", FINGERPRINT)
    assert "is missing" in own.problem


@pytest.mark.parametrize("name", ["x\nINFO loaded\x1b[2J", "0" * 63, "A" * 64])
def test_a_name_that_nothing_of_ours_has_is_not_shown(tmp_path: Path, name: str) -> None:
    for directory in (FINGERPRINT.id, name):
        (tmp_path / "encoder" / directory).mkdir(parents=True)
        (tmp_path / "encoder" / directory / f"{name}.json").write_text("{}")
        (tmp_path / "encoder" / directory / f"{0:064x}.json").write_text("{}")
    [found] = remote(f"file://{tmp_path}").stored("encoder", FINGERPRINT)
    assert found.path == f"encoder/{FINGERPRINT.id}/{0:064x}.json"


def test_all_that_a_boot_reads_is_shown_and_less_of_others(uri: str) -> None:
    for fingerprint in (FINGERPRINT, OTHER):
        for number in range(25):
            RemoteFiles(uri).write(f"encoder/{fingerprint.id}/{number:064x}.json", b"{}")
    found = [each.fingerprint for each in remote(uri).stored("encoder", FINGERPRINT)]
    assert found == [FINGERPRINT.id] * 20 + [OTHER.id] * 5


@pytest.mark.parametrize("change", [lambda content: content[:-1] + b"\0", lambda content: content + b"\0"])
def test_an_altered_file_is_a_problem_of_each_artifact_that_has_it(
    uri: str, there: Store, change: Callable[[bytes], bytes]
) -> None:
    for made in (make(there), make(there, sources={"module json": "x"})):
        remote(uri, key=KEY).upload(made)
    entry = made.manifest.files["cache/1/model.so"]
    files, path = RemoteFiles(uri), f"blobs/{entry.sha256}"
    files.write(path, change(files.read(path, entry.size)))
    assert [each.problem for each in remote(uri).stored("encoder", FINGERPRINT)] == [f"{path} was altered"] * 2


def test_files_of_more_than_one_piece_are_read_whole(uri: str, there: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "_PIECE", 1000)
    remote(uri, key=KEY).upload(make(there))  # one of 4000 bytes
    assert [each.problem for each in remote(uri).stored("encoder", FINGERPRINT)] == [""]


def test_a_remote_that_does_not_answer_is_given_up(bucket: str, proxy: FaultyProxy, there: Store) -> None:
    proxy.fault = Fault("silence")
    with pytest.raises(TimeoutError, match="no answer"):
        remote(bucket, timeout=2.0).stored("encoder", FINGERPRINT)
