"""Whatever becomes of files in a store, a Bento or a remote: what does not equal the original is not loaded."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.bundle import Bundle
from bentoml_compile.artifacts.remote import Remote
from bentoml_compile.artifacts.signing import PrivateKey
from bentoml_compile.artifacts.store import Artifact, Lookup, Store
from tests.artifacts.killed import MODEL, fingerprint_of
from tests.artifacts.processes import CONFIG, Processes
from tests.forked import Forked

KEY = PrivateKey.new()
OTHER = Fingerprint({"torch": "2.12.1"})
Harm = Callable[[random.Random, Path, Path], object]  # draws, one of the files, the folder of all


def flip(choose: random.Random, file: Path, folder: Path) -> None:
    content = bytearray(file.read_bytes() or b"\0")
    content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    file.write_bytes(content)


def cut(choose: random.Random, file: Path, folder: Path) -> None:
    os.truncate(file, choose.randrange(max(file.stat().st_size, 1)))


def cut_in_the_middle(choose: random.Random, file: Path, folder: Path) -> None:
    content = file.read_bytes()
    start, end = sorted(choose.randrange(len(content) + 1) for _ in range(2))
    file.write_bytes(content[:start] + content[end:])


def extend(choose: random.Random, file: Path, folder: Path) -> None:
    with file.open("ab") as written:
        written.write(choose.randbytes(choose.randint(1, 5000)))


def zero(choose: random.Random, file: Path, folder: Path) -> None:
    with file.open("r+b") as written:
        written.seek(choose.randrange(max(file.stat().st_size, 1)))
        written.write(bytes(choose.randint(1, 4096)))


def swap(choose: random.Random, file: Path, folder: Path) -> None:
    """Also between artifacts."""
    other = choose.choice(files_of(folder))
    content = other.read_bytes()
    other.write_bytes(file.read_bytes())
    file.write_bytes(content)


def rename(choose: random.Random, file: Path, folder: Path) -> None:
    path = choose.choice([file, file.parent])
    path.rename(path.with_name(f"{path.name}{choose.randrange(10)}"))


def take_the_place(choose: random.Random, file: Path, folder: Path) -> None:
    file.replace(choose.choice(files_of(folder)))


def copy(choose: random.Random, file: Path, folder: Path) -> None:
    shutil.copyfile(file, file.with_name(f"{choose.randrange(10)}{file.name}"))


def delete(choose: random.Random, file: Path, folder: Path) -> None:
    if choose.random() < 0.5:
        file.unlink()
    else:
        shutil.rmtree(file.parent)


def link(choose: random.Random, file: Path, folder: Path) -> None:
    """To itself in another place, or to another file."""
    other = choose.choice([file, *files_of(folder)])
    shutil.copyfile(other, folder.parent / "elsewhere")
    file.unlink()
    ways: list[Callable[[Path, Path], None]] = [os.symlink, os.link]
    choose.choice(ways)(folder.parent / "elsewhere", file)


def put_something_else_there(choose: random.Random, file: Path, folder: Path) -> None:
    """At a remote no pipe, at which a lookup waits until its time is up."""
    file.unlink()
    choose.choice([os.mkdir] if folder.name == "remote" else [os.mkfifo, os.mkdir])(file)


HARMS: list[Harm] = [
    flip,
    cut,
    cut_in_the_middle,
    extend,
    zero,
    swap,
    rename,
    take_the_place,
    copy,
    delete,
    link,
    put_something_else_there,
]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


@dataclass(frozen=True)
class Places:
    """A store, a Bento and a remote in one directory, each with the same artifact and one of another fingerprint."""

    directory: Path

    @property
    def store(self) -> Store:
        return Store(self.directory / "store")

    @property
    def bundle(self) -> Bundle:
        return Bundle(self.directory / "bundle")

    @property
    def uri(self) -> str:
        return f"file://{self.directory}/remote"

    def look_up(self, place: str, fingerprint: Fingerprint) -> Lookup:
        if place == "remote":
            remote = Remote(self.uri, timeout=60.0, public_keys=(KEY.public,), key=KEY)
            return remote.lookup(MODEL, fingerprint, Store(self.directory / "copies"))
        folder = self.store if place == "store" else self.bundle
        return folder.lookup(MODEL, fingerprint)


@dataclass(frozen=True)
class Original:
    """Of each fingerprint, the hashes of the artifact's files by name, taken by themselves."""

    places: Places
    fingerprint: Fingerprint
    hashes: dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with Forked("torch", "tests.artifacts.killed") as forked:
        yield forked


