"""Many processes at one store whose size is bounded: nobody is disturbed, and the bound holds."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from bentoml_compile.artifacts.artifact import Artifact
from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.manifest import MANIFEST, USED, FileEntry, check_files
from bentoml_compile.artifacts.store import Store
from bentoml_compile.cli import main
from tests.artifacts.test_store import FINGERPRINT, OTHER, fill, make
from tests.forked import Forked

KINDS = [Fingerprint({"number": str(number)}) for number in range(6)]
ROOM = 3  # artifacts
ROUNDS = 60
DEADLINE = 300.0  # seconds until something that should happen counts as failed


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "compile")


@pytest.fixture
def forked() -> Iterator[Forked]:
    with Forked("tests.artifacts.test_crowd") as forked:
        yield forked


def crowd(root: str, original: str, seed: str) -> None:
    """One of the processes; prints what it has found and made, in JSON."""
    store, choose, counts = Store(Path(root)), random.Random(seed), {"found": 0, "made": 0}
    template = Store(Path(original)).artifacts()[0]
    bound = ROOM * template.size
    for _ in range(ROUNDS):
        kind = choose.choice(KINDS)
        artifact = store.lookup("encoder", kind).artifact
        counts["found" if artifact is not None else "made"] += 1
        if artifact is None:
            artifact = made(store, kind, template) if choose.random() < 0.5 else adopted(store, kind, template)
        store.prune(max_bytes=bound, older_than=0 if choose.random() < 0.2 else None)
        check_files(artifact.path, artifact.manifest.files)
        artifact.hold()
        artifact.release()
    store.prune(max_bytes=bound)
    print(json.dumps(counts), flush=True)


def made(store: Store, kind: Fingerprint, template: Artifact) -> Artifact:
    with store.lease("encoder", kind), store.draft("encoder", kind) as draft:
        fill(draft.cache)
        return draft.seal({}, {})


def adopted(store: Store, kind: Fingerprint, template: Artifact) -> Artifact:
    manifest = template.manifest.model_copy(update={"axes": dict(kind.axes), "fingerprint": kind.id})
    names = {entry.sha256: name for name, entry in manifest.files.items()}

    def fetch(entry: FileEntry, path: Path) -> None:
        shutil.copyfile(template.path / names[entry.sha256], path)

    return store.adopt(manifest, fetch)


def test_a_crowd_that_boots_and_prunes_keeps_within_the_bound_and_what_is_in_use(
    store: Store, forked: Forked, tmp_path: Path
) -> None:
    make(Store(tmp_path / "original"), FINGERPRINT)
    held = [made(store, kind, make(store, OTHER)) for kind in KINDS[:2]]
    size = held[0].size
    code = "import sys; from tests.artifacts.test_crowd import crowd; crowd(*sys.argv[1:])"
    crowded = [forked.start(code, tmp_path, str(store.root), str(tmp_path / "original"), str(n)) for n in range(5)]
    for child in crowded:
        assert forked.wait(child) == 0, child.errors.read_text()
    counts = [json.loads(child.output.read_text()) for child in crowded]
    assert all(count["made"] for count in counts)
    assert any(count["found"] for count in counts)
    for artifact in held:
        check_files(artifact.path, artifact.manifest.files)
    stored = store.artifacts()
    assert {artifact.path for artifact in held} <= {artifact.path for artifact in stored}
    assert sum(artifact.size for artifact in stored) <= ROOM * size
    for artifact in held:
        artifact.release()
    store.prune(max_bytes=0)
    assert list(store.root.iterdir()) == []


def test_what_is_in_use_may_be_more_than_there_is_room_for(store: Store) -> None:
    template = make(store, OTHER)
    held = [made(store, kind, template) for kind in KINDS]
    assert [removed.path for removed in store.prune(max_bytes=template.size)] == [template.path]
    for artifact in held:
        check_files(artifact.path, artifact.manifest.files)
        artifact.release()


def vanish(root: str, until: str) -> None:
    """Removes whatever is in the store, in no order, as somebody would who knows nothing of locks."""
    choose, parent = random.Random(0), os.getppid()
    while not Path(until).exists() and os.getppid() == parent:
        paths = [Path(place) / name for place, folders, files in os.walk(root) for name in (*folders, *files)]
        choose.shuffle(paths)
        for path in paths:
            with contextlib.suppress(OSError):  # gone with its directory; or a directory
                path.unlink()
            if choose.random() < 0.5:
                shutil.rmtree(path, ignore_errors=True)


def test_files_that_vanish_under_a_lookup_and_a_prune_are_a_miss(store: Store, forked: Forked, tmp_path: Path) -> None:
    code = "import sys; from tests.artifacts.test_crowd import vanish; vanish(*sys.argv[1:])"
    store.root.mkdir()
    child = forked.start(code, tmp_path, str(store.root), str(tmp_path / "until"))
    missed, ends = 0, time.monotonic() + DEADLINE
    rounds = 0
    try:
        while rounds < 100 or not missed:
            assert time.monotonic() < ends
            rounds += 1
            try:
                made(store, FINGERPRINT, None).release()  # type: ignore[arg-type]  # not looked at
            except OSError:  # gone while it was written
                continue
            finally:
                store.artifacts()
            found = store.lookup("encoder", FINGERPRINT).artifact
            missed += found is None
            if found is not None:
                found.release()
            store.lookup("encoder", OTHER)
            store.prune(max_bytes=rounds % 2 * 100)
    finally:
        (tmp_path / "until").touch()
    assert forked.wait(child) == 0, child.errors.read_text()


# what prune says, and what it takes for a store


def unreadable(store: Store, fingerprint: Fingerprint, number: int) -> Path:
    """An artifact of another version of this package, or one whose manifest is damaged."""
    path = make(store, fingerprint).path
    manifest = path / MANIFEST
    manifest.write_bytes([b'{"format": 1}', b"", manifest.read_bytes()[:-9]][number % 3])
    return path


@pytest.mark.parametrize("number", range(3))
def test_what_this_version_cannot_read_counts_and_is_pruned(store: Store, number: int) -> None:
    path, readable = unreadable(store, OTHER, number), make(store)
    os.utime(path / USED, (time.time() - 10,) * 2)  # clocks are coarse
    assert store.prune(max_bytes=10**6) == []
    assert path.exists()
    (removed,) = store.prune(max_bytes=readable.size)
    assert (removed.path, removed.model, removed.fingerprint) == (path, "encoder", OTHER.id)
    assert removed.size > 0
    assert [artifact.path for artifact in store.artifacts()] == [readable.path]


def test_an_unreadable_artifact_in_use_stays(store: Store) -> None:
    artifact = make(store)
    artifact.hold()
    (artifact.path / MANIFEST).write_bytes(b"")
    assert store.prune(max_bytes=0, older_than=0) == []
    artifact.release()
    assert [removed.path for removed in store.prune(max_bytes=0)] == [artifact.path]


def test_a_directory_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    """--store ~/bentoml instead of ~/bentoml/compile."""
    bento = tmp_path / "bentos" / "embedder" / "4xwkzxrq2gqkhgxi"
    bento.mkdir(parents=True)
    (bento / "bento.yaml").touch()
    (tmp_path / "models" / "weights" / ".trash-0123").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    assert Store(tmp_path).prune(older_than=0, max_bytes=0) == []
    assert sorted(tmp_path.rglob("*")) == before


def listed(store: Store) -> set[tuple[str, str, str]]:
    """(model, fingerprint, size) as the command lists them."""
    result = CliRunner().invoke(main, ["artifacts", "--store", str(store.root)])
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines()[1:]]
    return {(row[0], row[1], " ".join(row[3:5])) for row in rows}


def pruned(store: Store, *options: str) -> tuple[set[tuple[str, str, str]], str]:
    """What the command says that it removed, and its last line."""
    result = CliRunner().invoke(main, ["artifacts", "--store", str(store.root), "prune", *options])
    assert result.exit_code == 0, result.output
    *lines, last = result.output.splitlines()
    return {tuple(line.split(maxsplit=2)) for line in lines}, last  # type: ignore[misc]


def test_the_command_says_what_it_has_removed(store: Store) -> None:
    artifacts = [make(store, kind) for kind in KINDS]
    artifacts[0].hold()  # noted as its use: the last of all
    before = listed(store)
    would, last = pruned(store, "--max-size", "0", "--dry-run")
    assert would == before == listed(store)
    assert last.startswith("6 would be removed, unless in use")
    removed, last = pruned(store, "--max-size", "0")
    assert last.startswith("5 removed")
    assert before - removed == listed(store)
    assert {fingerprint for _, fingerprint, _ in listed(store)} == {artifacts[0].fingerprint}
    artifacts[0].release()
    unreadable(store, OTHER, 0)
    removed, last = pruned(store, "--older-than", "0s")
    assert {fingerprint for _, fingerprint, _ in removed} == {artifacts[0].fingerprint, OTHER.id}
    assert last.startswith("2 removed")
    assert list(store.root.iterdir()) == []
