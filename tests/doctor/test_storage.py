"""Faults of stores, each with the line and the command that ends it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.store import Store
from bentoml_compile.doctor import storage
from tests.doctor.findings import NOT_ROOT, expect, only


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(storage.home(tmp_path)).text == f"{tmp_path} (BENTOML_HOME is not set)"
    monkeypatch.setenv("BENTOML_HOME", "$NOWHERE/bentoml")
    expect(only(storage.home(Path("$NOWHERE/bentoml"))), "problem", "not known (BENTOML_HOME)", "export BENTOML_HOME=")
    (tmp_path / "file").write_text("")
    expect(only(storage.home(tmp_path / "file" / "x")), "problem", "is not a folder", "export BENTOML_HOME=")


def make_artifact(root: Path, size: int) -> None:
    with Store(root).draft("encoder", Fingerprint({"torch": "2.13.0"})) as draft:
        (draft.cache / "code.so").write_bytes(b"x" * size)
        draft.seal({}, {}, "aot").release()


def test_a_store_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    finding = only(storage.store(tmp_path / "a" / "b"))
    assert finding.status == "ok"
    assert "not there yet; can be made" in finding.text
    assert list(tmp_path.iterdir()) == []


def test_a_store_in_use_is_counted_and_left_as_it_was(tmp_path: Path) -> None:
    make_artifact(tmp_path / "store", 2_000_000)
    before = sorted(tmp_path.rglob("*"))
    finding = only(storage.store(tmp_path / "store", max_bytes=5_000_000))
    assert finding.status == "ok", finding
    assert "1 artifacts, 2.0 MB of at most 5 MB; " in finding.text
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_that_others_can_write(tmp_path: Path) -> None:
    make_artifact(tmp_path / "store", 1)
    (tmp_path / "store" / "encoder").chmod(0o777)
    finding = only(storage.store(tmp_path / "store"))
    expect(
        finding, "problem", "store/encoder can be written by other users", f"chmod -R go-w '{tmp_path}/store/encoder'"
    )
    subprocess.run(finding.fix, shell=True, check=True)
    assert only(storage.store(tmp_path / "store")).status == "ok"


@NOT_ROOT
def test_a_store_of_another_user(tmp_path: Path) -> None:
    make_artifact(tmp_path / "store", 1)
    os.chown(tmp_path / "store", 12345, -1)
    finding = only(storage.store(tmp_path / "store"))
    expect(finding, "problem", "belongs to user 12345, not 0", f"chown -R 0 '{tmp_path}/store'")
    subprocess.run(finding.fix, shell=True, check=True)
    assert only(storage.store(tmp_path / "store")).status == "ok"


def test_a_store_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    expect(only(storage.store(tmp_path / "store")), "problem", "is not a folder", "mv ")


def test_a_path_with_a_space(tmp_path: Path) -> None:
    expect(only(storage.store(tmp_path / "a store")), "warning", "has a space", "{store: /a/path/without/spaces}")


def test_artifacts_that_are_larger_than_max_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with Store(tmp_path).draft(name, Fingerprint({})) as draft:
            (draft.cache / "code.so").write_bytes(b"x" * 600)
            draft.seal({}, {}, "aot").release()
    expect(only(storage.store(tmp_path, max_bytes=1000)), "warning", "2 artifacts of", "prune --max-size 1000B")
    expect(only(storage.store(tmp_path, max_bytes=500)), "problem", "one artifact has", "{max_bytes: 2400}")


@NOT_ROOT
@pytest.mark.parametrize(
    ("options", "status", "text", "fix"),
    [
        (
            "ro",
            "problem",
            "cannot be made: {}: Read-only file system: what a boot compiles is lost",
            "export BENTOML_HOME=",
        ),
        ("noexec", "problem", "is mounted noexec", "{store: /a/folder/on/a/local/disk}"),
        ("size=200m", "warning", "MB are free", "artifacts prune --older-than 7d"),
        ("size=1m", "problem", "MB are free", "artifacts prune --older-than 7d"),
    ],
)
def test_a_file_system_that_does_not_serve(
    mounted: Callable[..., Path], options: str, status: str, text: str, fix: str
) -> None:
    folder = mounted(options)
    finding = only(storage.store(folder / "store"))
    expect(finding, status, text.format(folder), fix)


@NOT_ROOT
def test_a_read_only_store_is_fine_where_nothing_is_to_be_written(mounted: Callable[..., Path]) -> None:
    finding = only(storage.store(mounted("ro") / "store", write=False))
    assert finding.status == "ok", finding
    assert "only read" in finding.text


@NOT_ROOT
def test_a_full_store(mounted: Callable[..., Path]) -> None:
    folder = mounted("size=64k,mode=700")
    (folder / "big").write_bytes(b"x" * 65536)
    findings = list(storage.store(folder))
    expect(findings[0], "problem", "cannot be written: No space left on device", "artifacts prune")
