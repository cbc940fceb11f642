"""The Bento's artifacts: what is found there, what is refused, and how they come in."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bentoml_compile.artifacts.artifact import TRASH
from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.bundle import Bundle
from bentoml_compile.artifacts.hashing import hash_sources
from bentoml_compile.artifacts.manifest import MANIFEST, read_checked, write_checked
from bentoml_compile.artifacts.store import Artifact, Store
from bentoml_compile.errors import ArtifactRejected
from tests.artifacts.test_store import FINGERPRINT, OTHER, fill


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle(tmp_path / "bento" / "src" / "compiled")


def make(store: Store, fingerprint: Fingerprint = FINGERPRINT, engine: str = "aot", **sealed: object) -> Artifact:
    with store.draft("encoder", fingerprint) as draft:
        fill(draft.cache)
        sealed = {"decisions": {"speedup": 1.5}, "sources": {}, **sealed}
        return draft.seal(engine=engine, **sealed)  # type: ignore[arg-type]


def reasons(bundle: Bundle, fingerprint: Fingerprint = FINGERPRINT) -> list[str]:
    found = bundle.lookup("encoder", fingerprint)
    assert found.artifact is None
    return [rejection.reason for rejection in found.rejected]


def everything(root: Path) -> dict[str, tuple[int, bytes]]:
    paths = {str(path.relative_to(root)): path for path in [root, *root.rglob("*")]}
    return {name: (path.stat().st_mode, path.read_bytes() if path.is_file() else b"") for name, path in paths.items()}


def test_a_bundle_that_is_not_there_rejects_nothing_and_is_not_created(bundle: Bundle) -> None:
    assert reasons(bundle) == []
    assert bundle.artifacts() == []
    assert not bundle.root.exists()


def test_what_was_added_is_found_without_the_store(store: Store, bundle: Bundle) -> None:
    made = make(store)
    added = bundle.add(made)
    shutil.rmtree(store.root)
    found = bundle.lookup("encoder", FINGERPRINT).artifact
    assert found is not None
    assert found.path == added.path
    assert found.manifest == made.manifest
    assert (found.cache / "ab" / "kernel.so").read_bytes() == b"\x7fELF"
    assert [artifact.path for artifact in bundle.artifacts()] == [added.path]


def test_a_lookup_and_the_use_of_an_artifact_write_nothing(store: Store, bundle: Bundle) -> None:
    bundle.add(make(store))
    before = everything(bundle.root)
    found = bundle.lookup("encoder", FINGERPRINT).artifact
    assert found is not None
    found.hold()
    assert not found.reseal({"engine": "eager"})
    assert not found.grown()
    found.release()
    found.hold()
    assert found.last_used == found.created
    assert bundle.lookup("encoder", OTHER).artifact is None
    assert everything(bundle.root) == before


@pytest.fixture
def read_only(store: Store, bundle: Bundle) -> Iterator[Artifact]:
    """An artifact of a bundle on a read-only file system; for root, too, who is not held back by modes."""
    artifact = bundle.add(make(store))
    if os.geteuid() == 0:
        mount = ["mount", "--bind", "-o", "ro", str(bundle.root), str(bundle.root)]
        if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
            pytest.skip("no permission to mount")
        yield artifact
        subprocess.run(["umount", bundle.root], check=True)
    else:
        paths = [bundle.root, *bundle.root.rglob("*")]
        for path in paths:
            path.chmod(path.stat().st_mode & ~0o222)
        yield artifact
        for path in paths:
            path.chmod(path.stat().st_mode | 0o200)


def test_a_read_only_bundle_is_read_and_takes_nothing(store: Store, bundle: Bundle, read_only: Artifact) -> None:
    found = bundle.lookup("encoder", FINGERPRINT).artifact
    assert found is not None
    found.hold()
    assert not found.reseal({"engine": "eager"})
    found.release()
    with pytest.raises(OSError, match=r"[Rr]ead-only|denied"):
        bundle.add(make(store, OTHER))


@pytest.mark.parametrize("umask", [0o077, 0o002, 0o022])
def test_any_user_can_read_what_was_added_and_only_its_owner_write(store: Store, bundle: Bundle, umask: int) -> None:
    before = os.umask(umask)
    try:
        bundle.root.parent.mkdir(parents=True)
        bundle.add(make(store))
    finally:
        os.umask(before)
    modes = {oct(path.stat().st_mode) for path in [bundle.root, *bundle.root.rglob("*")]}
    assert modes == {oct(0o100644), oct(0o40755)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_bundle_may_belong_to_another_user_and_be_writable_by_all(store: Store, bundle: Bundle) -> None:
    bundle.add(make(store))
    for path in [bundle.root, *bundle.root.rglob("*")]:
        os.chown(path, 12345, 12345)
        path.chmod(0o777)
    assert bundle.lookup("encoder", FINGERPRINT).artifact is not None


def test_an_artifact_for_another_machine_is_passed_over_with_the_axis_that_differs(
    store: Store, bundle: Bundle
) -> None:
    added = bundle.add(make(store, OTHER))
    (rejection,) = bundle.lookup("encoder", FINGERPRINT).rejected
    assert rejection.reason == "torch: 2.13.0 here, 2.12.1 there"
    assert rejection.artifact == f"compiled/encoder/{OTHER.id}/{added.path.name}"


def test_each_fingerprint_has_an_artifact_of_its_own(store: Store, bundle: Bundle) -> None:
    for fingerprint in (FINGERPRINT, OTHER):
        bundle.add(make(store, fingerprint))
    for fingerprint in (FINGERPRINT, OTHER):
        found = bundle.lookup("encoder", fingerprint)
        assert found.artifact is not None
        assert found.artifact.fingerprint == fingerprint.id
        assert found.rejected == ()


def test_what_was_made_by_torch_compile_is_not_taken_in(store: Store, bundle: Bundle) -> None:
    with pytest.raises(ArtifactRejected, match="engine 'jit'"):
        bundle.add(make(store, engine="jit"))
    assert not bundle.root.exists()


def test_what_was_made_by_torch_compile_is_not_loaded(store: Store, bundle: Bundle) -> None:
    made = make(store, engine="jit")
    shutil.copytree(made.path, bundle.directory("encoder", FINGERPRINT.id) / "copy")
    assert "engine 'jit'" in reasons(bundle)[0]


def test_a_source_that_changed_is_a_miss(store: Store, bundle: Bundle, tmp_path: Path) -> None:
    helper = tmp_path / "helper.py"
    helper.write_text("SCALE = 1")
    bundle.add(make(store, sources=hash_sources([str(helper)])))
    helper.write_text("SCALE = 2")
    assert reasons(bundle) == [f"source changed: {helper}"]
    helper.write_text("SCALE = 1")
    assert bundle.lookup("encoder", FINGERPRINT).artifact is not None


def test_an_artifact_of_another_model_or_fingerprint_in_its_place_is_refused(store: Store, bundle: Bundle) -> None:
    bundle.add(make(store))
    bundle.directory("encoder", FINGERPRINT.id).rename(bundle.directory("encoder", OTHER.id))
    assert "moved here" in reasons(bundle, OTHER)[0]
    (bundle.root / "encoder").rename(bundle.root / "decoder")
    (bundle.root / "decoder" / OTHER.id).rename(bundle.root / "decoder" / FINGERPRINT.id)
    found = bundle.lookup("decoder", FINGERPRINT)
    assert found.artifact is None
    assert "moved here" in found.rejected[0].reason


def edit_manifest(attempt: Path, edit: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    """As somebody would who knows the checksum."""
    content = read_checked(attempt / MANIFEST)
    edit(content)
    write_checked(attempt / MANIFEST, content)


def alter(attempt: Path) -> None:
    (attempt / "cache" / "ab" / "kernel.so").write_bytes(b"\x7fELG")


def truncate(attempt: Path) -> None:
    (attempt / "cache" / "ab" / "kernel.so").write_bytes(b"\x7fEL")


def remove(attempt: Path) -> None:
    (attempt / "cache" / "ab" / "kernel.so").unlink()


def add(attempt: Path) -> None:
    (attempt / "cache" / "added.so").write_bytes(b"\x7fELF")


def add_beside(attempt: Path) -> None:
    (attempt / "added.so").write_bytes(b"\x7fELF")


def elsewhere(attempt: Path) -> Path:
    return attempt.parents[3] / "elsewhere"


def link_a_file(attempt: Path) -> None:
    (attempt / "cache" / "ab" / "kernel.so").rename(elsewhere(attempt))
    (attempt / "cache" / "ab" / "kernel.so").symlink_to(elsewhere(attempt))


def link_a_directory(attempt: Path) -> None:
    (attempt / "cache" / "ab").rename(elsewhere(attempt))
    (attempt / "cache" / "ab").symlink_to(elsewhere(attempt))


def link_the_cache(attempt: Path) -> None:
    (attempt / "cache").rename(elsewhere(attempt))
    (attempt / "cache").symlink_to(elsewhere(attempt))


def link_the_manifest(attempt: Path) -> None:
    (attempt / MANIFEST).rename(elsewhere(attempt))
    (attempt / MANIFEST).symlink_to(elsewhere(attempt))


def link_the_way(attempt: Path) -> None:
    attempt.parent.rename(elsewhere(attempt))
    attempt.parent.symlink_to(elsewhere(attempt))


def pipe(attempt: Path) -> None:
    os.mkfifo(attempt / "cache" / "pipe")


def pipe_as_manifest(attempt: Path) -> None:
    """Which would hold up whoever opens it."""
    (attempt / MANIFEST).unlink()
    os.mkfifo(attempt / MANIFEST)


def garbage_as_manifest(attempt: Path) -> None:
    (attempt / MANIFEST).write_bytes(b"\x80\x05" + b"[" * 100_000)


def no_manifest(attempt: Path) -> None:
    (attempt / MANIFEST).unlink()


def climb_out(attempt: Path) -> None:
    edit_manifest(attempt, lambda content: content["files"].update({"cache/../../../x": entry(content)}))


def absolute(attempt: Path) -> None:
    edit_manifest(attempt, lambda content: content["files"].update({"/bin/sh": entry(content)}))


def claim_much(attempt: Path) -> None:
    edit_manifest(attempt, lambda content: entry(content).update(size=10 * 2**30))


def other_axes(attempt: Path) -> None:
    edit_manifest(attempt, lambda content: content["axes"].update(torch="2.12.1"))


def a_source_of_no_name(attempt: Path) -> None:
    edit_manifest(attempt, lambda content: content["sources"].update({"a\0b": "0", "module ..": "0"}))


def entry(content: dict) -> dict:  # type: ignore[type-arg]
    return content["files"]["cache/ab/kernel.so"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (alter, "cache/ab/kernel.so was altered"),
        (truncate, "cache/ab/kernel.so has 3 bytes instead of 4"),
        (remove, "cache/ab/kernel.so is missing"),
        (add, "cache/added.so is not listed"),
        (add_beside, "added.so is not listed"),
        (link_a_file, "cache/ab/kernel.so is neither a file nor a directory"),
        (link_a_directory, "cache/ab is neither a file nor a directory"),
        (link_the_cache, "cache is neither a file nor a directory"),
        (link_the_manifest, "manifest.json is not a file"),
        (link_the_way, "is a link"),
        (pipe, "cache/pipe is neither a file nor a directory"),
        (pipe_as_manifest, "manifest.json is not a file"),
        (garbage_as_manifest, "manifest.json is damaged"),
        (no_manifest, "No such file"),
        (climb_out, "'cache/../../../x' is no file below cache/"),
        (absolute, "'/bin/sh' is no file below cache/"),
        (claim_much, "10737418"),
        (other_axes, "its axes do not give its fingerprint"),
        (a_source_of_no_name, "embedded null byte"),
    ],
)
def test_what_is_not_as_it_was_written_is_refused_and_left_alone(
    store: Store, bundle: Bundle, harm: Callable[[Path], None], words: str
) -> None:
    harm(bundle.add(make(store)).path)
    before = everything(bundle.root)
    (reason,) = reasons(bundle)
    assert words in reason
    assert everything(bundle.root) == before


@pytest.mark.parametrize("harm", [alter, remove, add, no_manifest, link_a_file, pipe_as_manifest])
def test_adding_again_repairs_a_damaged_copy(store: Store, bundle: Bundle, harm: Callable[[Path], None]) -> None:
    made = make(store)
    harm(bundle.add(made).path)
    assert reasons(bundle)
    bundle.add(made)
    assert bundle.lookup("encoder", FINGERPRINT).artifact is not None


def test_a_newer_artifact_takes_the_place_of_an_older_one(store: Store, bundle: Bundle) -> None:
    bundle.add(make(store, decisions={"speedup": 1.5}))
    bundle.add(make(store, OTHER))
    added = bundle.add(make(store, decisions={"speedup": 2.5}))
    assert list(bundle.directory("encoder", FINGERPRINT.id).iterdir()) == [added.path]
    assert len(bundle.artifacts()) == 2


def test_adding_the_same_twice_copies_it_once(store: Store, bundle: Bundle) -> None:
    made = make(store)
    first = bundle.add(made).path.stat()
    assert bundle.add(made).path.stat().st_ino == first.st_ino


def test_an_artifact_goes_from_one_bundle_to_another(store: Store, bundle: Bundle, tmp_path: Path) -> None:
    bundle.add(bundle.add(make(store)))
    other = Bundle(tmp_path / "other")
    other.add(bundle.artifacts()[0])
    assert other.lookup("encoder", FINGERPRINT).artifact is not None


def test_an_artifact_that_is_damaged_on_the_way_is_not_taken_in(store: Store, bundle: Bundle) -> None:
    made = make(store)
    alter(made.path)
    with pytest.raises(ArtifactRejected, match=r"kernel\.so was altered"):
        bundle.add(made)
    assert list(bundle.directory("encoder", FINGERPRINT.id).iterdir()) == []
    assert reasons(bundle) == []


def test_what_a_killed_pack_has_left_is_no_artifact_and_goes_with_the_next(store: Store, bundle: Bundle) -> None:
    made = make(store)
    left = bundle.directory("encoder", FINGERPRINT.id) / f"{TRASH}0123"
    shutil.copytree(made.path, left)
    assert reasons(bundle) == []
    added = bundle.add(made)
    assert list(bundle.directory("encoder", FINGERPRINT.id).iterdir()) == [added.path]


PACK = """
import json, pathlib, sys
from bentoml_compile.artifacts import bundle
bundle._ALONE_SECONDS = 600.0  # the others' turns may take long on a busy disk
from bentoml_compile.artifacts.bundle import Bundle
from bentoml_compile.artifacts.store import Store
bundle, store = (kind(pathlib.Path(path)) for kind, path in zip((Bundle, Store), sys.argv[1:]))
artifacts = store.artifacts()
print("ready", flush=True)
sys.stdin.readline()
for _ in range(10):
    for artifact in artifacts:
        bundle.add(artifact)
