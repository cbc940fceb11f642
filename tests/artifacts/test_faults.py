"""Disks that are full, quotas, rights that are missing: a reason, and nothing that is left behind."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bentoml_compile.artifacts.artifact import Artifact
from bentoml_compile.artifacts.manifest import MANIFEST
from bentoml_compile.artifacts.store import Refusal, Store
from bentoml_compile.errors import ArtifactRejected
from bentoml_compile.keeping import private_directory
from bentoml_compile.listener import Listener
from bentoml_compile.model import compile_model
from tests.artifacts.test_crowd import adopted, made
from tests.artifacts.test_store import FINGERPRINT, OTHER, fill, make, reasons
from tests.forked import Forked
from tests.models import classifier, ids

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = 65534


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "compile")


@pytest.fixture
def template(tmp_path: Path) -> Artifact:
    return make(Store(tmp_path / "original"), engine="aot")


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with Forked("tests.artifacts.test_faults") as forked:
        yield forked


def run(forked: Forked, directory: Path, function: Callable[..., None], *arguments: object) -> str:
    """What a function of this module prints in a process of its own."""
    name = function.__name__
    code = f"import sys; from tests.artifacts.test_faults import {name}; {name}(*sys.argv[1:])"
    done = forked.run(code, directory, *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


WRITES: dict[str, Callable[[Store, Artifact], Artifact]] = {
    "seal": lambda store, template: made(store, OTHER, template),
    "adopt": lambda store, template: adopted(store, OTHER, template),
}


def refuse(store: Store) -> None:
    with store.lease("encoder", OTHER):
        store.remember_refusal("encoder", OTHER, Refusal("graph breaks" * 100, (), {}))


# a full disk


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk with 64 pages."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={64 * resource.getpagesize()}", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no permission to mount")
    yield path
    subprocess.run(["umount", path], check=True)


def fill_up(disk: Path, *, pages: int) -> None:
    """Leave so many."""
    (disk / "ballast").unlink(missing_ok=True)
    free = shutil.disk_usage(disk).free - pages * resource.getpagesize()
    (disk / "ballast").write_bytes(bytes(max(free, 0)))


@pytest.mark.parametrize("name", WRITES)
def test_a_full_disk_ends_what_is_written_and_leaves_nothing(small: Path, template: Artifact, name: str) -> None:
    store = Store(small / "compile")
    make(store)
    kept, failed = tree(store.root), 0
    for pages in range(64):
        fill_up(small, pages=pages)
        try:
            artifact = WRITES[name](store, template)
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017 each time, until there is room
            failed += 1
            store.prune()  # the directory of the fingerprint, which is empty
            assert tree(store.root) == kept
            continue
        artifact.release()
        assert len(store.artifacts()) == 2
        break
    else:
        pytest.fail("there was never enough room")
    assert failed > 2
    found = store.lookup("encoder", FINGERPRINT).artifact
    assert found is not None
    found.release()


def test_a_full_disk_can_be_pruned_and_read(small: Path) -> None:
    store = Store(small / "compile")
    make(store)
    damaged = make(store, OTHER)
    (damaged.path / MANIFEST).unlink()
    fill_up(small, pages=0)
    found = store.lookup("encoder", FINGERPRINT).artifact
    assert found is not None
    found.release()
    assert reasons(store, OTHER)[0] == "incomplete: its writer is gone"
    assert not damaged.path.exists()
    fill_up(small, pages=0)
    with pytest.raises(OSError, match="No space"):
        refuse(store)
    assert len(store.prune(max_bytes=0)) == 1
    assert list(store.root.iterdir()) == []


class Fallbacks(Listener):
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def fallback(self, model: str, kind: str) -> None:
        self.kinds.append(kind)


def boot(store: Path) -> tuple[str, list[str]]:
    """By torch.compile's machinery without a compiler, which takes no minute."""
    model, example, told = classifier(), {"ids": ids()}, Fallbacks()
    config = {"backend": "eager", "keep_eager_if_slower": False}
    compiled = compile_model(model, example_inputs=[example], config=config, listeners=[told], default_store=store)
    try:
        assert torch.allclose(compiled(**example)["logits"], model(**example)["logits"])
        return compiled.report.outcome, told.kinds
    finally:
        compiled.close()


@pytest.mark.parametrize("pages", [0, 1])
def test_a_boot_on_a_full_disk_compiles_and_says_why_nothing_is_kept(
    small: Path, caplog: pytest.LogCaptureFixture, pages: int
) -> None:
    fill_up(small, pages=pages)
    assert boot(small / "compile") == ("compiled", ["store_failed"])
    assert "No space left on device" in caplog.text
    assert not [path for path in small.rglob("*") if path.is_file() and path.name != "ballast"]


# a quota


def write_within(root: str, original: str, limit: str) -> None:
    """Prints what came of writing when no file may have more than so many bytes."""
    (template,) = Store(Path(original)).artifacts()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    outcomes = []
    for write in WRITES.values():
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), before[1]))
        try:
            write(Store(Path(root)), template).release()
            outcomes.append("kept")
        except OSError as error:
            outcomes.append(errno.errorcode[error.errno or 0])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)  # what is printed goes to a file as well
    print(*outcomes)


@pytest.mark.parametrize(("limit", "outcome"), [(0, "EFBIG"), (5, "EFBIG"), (600, "EFBIG"), (1 << 20, "kept")])
def test_a_quota_ends_what_is_written_and_leaves_nothing(
    store: Store, template: Artifact, forked: Forked, tmp_path: Path, limit: int, outcome: str
) -> None:
    printed = run(forked, tmp_path, write_within, store.root, tmp_path / "original", limit)
    assert printed.split() == [outcome, outcome]
    store.prune()
    assert len(store.artifacts()) == (2 if outcome == "kept" else 0)
    assert outcome == "kept" or tree(store.root) == set()


