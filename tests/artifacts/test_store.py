"""The store: what it finds, what it passes over, and that nothing which happens to a process breaks it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bentoml_compile.artifacts.fingerprint import Fingerprint
from bentoml_compile.artifacts.hashing import hash_sources
from bentoml_compile.artifacts.lock import try_lock
from bentoml_compile.artifacts.manifest import MANIFEST
from bentoml_compile.artifacts.store import Artifact, Refusal, Store
from bentoml_compile.errors import ArtifactRejected
from bentoml_compile.report import GraphBreak

FINGERPRINT = Fingerprint({"torch": "2.13.0", "mode": "default"}, {"scale": "float 2.0"})
OTHER = Fingerprint({"torch": "2.12.1", "mode": "default"}, {"scale": "float 2.0"})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "compile")


def fill(cache: Path) -> None:
    """Files as Inductor lays them out."""
    for name, content in {
        "ab/kernel.cpp": b"int f();",
        "ab/kernel.so": b"\x7fELF",
        "fxgraph/x/y": b"\x80pickle",
    }.items():
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(content)
    (cache / "locks").mkdir()
    (cache / "locks" / "kernel.lock").touch()


def make(store: Store, fingerprint: Fingerprint = FINGERPRINT, model: str = "encoder", **sealed: object) -> Artifact:
    """An artifact that nobody uses."""
    with store.draft(model, fingerprint) as draft:
        fill(draft.cache)
        artifact = draft.seal(**{"decisions": {"engine": "jit"}, "sources": {}, **sealed})  # type: ignore[arg-type]
    artifact.release()
    return artifact


def reasons(store: Store, fingerprint: Fingerprint = FINGERPRINT) -> list[str]:
    found = store.lookup("encoder", fingerprint)
    assert found.artifact is None
    return [rejection.reason for rejection in found.rejected]


def test_an_empty_store_has_nothing_and_is_not_created(store: Store) -> None:
    assert store.lookup("encoder", FINGERPRINT).artifact is None
    assert store.artifacts() == []
    assert store.prune(max_bytes=0) == []
    assert not store.root.exists()


def test_a_sealed_draft_is_found_with_its_decisions_at_its_path(store: Store) -> None:
    made = make(store, decisions={"engine": "jit", "speedup": 1.5})
    found = store.lookup("encoder", FINGERPRINT).artifact
    assert found is not None
    assert found.cache == made.cache
    assert found.decisions == {"engine": "jit", "speedup": 1.5}
    assert (found.model, found.fingerprint, found.engine) == ("encoder", FINGERPRINT.id, "jit")
    assert found.size == len(b"int f();" + b"\x7fELF" + b"\x80pickle")


@pytest.mark.parametrize("model", ["../../evil", "a/b", "", "ünïcode", ".", "x" * 300])
def test_any_model_name_stays_inside_of_the_store(store: Store, model: str) -> None:
    artifact = make(store, model=model)
    assert store.root in artifact.path.parents
    found = store.lookup(model, FINGERPRINT).artifact
    assert found is not None


def test_two_models_whose_names_look_alike_have_an_artifact_each(store: Store) -> None:
    made = [make(store, model=model) for model in ("a/b", "a b", "a-b")]
    found = [store.lookup(model, FINGERPRINT).artifact for model in ("a/b", "a b", "a-b")]
    assert [artifact and artifact.path for artifact in found] == [artifact.path for artifact in made]


def test_a_draft_that_is_not_sealed_leaves_nothing(store: Store) -> None:
    with contextlib.suppress(ZeroDivisionError), store.draft("encoder", FINGERPRINT) as draft:
        fill(draft.cache)
        raise ZeroDivisionError
    assert not draft.path.exists()
    assert store.artifacts() == []


def test_a_draft_is_not_found_before_it_is_sealed_and_lives_on(store: Store) -> None:
    with store.draft("encoder", FINGERPRINT) as draft:
        fill(draft.cache)
        assert reasons(store) == ["being written by another process"]
        store.prune(older_than=0, max_bytes=0)
        draft.seal({}, {}).release()
    assert store.lookup("encoder", FINGERPRINT).artifact is not None


def test_another_fingerprint_is_a_miss_that_names_the_axis_and_both_values(store: Store) -> None:
    make(store, OTHER)
    assert reasons(store) == ["torch: 2.13.0 here, 2.12.1 there"]


def test_a_miss_names_the_attribute_that_differs(store: Store) -> None:
    axes = dict(FINGERPRINT.axes)
    make(store, Fingerprint({**axes, "attributes": "a"}, {"scale": "float 2.0", "bias": "bool True"}))
    looked_for = Fingerprint({**axes, "attributes": "b"}, {"scale": "float 3.0", "bias": "bool True"})
    assert reasons(store, looked_for) == ["attributes: scale is float 3.0 here, float 2.0 there"]


def test_an_edited_source_file_is_a_miss_until_the_edit_is_taken_back(store: Store, tmp_path: Path) -> None:
    helper = tmp_path / "helper.py"
    helper.write_text("SCALE = 1")
    make(store, sources=hash_sources([str(helper)]))
    helper.write_text("SCALE = 2")
    assert reasons(store) == [f"source changed: {helper}"]
    helper.unlink()
    assert reasons(store) == [f"source changed: {helper}"]
    helper.write_text("SCALE = 1")
    assert store.lookup("encoder", FINGERPRINT).artifact is not None


def files_of(artifact: Artifact) -> list[Path]:
    return [path for path in sorted(artifact.path.rglob("*")) if path.is_file() and path.suffix != ".lock"]


@pytest.mark.parametrize("name", ["cache/ab/kernel.cpp", "cache/ab/kernel.so", "cache/fxgraph/x/y", MANIFEST])
def test_an_altered_byte_anywhere_is_noticed_and_the_artifact_removed(store: Store, name: str) -> None:
    choose = random.Random(name)
    for _ in range(20):
        artifact = make(store)
        path = artifact.path / name
        content = bytearray(path.read_bytes())
        position = choose.randrange(len(content))
        content[position] ^= 1 << choose.randrange(8)
        path.write_bytes(content)
        found = store.lookup("encoder", FINGERPRINT)
        if found.artifact is not None:  # harmless: a space in the manifest that became another kind of space
            assert name == MANIFEST
            assert found.artifact.manifest == artifact.manifest
            found.artifact.release()
            shutil.rmtree(artifact.path)
            continue
        assert path.name in found.rejected[0].reason
        assert not artifact.path.exists()


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [remove, truncate, empty])
@pytest.mark.parametrize("name", ["cache/ab/kernel.so", MANIFEST])
def test_a_missing_or_truncated_file_is_a_miss(store: Store, harm: Callable[[Path], None], name: str) -> None:
    artifact = make(store)
    harm(artifact.path / name)
    assert len(reasons(store)) == 1
    assert not artifact.path.exists()
    assert make(store).path.exists()


def add_code(cache: Path) -> None:
    (cache / "ab" / "added.py").write_text("import os")


def add_code_called_lock(cache: Path) -> None:
    (cache / "locks" / "added.lock").write_text("import os")


def add_link(cache: Path) -> None:
    (cache / "ab" / "link.so").symlink_to("/bin/sh")


def add_pipe(cache: Path) -> None:
    os.mkfifo(cache / "ab" / "pipe")


def add_beside(cache: Path) -> None:
    (cache.parent / "other").mkdir()


def link_the_cache_away(cache: Path) -> None:
    cache.rename(cache.parent.parent / "elsewhere")
    cache.symlink_to(cache.parent.parent / "elsewhere")


@pytest.mark.parametrize("add", [add_code, add_code_called_lock, add_link, add_pipe, add_beside, link_the_cache_away])
def test_whatever_was_not_written_by_the_compile_is_a_miss(store: Store, add: Callable[[Path], None]) -> None:
    artifact = make(store)
    add(artifact.cache)
    assert store.lookup("encoder", FINGERPRINT).artifact is None


def test_inductors_own_locks_may_come_and_go(store: Store) -> None:
    artifact = make(store)
    (artifact.cache / "locks" / "another.lock").touch()
    (artifact.cache / "locks" / "kernel.lock").unlink()
    assert store.lookup("encoder", FINGERPRINT).artifact is not None


def test_an_artifact_that_was_moved_is_a_miss(store: Store) -> None:
    moved = make(store, model="decoder").path
    make(store).path.rename(store.root / "away")
    shutil.copytree(moved, store.root / "encoder" / FINGERPRINT.id / "copy")
    assert "moved here" in reasons(store)[0]


def test_what_others_can_write_is_rejected_with_the_command_that_helps(store: Store) -> None:
    artifact = make(store)
    for path in (store.root, artifact.path, artifact.cache / "ab", artifact.cache / "ab" / "kernel.so"):
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        assert f"chmod -R go-w '{path}'" in reasons(store)[0]
        path.chmod(mode)
    assert store.lookup("encoder", FINGERPRINT).artifact is not None
    store.root.chmod(0o777)
    with pytest.raises(ArtifactRejected, match="chmod"):
        store.draft("encoder", FINGERPRINT)


def test_a_umask_that_lets_the_group_write_does_no_harm(store: Store) -> None:
    before = os.umask(0o002)
    try:
        make(store)
        assert store.lookup("encoder", FINGERPRINT).artifact is not None
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_another_user_is_rejected(store: Store) -> None:
    artifact = make(store)
    os.chown(artifact.cache / "ab" / "kernel.so", 12345, -1)
    assert "belongs to user 12345" in reasons(store)[0]
    os.chown(store.root, 12345, -1)
    assert "chown -R 0" in reasons(store)[0]


@pytest.fixture
def read_only(store: Store) -> Iterator[Callable[[], None]]:
    """Makes the store read-only, for root, too, who is not held back by modes."""
    if os.geteuid() == 0 and subprocess.run(["mount", "--version"], capture_output=True).returncode != 0:
        pytest.skip("no mount command")
    mounted = False

    def make_read_only() -> None:
        nonlocal mounted
        if os.geteuid() == 0:
            bind = subprocess.run(["mount", "--bind", "-o", "ro", store.root, store.root], capture_output=True)
            if bind.returncode != 0:
                pytest.skip("no permission to mount")
            mounted = True
            return
        for path in [store.root, *store.root.rglob("*")]:
            path.chmod(path.stat().st_mode & ~0o222)

    yield make_read_only
    if mounted:
        subprocess.run(["umount", store.root], check=True)
    for path in [store.root, *store.root.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)


def test_a_read_only_store_is_read(store: Store, read_only: Callable[[], None]) -> None:
    make(store)
    read_only()
    found = store.lookup("encoder", FINGERPRINT).artifact
    assert found is not None
    found.hold()
    found.release()
    assert store.prune(max_bytes=0) == []
    with pytest.raises(OSError, match=r"[Rr]ead-only|denied"):
        store.draft("encoder", FINGERPRINT)


def test_a_store_that_is_no_directory_is_a_miss_and_no_draft(store: Store) -> None:
    store.root.write_text("not a directory")
    assert len(reasons(store)) == 1
    assert store.artifacts() == []
    with pytest.raises(OSError):  # noqa: PT011 its kind depends on the system
        store.draft("encoder", FINGERPRINT)


def test_what_is_in_use_is_not_pruned(store: Store) -> None:
    made = make(store)
    found = store.lookup("encoder", FINGERPRINT).artifact
    assert found is not None
    assert store.prune(older_than=0, max_bytes=0) == []
    assert made.path.exists()
    found.release()
    assert [artifact.path for artifact in store.prune(max_bytes=0)] == [made.path]
    assert list(store.root.iterdir()) == []


def test_a_damaged_artifact_in_use_is_passed_over_and_stays(store: Store) -> None:
    artifact = make(store)
    artifact.hold()
    add_code(artifact.cache)
    assert "added.py" in reasons(store)[0]
    assert artifact.path.exists()
    artifact.release()


def test_pruning_by_age_counts_from_the_last_use(store: Store) -> None:
    old, used = make(store), make(store, OTHER)
    for artifact in (old, used):
        os.utime(artifact.path / "used", (time.time() - 1000,) * 2)
    used.hold()
    used.release()
    would = store.prune(older_than=500, dry_run=True)
    assert [artifact.path for artifact in would] == [old.path]
    assert old.path.exists()
    assert [artifact.path for artifact in store.prune(older_than=500)] == [old.path]
    assert [artifact.path for artifact in store.artifacts()] == [used.path]


def test_pruning_by_size_removes_the_least_recently_used_first(store: Store) -> None:
    made = [make(store, Fingerprint({"number": str(number)})) for number in range(4)]
    for age, artifact in zip((30, 10, 40, 20), made, strict=True):
        os.utime(artifact.path / "used", (time.time() - age,) * 2)
    removed = store.prune(max_bytes=2 * made[0].size)
    assert [artifact.path for artifact in removed] == [made[2].path, made[0].path]
    assert [artifact.path for artifact in store.artifacts()] == [made[1].path, made[3].path]


def test_resealing_takes_in_what_its_user_added(store: Store) -> None:
    make(store)
    found = store.lookup("encoder", FINGERPRINT).artifact
    assert found is not None
    add_code(found.cache)
    assert found.reseal({"engine": "eager"})
    found.release()
    again = store.lookup("encoder", FINGERPRINT).artifact
    assert again is not None
    assert again.decisions == {"engine": "eager"}


def test_resealing_waits_for_the_other_users(store: Store) -> None:
    make(store)
    one, other = (store.lookup("encoder", FINGERPRINT).artifact for _ in range(2))
    assert one is not None
    assert other is not None
    assert not one.reseal({"engine": "eager"})
    assert store.prune(max_bytes=0) == []  # both still hold it
    other.release()
    assert store.prune(max_bytes=0) == []
    assert one.reseal({"engine": "eager"})
    one.release()


def test_a_lock_on_a_directory_that_was_removed_is_none(tmp_path: Path) -> None:
    (tmp_path / "attempt").mkdir()
    lock = try_lock(tmp_path / "attempt", exclusive=True)
    assert lock is not None
    assert try_lock(tmp_path / "attempt", exclusive=False) is None
    (tmp_path / "attempt").rename(tmp_path / "trash")
    assert not lock.shared()
    lock.release()


def open_below(root: Path) -> list[str]:
    """What this process has open there, also if it was removed; other threads open and close other files."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [link for link in links if link.startswith(f"{root}/")]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_no_file_stays_open(store: Store) -> None:
    damaged, pruned = make(store), make(store, OTHER)
    (damaged.path / MANIFEST).unlink()
    assert store.lookup("encoder", FINGERPRINT).artifact is None
    assert len(store.prune(max_bytes=0)) == 1
    assert not pruned.path.exists()
    assert open_below(store.root) == []


