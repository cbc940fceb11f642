"""Faults of keys and remotes, each with the line and the command that ends it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bentoml_compile.artifacts.signing import KEY, KEY_FILE, PrivateKey
from bentoml_compile.doctor import shared
from bentoml_compile.doctor.check import Finding
from tests.doctor.findings import NOT_ROOT, expect, only


@pytest.fixture(scope="module")
def key() -> PrivateKey:
    return PrivateKey.new()


def test_keys_that_fit_each_other(monkeypatch: pytest.MonkeyPatch, key: PrivateKey) -> None:
    assert only(shared.keys([], has_remote=False)).text == "no keys, and no remote that needs them"
    finding = only(shared.keys([str(key.public)], has_remote=True))
    assert finding.status == "ok"
    assert finding.text == "1 public key; no signing key in this environment: nothing is uploaded from here"
    assert (
        only(shared.keys([str(key.public)], has_remote=False)).text
        == "1 public key; no signing key in this environment"
    )
    monkeypatch.setenv(KEY, key.to_pem().decode())
    finding = only(shared.keys([str(key.public)], has_remote=True))
    assert finding.text == f"1 public key; this environment signs as {key.public}"


def test_a_remote_without_public_keys(monkeypatch: pytest.MonkeyPatch, key: PrivateKey) -> None:
    finding = only(shared.keys([], has_remote=True))
    expect(finding, "warning", "public_keys is empty", "bentoml-compile keys new")
    assert "nothing uploaded from here" in finding.text
    monkeypatch.setenv(KEY, key.to_pem().decode())
    expect(next(iter(shared.keys([], has_remote=True))), "warning", "is empty", f"{{public_keys: [{key.public}]}}")


def test_a_private_key_that_no_service_trusts(monkeypatch: pytest.MonkeyPatch, key: PrivateKey) -> None:
    monkeypatch.setenv(KEY, key.to_pem().decode())
    other = PrivateKey.new().public
    finding = only(shared.keys([str(other)], has_remote=True))
    expect(
        finding,
        "problem",
        f"signs as {key.public}, which artifacts.public_keys does not list: nothing is uploaded from here",
        f"torch_compile: {{artifacts: {{public_keys: [{other}, {key.public}]}}}}",
    )
    assert only(shared.keys([str(other)], has_remote=False)).status == "warning"


def test_a_public_key_that_is_none() -> None:
    text = f"ed25519:{'A' * 43}="
    expect(
        only(shared.keys([text], has_remote=True)),
        "problem",
        f"{text}: a key that anybody can sign for",
        "keys show FILE",
    )


def test_a_private_key_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: PrivateKey) -> None:
    file = tmp_path / "signing key.pem"
    monkeypatch.setenv(KEY_FILE, str(file))
    expect(only(shared.keys([], has_remote=True)), "problem", "cannot be read", f"bentoml-compile keys new '{file}'")
    trusted = [str(key.public)]
    fix = f"set {KEY_FILE} to the file of the private key of {key.public}, or unset it"  # a new key would not be listed
    expect(only(shared.keys(trusted, has_remote=True)), "problem", "cannot be read", fix)
    file.write_bytes(key.to_pem())
    file.chmod(0o644)
    expect(list(shared.keys(trusted, has_remote=True))[1], "warning", "other users can read it", f"chmod 600 '{file}'")
    file.write_text("no key")
    expect(only(shared.keys(trusted, has_remote=True)), "problem", "cannot be used", fix)
    monkeypatch.setenv(KEY, "x")
    expect(only(shared.keys(trusted, has_remote=True)), "problem", "are both set", f"unset {KEY_FILE}")


@pytest.mark.parametrize("writes", [True, False])
def test_a_bucket_that_answers_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, s3: str, writes: bool) -> None:
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    finding = only(shared.remote("s3://there/artifacts", seconds=60, writes=writes))
    assert finding.status == "ok", finding
    assert ("read and written in" if writes else "read in") in finding.text
    left = boto3.client("s3", endpoint_url=s3).list_objects_v2(Bucket="there")
    assert left["KeyCount"] == 0


@pytest.mark.parametrize("writes", [True, False])
def test_a_bucket_that_is_missing_is_not_made(monkeypatch: pytest.MonkeyPatch, s3: str, writes: bool) -> None:
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    finding = only(shared.remote("s3://missing/artifacts", seconds=60, writes=writes))
    expect(finding, "problem", "there is no such bucket", "aws s3 mb s3://missing")
    names = [bucket["Name"] for bucket in boto3.client("s3", endpoint_url=s3).list_buckets()["Buckets"]]
    assert "there" in names  # and those of other tests: all servers of a process share them
    assert "missing" not in names


def test_a_server_that_nobody_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        finding = only(shared.remote("s3://there/artifacts", seconds=60, writes=False))
    expect(finding, "problem", "cannot be used", f"curl -sv {endpoint}")


@pytest.mark.parametrize("waits", [True, False], ids=["left behind", "seen too late"])
def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    if not waits:  # its error comes first
        monkeypatch.setattr(shared, "within", lambda seconds, work: work())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        finding = only(shared.remote("s3://there/artifacts", seconds=0.5, writes=False))
    expect(finding, "problem", "no answer within remote_timeout (0.5 s)", "{remote_timeout: 1}")


@pytest.mark.parametrize("writes", [True, False])
def test_a_folder_that_is_not_mounted(tmp_path: Path, writes: bool) -> None:
    finding = only(shared.remote(f"file://{tmp_path}/shared", seconds=60, writes=writes))
    fix = "" if writes else f"mount -a, or mkdir -p {tmp_path}/shared"
    expect(finding, "ok" if writes else "warning", "not there yet; it is made by the first upload", fix)
    assert writes or "this environment uploads nothing" in finding.text
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "shared").mkdir()
    assert only(shared.remote(f"file://{tmp_path}/shared", seconds=60, writes=writes)).status == "ok"
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_folder_that_another_doctor_takes_away_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, make = list[Path](), Path.mkdir

    def mkdir(path: Path, *args: Any, **kwargs: Any) -> None:
        make(path, *args, **kwargs)
        if path.name == "doctor" and not taken:
            taken.append(path)
            path.rmdir()  # as soon as it is there, and empty

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert only(shared.remote(f"file://{tmp_path}", seconds=60, writes=True)).status == "ok"
    assert taken
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writes", [True, False])
def test_a_folder_that_cannot_be_made(tmp_path: Path, writes: bool) -> None:
    (tmp_path / "file").write_bytes(b"")
    finding = only(shared.remote(f"file://{tmp_path}/file/shared", seconds=60, writes=writes))
    expect(finding, "problem", f"is not there, and cannot be made: {tmp_path}/file is not a folder", "mount -a")


@NOT_ROOT
@pytest.mark.parametrize(
    ("options", "text"), [("ro", "Read-only file system"), ("nr_inodes=1", "No space left on device")]
)
def test_a_remote_that_cannot_be_written(mounted: Callable[..., Path], options: str, text: str) -> None:
    uri = f"file://{mounted(options)}"
    assert only(shared.remote(uri, seconds=60, writes=False)).status == "ok"
    expect(only(shared.remote(uri, seconds=60, writes=True)), "problem", text, "has space")


def test_a_remote_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    expect(only(shared.remote("gs://bucket", seconds=60, writes=False)), "problem", "needs gcsfs", "pip install gcsfs")
    expect(only(shared.remote("nope://bucket", seconds=60, writes=False)), "problem", "nope://", "pip install")


def test_all_packages_that_are_missing_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(uri: str, *names: str) -> Finding:
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
        return only(shared.remote(uri, seconds=60, writes=False))

    remote = missing("file:///", "cryptography")
    expect(remote, "problem", "needs cryptography", "pip install 'bentoml-compile[remote]'")
    expect(missing("s3://bucket", "s3fs"), "problem", "needs cryptography and s3fs", "install 'bentoml-compile[s3]'")