@pytest.fixture(scope="module")
def original(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Original:
    processes = Processes(forked, tmp_path_factory.mktemp("original"))
    places = Places(processes.directory)
    assert processes.boot(places.store) == "compiled"
    (artifact,) = places.store.artifacts()
    assert artifact.engine == "aot"
    other = replaced(places.store, artifact)
    remote = Remote(places.uri, timeout=60.0, public_keys=(), key=KEY)
    for each in (artifact, other):
        places.bundle.add(each)
        remote.upload(each)
    hashes = {each.fingerprint: hashes_of(each) for each in (artifact, other)}
    return Original(places, fingerprint_of(artifact.manifest), hashes)


def replaced(store: Store, artifact: Artifact) -> Artifact:
    """One with the same files for another fingerprint, but each has other content."""
    with store.draft(MODEL, OTHER) as draft:
        for name in artifact.manifest.files:
            (draft.path / name).parent.mkdir(parents=True, exist_ok=True)
            (draft.path / name).write_bytes((artifact.path / name).read_bytes()[::-1] + b"other")
        sealed = draft.seal(artifact.decisions, artifact.sources, artifact.engine)
    sealed.release()
    return sealed


def hashes_of(artifact: Artifact) -> dict[str, str]:
    return {
        str(path.relative_to(artifact.path)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files_of(artifact.cache)
    }


def cases() -> list[Any]:
    """(place, harm, seed), the seed being part of the id, so that a failure can be had again."""
    sample, soak = {"store": 2, "bundle": 2, "remote": 1}, 28  # 60 cases, and 1008
    return [
        pytest.param(
            place, harm, seed, id=f"{place}-{harm.__name__}-{seed}", marks=[pytest.mark.soak] if seed >= few else []
        )
        for place, few in sample.items()
        for harm in HARMS
        for seed in range(few + soak)
    ]


@pytest.mark.timeout(300, func_only=True)
@pytest.mark.parametrize(("place", "harm", "seed"), cases())
def test_what_does_not_equal_the_original_is_not_loaded(
    original: Original, tmp_path: Path, place: str, harm: Harm, seed: int
) -> None:
    shutil.copytree(original.places.directory / place, tmp_path / place)
    places, choose = Places(tmp_path), random.Random(f"{place} {harm.__name__} {seed}")
    harm(choose, choose.choice(files_of(tmp_path / place)), tmp_path / place)
    for fingerprint in (original.fingerprint, OTHER):
        found = places.look_up(place, fingerprint)
        if found.artifact is None:
            continue
        assert hashes_of(found.artifact) == original.hashes[fingerprint.id]
        assert set(found.artifact.manifest.files) == set(original.hashes[fingerprint.id])
        assert not any(path.is_symlink() for path in found.artifact.cache.rglob("*"))
        found.artifact.release()


@pytest.mark.parametrize("place", ["store", "bundle", "remote"])
def test_what_was_not_harmed_is_loaded(original: Original, tmp_path: Path, place: str) -> None:
    shutil.copytree(original.places.directory / place, tmp_path / place)
    for fingerprint in (original.fingerprint, OTHER):
        found = Places(tmp_path).look_up(place, fingerprint)
        assert found.artifact is not None
        assert hashes_of(found.artifact) == original.hashes[fingerprint.id]
        found.artifact.release()


def test_a_boot_that_finds_nothing_but_damage_compiles_and_the_next_one_loads(
    original: Original, forked: Forked, tmp_path: Path
) -> None:
    processes = Processes(forked, tmp_path)
    places = Places(tmp_path)
    for place in ("store", "bundle", "remote"):
        shutil.copytree(original.places.directory / place, tmp_path / place)
    damaged = [*files_of(places.store.root), *files_of(places.bundle.root), *files_of(tmp_path / "remote" / "blobs")]
    for file in damaged:
        if file.suffix != ".json":
            flip(random.Random(0), file, tmp_path)
    config = {**CONFIG, "artifacts": {"remote": places.uri, "public_keys": [str(KEY.public)]}}
    assert processes.boot(places.store, config, places.bundle) == "compiled"
    assert processes.boot(places.store, config, places.bundle) == "loaded"