def test_a_refusal_is_remembered_until_a_source_changes(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text("print()")
    broken = GraphBreak(str(source), 1, "print()", "a call of print", "remove it")
    refusal = Refusal("2 graph breaks", (broken, broken), hash_sources([str(source)]))
    assert store.refusal("encoder", FINGERPRINT) is None
    store.remember_refusal("encoder", FINGERPRINT, refusal)
    assert store.refusal("encoder", FINGERPRINT) == refusal
    assert store.refusal("encoder", OTHER) is None
    source.write_text("pass")
    assert store.refusal("encoder", FINGERPRINT) is None


def test_a_damaged_refusal_counts_as_none_and_pruning_removes_it(store: Store) -> None:
    store.remember_refusal("encoder", FINGERPRINT, Refusal("graph breaks", (), {}))
    path = next(store.root.rglob("refusal.json"))
    path.write_text(path.read_text().replace("graph", "grasp"))
    assert store.refusal("encoder", FINGERPRINT) is None
    store.prune(older_than=0)
    assert not path.exists()


WRITER = """
import pathlib, sys, time
from bentoml_compile.artifacts.store import Store
sys.path.insert(0, {checkout!r})
from tests.artifacts.test_store import FINGERPRINT, fill
store = Store(pathlib.Path({root!r}))
mode, count = sys.argv[1], int(sys.argv[2])
for _ in range(count):
    draft = store.draft("encoder", FINGERPRINT)
    if mode == "draft":
        fill(draft.cache)
        print(draft.path, flush=True)
        time.sleep(600)  # until it is killed
    elif mode == "seal":
        fill(draft.cache)
        print("sealing", flush=True)
        draft.seal({{}}, {{}}).release()
    elif mode == "hold":
        fill(draft.cache)
        print(draft.seal({{}}, {{}}).path, flush=True)
        time.sleep(600)
"""


def start(store: Store, mode: str, count: int = 1) -> subprocess.Popen[str]:
    checkout = str(Path(__file__).resolve().parents[2])
    script = WRITER.format(checkout=checkout, root=str(store.root))
    return subprocess.Popen([sys.executable, "-c", script, mode, str(count)], stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_draft_whose_writer_was_killed_is_passed_over_and_removed(store: Store) -> None:
    writer = start(store, "draft")
    path = Path(line(writer))
    assert reasons(store) == ["being written by another process"]
    kill(writer)
    assert reasons(store) == ["incomplete: its writer is gone"]
    assert not path.exists()


def test_an_artifact_whose_user_was_killed_can_be_pruned(store: Store) -> None:
    user = start(store, "hold")
    path = Path(line(user))
    assert store.prune(max_bytes=0) == []
    kill(user)
    assert [artifact.path for artifact in store.prune(max_bytes=0)] == [path]


def test_a_child_that_outlives_the_user_does_not_keep_the_lock(store: Store) -> None:
    artifact = make(store)
    artifact.hold()
    child = subprocess.Popen(["sleep", "600"], close_fds=False)
    try:
        artifact.release()
        assert store.prune(max_bytes=0) != []
    finally:
        child.kill()
        child.wait()


def test_a_writer_killed_at_any_moment_leaves_whole_artifacts_or_none(store: Store) -> None:
    choose = random.Random(0)
    for _ in range(5):
        writer = start(store, "seal", 10_000)
        line(writer)
        time.sleep(choose.uniform(0, 0.05))  # not to wait for anything: the moment of the kill
        kill(writer)
        found = store.lookup("encoder", FINGERPRINT)
        reasons = {"incomplete: its writer is gone", "incomplete: it has no lock file"}
        assert {rejection.reason for rejection in found.rejected} <= reasons
        if found.artifact is not None:
            found.artifact.release()
    store.prune(max_bytes=0)
    assert list(store.root.iterdir()) == []


def test_processes_that_compile_prune_and_look_up_at_once_do_not_disturb_each_other(store: Store) -> None:
    writers = [start(store, "seal", 30) for _ in range(3)]
    found = 0
    while any(writer.poll() is None for writer in writers) or not found:  # they may be faster
        artifact = store.lookup("encoder", FINGERPRINT).artifact
        if artifact is not None:
            found += 1
            assert (artifact.cache / "ab" / "kernel.so").read_bytes() == b"\x7fELF"
            store.prune(max_bytes=0)
            assert (artifact.cache / "ab" / "kernel.so").exists()
            artifact.release()
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.close()
    assert [writer.returncode for writer in writers] == [0, 0, 0]


def kept_by_another_user(store: Store, path: Path) -> None:
    os.chown(path, 65534, 65534)


def reached_by_a_link(store: Store, path: Path) -> None:
    path.rename(elsewhere := store.root.parent / "elsewhere")
    path.symlink_to(elsewhere)
    if path == store.root and os.geteuid() == 0:
        os.lchown(path, 65534, 65534)


def test_a_store_may_lie_on_another_disk(store: Store) -> None:
    make(store)
    store.root.rename(elsewhere := store.root.parent / "elsewhere")
    store.root.symlink_to(elsewhere)  # by its own user
    assert store.lookup("encoder", FINGERPRINT).artifact is not None
    store.draft("encoder", FINGERPRINT).discard()


@pytest.mark.parametrize("depth", [0, 1, 2], ids=["root", "model", "fingerprint"])
@pytest.mark.parametrize("harm", [kept_by_another_user, reached_by_a_link])
def test_nothing_is_touched_below_a_link_or_anothers_directory(
    store: Store, depth: int, harm: Callable[[Store, Path], None]
) -> None:
    if (harm is kept_by_another_user or depth == 0) and os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    made = make(store)
    unfinished = made.path.with_name("0123456789ab")
    for left in (unfinished, made.path.with_name(".trash-0123")):
        left.mkdir()
        (left / "precious.txt").touch()
    harm(store, [store.root, made.path.parent.parent, made.path.parent][depth])
    before = sorted(store.root.parent.rglob("*"))
    assert store.prune(older_than=0, max_bytes=0) == []
    [rejection] = store.lookup("encoder", FINGERPRINT).rejected
    assert "is a link" in rejection.reason or "belongs to user 65534" in rejection.reason
    with pytest.raises(ArtifactRejected):
        store.draft("encoder", FINGERPRINT)
    assert sorted(store.root.parent.rglob("*")) == before
