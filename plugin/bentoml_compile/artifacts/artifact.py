"""One artifact: a directory that a compile writes once (`Draft`) and that boots load from (`Artifact`)."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from bentoml_compile.artifacts.axes import FORMAT, Fingerprint
from bentoml_compile.artifacts.lock import LOCK, FileLock, try_lock
from bentoml_compile.artifacts.manifest import (
    CACHE,
    MANIFEST,
    USED,
    FileEntry,
    Manifest,
    check_files,
    file_names,
    forbid_writing_by_others,
    list_files,
    remove_temporaries,
    timestamp,
    write_checked,
)
from bentoml_compile.errors import ArtifactRejected

TRASH = ".trash-"


class Artifact:
    """A complete artifact. Inductor finds its code again only at the path where it was written.

    Attributes:
        path: its own directory.
        manifest: what it was made for and of.
    """

    def __init__(self, path: Path, manifest: Manifest, lock: FileLock | None = None) -> None:
        self.path = path
        self.manifest = manifest
        self._lock = lock

    @property
    def model(self) -> str:
        return self.manifest.model

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @property
    def axes(self) -> Mapping[str, str]:
        return self.manifest.axes

    @property
    def engine(self) -> str:
        return self.manifest.engine

    @property
    def decisions(self) -> dict[str, Any]:
        return self.manifest.decisions

    @property
    def sources(self) -> Mapping[str, str]:
        return self.manifest.sources

    @property
    def cache(self) -> Path:
        """The directory for TORCHINDUCTOR_CACHE_DIR."""
        return self.path / CACHE

    @property
    def size(self) -> int:
        """Bytes of the cache directory's files."""
        return self.manifest.size

    @property
    def created(self) -> datetime:
        return self.manifest.created

    @property
    def last_used(self) -> datetime:
        return timestamp(self.path / USED) or self.created

    def hold(self) -> None:
        """Keep it from being pruned until `release` or this process's end, and note the use.

        Raises:
            ArtifactRejected: it was removed, or is being rewritten.
        """
        if self._lock is None:
            try:
                self._lock = try_lock(self.path, exclusive=False)
            except OSError as error:
                raise ArtifactRejected(f"{self.path} cannot be used: {error}") from error
            if self._lock is None:
                raise ArtifactRejected(f"{self.path} is being removed or rewritten by another process")
        with contextlib.suppress(OSError):  # a store may be read-only for its users
            (self.path / USED).touch(mode=0o600)

    def release(self) -> None:
        """End `hold`."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def grown(self) -> bool:
        """Whether its user has added files to the cache directory, which the next lookup would not accept."""
        return not file_names(self.path) <= self.manifest.files.keys()

    def reseal(self, decisions: Mapping[str, Any] | None = None) -> bool:
        """Take what its user has added to the cache directory, or decided anew, into the manifest.

        Returns:
            False, and nothing is changed, if another process uses the artifact or it is not held.

        Raises:
            OSError: the store cannot be written.
        """
        if self._lock is None or not self._lock.exclusive():
            return False
        try:
            remove_temporaries(self.path / MANIFEST)
            forbid_writing_by_others(self.cache)
            changed: dict[str, Any] = {"files": list_files(self.path)}
            if decisions is not None:
                changed["decisions"] = dict(decisions)
            manifest = self.manifest.model_copy(update=changed)
            write_checked(self.path / MANIFEST, manifest.model_dump(mode="json"))
            self.manifest = manifest
        finally:
            self._lock.shared()
        return True


class Draft:
    """A directory of its own for one compile; leaving the `with` block discards it unless it was sealed."""

    def __init__(self, path: Path, model: str, fingerprint: Fingerprint, lock: FileLock) -> None:
        self.path = path
        self.cache = path / CACHE
        self._model = model
        self._fingerprint = fingerprint
        self._lock: FileLock | None = lock

    def seal(self, decisions: Mapping[str, Any], sources: Mapping[str, str], engine: str = "jit") -> Artifact:
        """Complete the artifact; from now on other processes find it. It comes back held.

        Args:
            decisions: what the boot found out, e.g. which shapes are served compiled.
            sources: the files and global constants that the model's code reads, with their hashes (`hash_sources`).
            engine: what made it.

        Raises:
            OSError: the disk is full, or the directory is gone.
            ArtifactRejected: the draft was sealed or discarded before.
        """
        if self._lock is None:
            raise ArtifactRejected(f"{self.path} was sealed or discarded before; ask the store for a new draft")
        forbid_writing_by_others(self.cache)
        manifest = Manifest(
            format=FORMAT,
            model=self._model,
            fingerprint=self._fingerprint.id,
            engine=engine,
            axes=dict(self._fingerprint.axes),
            attributes=dict(self._fingerprint.attributes),
            decisions=dict(decisions),
            sources=dict(sources),
            files=list_files(self.path),
            creator=f"bentoml-compile {importlib.metadata.version('bentoml-compile')}",
            created=datetime.now(timezone.utc),
        )
        return self._completed_by(manifest)

    def adopt(self, manifest: Manifest, fetch: Callable[[FileEntry, Path], None]) -> Artifact:
        """Complete a copy of an artifact that was made elsewhere; as `seal`.

        Args:
            manifest: that artifact's.
            fetch: writes one of its files to the path, which is new. What it wrote is checked here.

        Raises:
            ArtifactRejected: a file is not what the manifest says; or as `seal`.
            OSError: as `seal`. Whatever `fetch` raises.
        """
        if self._lock is None:
            raise ArtifactRejected(f"{self.path} was sealed or discarded before; ask the store for a new draft")
        for name, entry in manifest.files.items():
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            fetch(entry, path)
        forbid_writing_by_others(self.cache)
        check_files(self.path, manifest.files)
        return self._completed_by(manifest)

    def _completed_by(self, manifest: Manifest) -> Artifact:
        assert self._lock is not None
        write_checked(self.path / MANIFEST, manifest.model_dump(mode="json"))
        lock, self._lock = self._lock, None
        if not lock.shared():
            lock.release()
            raise FileNotFoundError(f"{self.path} was removed while it was sealed")
        artifact = Artifact(self.path, manifest, lock)
        artifact.hold()
        return artifact

    def discard(self) -> None:
        """Remove it, as far as that is possible. Does nothing after `seal`."""
        if self._lock is not None:
            move_away(self.path)
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def new_draft(parent: Path, model: str, fingerprint: Fingerprint) -> Draft:
    """A draft in a new directory below `parent`, which exists.

    Raises:
        OSError: read-only, full.
    """
    while True:
        path = parent / secrets.token_hex(6)
        path.mkdir(mode=0o700)
        try:
            lock = try_lock(path, exclusive=True)
        except FileNotFoundError:
            continue  # somebody tidied up between the two lines: a directory without a lock is nobody's
        except OSError:
            move_away(path)
            raise
        if lock is None:
            continue
        draft = Draft(path, model, fingerprint, lock)
        try:
            # Says who holds the lock, and finds a full disk before the compile does.
            (path / LOCK).write_text(f"{os.getpid()}\n")
            draft.cache.mkdir(mode=0o700)
        except BaseException:
            draft.discard()
            raise
        return draft


def remove_unused(path: Path) -> bool:
    """Remove an attempt's directory unless a process writes or uses it."""
    try:
        lock = try_lock(path, exclusive=True)
    except OSError:  # gone, or read-only
        return _cannot_be_locked(path) and move_away(path)
    if lock is None:
        return False
    try:
        return move_away(path)
    finally:
        lock.release()


def _cannot_be_locked(path: Path) -> bool:
    """Whether something else is in the lock's place: then nobody uses the attempt."""
    try:
        return not stat.S_ISREG((path / LOCK).lstat().st_mode)
    except OSError:
        return False


def move_away(path: Path) -> bool:
    """Remove a directory so that nobody sees half of it; what a crash leaves behind is swept up by `sweep`."""
    trash = path.with_name(f"{TRASH}{secrets.token_hex(6)}")
    try:
        path.rename(trash)
    except OSError:
        return False
    shutil.rmtree(trash, ignore_errors=True)
    return True


def sweep(parent: Path) -> None:
    """Finish removals that were interrupted."""
    with contextlib.suppress(OSError):  # gone
        for name in os.listdir(parent):
            if name.startswith(TRASH):
                shutil.rmtree(parent / name, ignore_errors=True)