# rights


def use_as_nobody(root: str, original: str) -> None:
    """Prints what a lookup finds, its reasons, what writing raises, and what prune removes, in JSON."""
    (template,) = Store(Path(original)).artifacts()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    store, raised = Store(Path(root)), []
    for write in WRITES.values():
        try:
            write(store, template)
        except (OSError, ArtifactRejected) as error:
            raised.append(str(error))
    try:
        pruned = len(store.prune(max_bytes=0, older_than=0))
    except OSError:
        pruned = 0
    found = store.lookup("encoder", FINGERPRINT)
    reasons = [rejection.reason for rejection in found.rejected]
    print(json.dumps({"found": found.artifact is not None, "reasons": reasons, "raised": raised, "pruned": pruned}))


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """One that others can reach: pytest's own are this user's alone."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


@needs_root
@pytest.mark.parametrize(
    ("mode", "owner", "words"),
    [
        (0o700, 0, "belongs to user 0"),
        (0o755, 0, "belongs to user 0"),
        (0o000, NOBODY, "Permission denied"),
        (0o500, NOBODY, None),
    ],
)
def test_without_rights_there_is_a_reason_and_nothing_changes(
    forked: Forked, tmp_path: Path, open_directory: Path, mode: int, owner: int, words: str | None
) -> None:
    original, store = open_directory / "original", Store(open_directory / "compile")
    make(Store(original), engine="aot")
    make(store)
    (store.root / "encoder" / FINGERPRINT.id).chmod(0o700)
    for path in [store.root, *store.root.rglob("*")]:
        os.chown(path, owner, owner)
        if words is None:
            path.chmod(path.stat().st_mode & ~0o222)
    store.root.chmod(mode)
    before = tree(store.root)
    output = json.loads(run(forked, tmp_path, use_as_nobody, store.root, original))
    assert tree(store.root) == before
    assert output["pruned"] == 0
    assert len(output["raised"]) == 2
    assert all("Permission denied" in raised for raised in output["raised"])
    assert output["found"] == (words is None)
    assert [str(words) in reason for reason in output["reasons"]] == [True] * (words is not None)


# private directories


def leave_behind() -> None:
    tempfile.tempdir = None
    directory = private_directory()
    path = directory.__enter__()
    (path / "code.so").touch()
    os.kill(os.getpid(), 9)


def test_the_private_directory_of_a_killed_boot_goes_with_the_next(
    forked: Forked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    code = "from tests.artifacts.test_faults import leave_behind; leave_behind()"
    assert forked.run(code, tmp_path, env={**os.environ, "TMPDIR": str(tmp_path / "tmp")}).returncode == -9
    (left,) = (tmp_path / "tmp").iterdir()
    named = left.name[:-8]
    not_ours = {f"{named}filefile", f"{named}linklink", f"{named}of_somebody_else", "torch_compile_cache"}
    (tmp_path / "tmp" / f"{named}filefile").touch()
    (tmp_path / "tmp" / f"{named}linklink").symlink_to(tmp_path)
    for folder in (f"{named}of_somebody_else", "torch_compile_cache"):
        (tmp_path / "tmp" / folder).mkdir()
    with private_directory() as one:
        assert not left.exists()
        with private_directory() as other:  # lives beside it
            assert one.exists()
            assert stat.S_IMODE(other.stat().st_mode) == 0o700
    assert {path.name for path in (tmp_path / "tmp").iterdir()} == not_ours


# what is in a file's place


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["lock", "used", MANIFEST])
@pytest.mark.parametrize("put", ["link", "pipe", "directory"])
def test_what_is_no_file_is_never_waited_for_followed_or_kept(
    store: Store, tmp_path: Path, name: str, put: str
) -> None:
    artifact = make(store)
    (artifact.path / name).rename(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").stat().st_mtime_ns
    if put == "link":
        (artifact.path / name).symlink_to(tmp_path / "elsewhere")
    elif put == "pipe":
        os.mkfifo(artifact.path / name)
    else:
        (artifact.path / name).mkdir()
    assert len(reasons(store)) == 1
    store.prune(max_bytes=0)
    assert (tmp_path / "elsewhere").stat().st_mtime_ns == before
    assert list(store.root.iterdir()) == []


def test_a_refusal_whose_writer_was_killed_goes_with_the_next_prune(store: Store) -> None:
    store.remember_refusal("encoder", OTHER, Refusal("graph breaks", (), {}))
    directory = store.directory("encoder", OTHER.id)
    temporary = directory / ".refusal.json.abc"
    temporary.touch()
    with store.lease("encoder", OTHER):
        store.prune(older_than=0)
        assert temporary.exists()  # its writer may live
    store.prune(older_than=0)
    assert list(store.root.iterdir()) == []


def test_reseals_that_were_killed_leave_nothing_that_grows(store: Store) -> None:
    artifact = make(store)
    for number in range(3):
        (artifact.path / f".{MANIFEST}.{number}").touch()
    found = store.lookup("encoder", FINGERPRINT).artifact
    assert found is not None
    assert found.reseal({"engine": "eager"})
    found.release()
    assert {path.name for path in artifact.path.iterdir()} == {"cache", "lock", "manifest.json", "used"}


def test_a_removal_that_was_interrupted_is_finished_by_the_next_lookup(store: Store) -> None:
    artifact = make(store)
    trash = artifact.path.with_name(".trash-0123")
    fill_directory = trash / "cache"
    fill_directory.mkdir(parents=True)
    fill(fill_directory)
    found = store.lookup("encoder", FINGERPRINT).artifact
    assert found is not None
    found.release()
    assert not trash.exists()