"""


def test_packs_at_once_leave_one_whole_artifact(bundle: Bundle, tmp_path: Path) -> None:
    stores = [Store(tmp_path / name) for name in ("one", "two")]
    for number, store in enumerate(stores):
        make(store, decisions={"speedup": number})
    packs = [
        subprocess.Popen(
            [sys.executable, "-c", PACK, str(bundle.root), str(store.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for store in (*stores, stores[0])
    ]
    for pack in packs:
        assert pack.stdout is not None
        assert pack.stdout.readline() == "ready\n"
    for pack in packs:
        assert pack.stdin is not None
        pack.stdin.write("\n")
        pack.stdin.flush()
    for pack in packs:
        pack.communicate()
    assert [pack.returncode for pack in packs] == [0, 0, 0]
    (left,) = bundle.directory("encoder", FINGERPRINT.id).iterdir()
    found = bundle.lookup("encoder", FINGERPRINT)
    assert found.artifact is not None
    assert found.artifact.path == left
    assert found.rejected == ()


def test_one_that_keeps_its_lock_for_ever_holds_up_nobody(
    store: Store, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bentoml_compile.artifacts.bundle._ALONE_SECONDS", 0.1)
    first = bundle.add(make(store))
    descriptor = os.open(first.path.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        second = bundle.add(make(store, decisions={"speedup": 2.0}))
    finally:
        os.close(descriptor)
    assert first.path.exists()  # the other may be about to use it
    third = bundle.add(make(store, decisions={"speedup": 3.0}))
    assert [path.exists() for path in (first.path, second.path, third.path)] == [False, False, True]
