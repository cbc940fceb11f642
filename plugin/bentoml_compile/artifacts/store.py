"""The artifacts of this machine: `<root>/<model>/<fingerprint>/<attempt>/`.

Every compile writes into an attempt directory of its own, because what Inductor writes works only where it was
written, and because several processes may compile the same thing at once, although a lease (lease.py) lets most wait
for one. An attempt counts when its manifest is there, which is written last. Its lock file tells the living from the
dead: whoever writes or uses it holds the lock.

    store = Store(Path.home() / "bentoml" / "compile")
    found = store.lookup("encoder", fingerprint)
    if found.artifact is None:
        with store.draft("encoder", fingerprint) as draft:
            ...  # compile with TORCHINDUCTOR_CACHE_DIR=draft.cache
            artifact = draft.seal(decisions={}, sources=hash_sources(traced))
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from bentoml_compile.artifacts.artifact import Artifact, Draft, new_draft, remove_unused, sweep
from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.folder import Folder, Lookup, changed_source, newest_first, read_whole
from bentoml_compile.artifacts.lease import Lease, remove_unheld
from bentoml_compile.artifacts.lock import LOCK, FileLock, try_lock
from bentoml_compile.artifacts.manifest import (
    MANIFEST,
    USED,
    Damaged,
    FileEntry,
    Manifest,
    check_permissions,
    disk_usage,
    permission_problem,
    read_checked,
    read_manifest,
    remove_temporaries,
    timestamp,
    write_checked,
)
from bentoml_compile.errors import ArtifactRejected
from bentoml_compile.report import GraphBreak

__all__ = ["Artifact", "Draft", "Lookup", "Refusal", "Store", "Stored"]

Made = TypeVar("Made")

_REFUSAL = "refusal.json"
_ATTEMPTS = 100  # at a directory that others' prunes remove again and again


@dataclass(frozen=True, slots=True)
class Refusal:
    """A boot that ended in GraphBreakError, and the source files it depends on with their hashes."""

    message: str
    breaks: tuple[GraphBreak, ...]
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Stored:
    """What takes room: an artifact, or one that this version cannot read, which is called by its directories' names.

    Attributes:
        size: bytes of its files.
    """

    path: Path
    model: str
    fingerprint: str
    size: int
    last_used: datetime


class Store(Folder):
    """A directory of artifacts that belongs to this user. Nothing is created before the first lease or draft.

    A lookup removes damaged artifacts of its fingerprint, and drafts whose writer is gone.
    """

    words = "the store"

    def draft(self, model: str, fingerprint: Fingerprint) -> Draft:
        """A new directory to compile into.

        Raises:
            ArtifactRejected: the store belongs to someone else, or others can write it.
            OSError: read-only, full.
        """
        return self._in_directory(model, fingerprint, lambda directory: new_draft(directory, model, fingerprint))

    def adopt(self, manifest: Manifest, fetch: Callable[[FileEntry, Path], None]) -> Artifact:
        """A copy of an artifact that was made elsewhere, held; see `Draft.adopt`.

        Raises:
            ArtifactRejected: a file is not what the manifest says; or as `draft`.
            OSError: as `draft`. Whatever `fetch` raises.
        """
        with self.draft(manifest.model, Fingerprint(manifest.axes, manifest.attributes)) as draft:
            return draft.adopt(manifest, fetch)

    def lease(self, model: str, fingerprint: Fingerprint) -> Lease:
        """The right to compile this fingerprint, already held unless another process has it: see `Lease.held`.

        Raises:
            ArtifactRejected: as `draft`.
            OSError: as `draft`; or the store's file system has no locks.
        """

        def take(directory: Path) -> Lease:
            lease = Lease(directory)
            lease.take()
            return lease

        return self._in_directory(model, fingerprint, take)

    def remember_refusal(self, model: str, fingerprint: Fingerprint, refusal: Refusal) -> None:
        """Keep why this fingerprint does not boot, so that the respawned worker need not compile to say it again.

        Raises:
            ArtifactRejected, OSError: as `draft`.
        """
        content = dataclasses.asdict(refusal)
        self._in_directory(model, fingerprint, lambda directory: write_checked(directory / _REFUSAL, content))

    def refusal(self, model: str, fingerprint: Fingerprint) -> Refusal | None:
        """What `remember_refusal` kept; None if there is none, it is damaged or one of its source files changed."""
        directory = self.directory(model, fingerprint.id)
        try:
            if self._permission_problem(directory) is not None:
                return None
            content = read_checked(directory / _REFUSAL)
            breaks = tuple(GraphBreak(**entry) for entry in content["breaks"])
            refusal = Refusal(content["message"], breaks, content["sources"])
        except (ArtifactRejected, OSError, KeyError, TypeError):
            return None
        return None if changed_source(refusal.sources) else refusal

    def prune(
        self, *, older_than: float | None = None, max_bytes: int | None = None, dry_run: bool = False
    ) -> list[Stored]:
        """Remove artifacts that are not in use: by age, then the least recently used until the rest is small enough.

        Drafts and leases whose holder is gone and refusals older than `older_than` go as well.

        Args:
            older_than: seconds since the last use.
            max_bytes: what all artifacts may take together.
            dry_run: remove nothing; the artifacts in use cannot be told then.

        Returns:
            The artifacts that were removed (with `dry_run`: would be), also such as this version cannot read.

        Raises:
            OSError: the store cannot be read.
        """
        kept = self._stored()
        deadline = None if older_than is None else time.time() - older_than
        size = sum(artifact.size for artifact in kept)
        removed = []
        for artifact in sorted(kept, key=lambda artifact: artifact.last_used):
            too_old = deadline is not None and artifact.last_used.timestamp() <= deadline
            too_much = max_bytes is not None and size > max_bytes
            if (too_old or too_much) and (dry_run or remove_unused(artifact.path)):
                removed.append(artifact)
                size -= artifact.size
        if not dry_run:
            self._tidy(deadline)
        return removed

    def _stored(self) -> list[Stored]:
        found = []
        for attempt in (path for directory in self._own_directories() for path in newest_first(directory)):
            with contextlib.suppress(FileNotFoundError):  # no manifest; or removed by another process
                found.append(_stored(attempt))
        return found

    def _own_directories(self) -> Iterator[Path]:
        """Of the fingerprints, where nobody else can say what is removed; each looked at when it is its turn."""
        for directory in self._directories("*"):
            if self._permission_problem(directory) is None:
                yield directory

    def _tidy(self, deadline: float | None) -> None:
        """Remove what is neither an artifact nor in use, then the directories that are empty."""
        for directory in self._own_directories():
            with contextlib.suppress(OSError):
                sweep(directory)
                for attempt in newest_first(directory):
                    if not (attempt / MANIFEST).exists():
                        remove_unused(attempt)
                refused = timestamp(directory / _REFUSAL)
                if refused is not None and deadline is not None and refused.timestamp() <= deadline:
                    (directory / _REFUSAL).unlink()
                if remove_unheld(directory):  # else its holder may be writing
                    remove_temporaries(directory / _REFUSAL)
                directory.rmdir()
            with contextlib.suppress(OSError):
                directory.parent.rmdir()

    def _in_directory(self, model: str, fingerprint: Fingerprint, make: Callable[[Path], Made]) -> Made:
        """`make` in the directory of a fingerprint, which any prune removes as long as it is empty."""
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):
                return make(self._make_directory(model, fingerprint))
        return make(self._make_directory(model, fingerprint))

    def _make_directory(self, model: str, fingerprint: Fingerprint) -> Path:
        directory = self.directory(model, fingerprint.id)
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.root, directory.parent, directory):
            path.mkdir(mode=0o700, exist_ok=True)  # each alone: `parents=True` would follow the umask
        if (problem := self._permission_problem(directory)) is not None:
            raise ArtifactRejected(problem)
        return directory

    def _ready(self, directory: Path) -> str | None:
        if (problem := self._permission_problem(directory)) is None:
            sweep(directory)
        return problem

    def _checked(self, attempt: Path, model: str, fingerprint: Fingerprint) -> Artifact:
        lock = _lock_to_read(attempt)
        try:
            check_permissions(attempt)
            manifest = read_whole(attempt, model, fingerprint)
        except Damaged:
            lock.release()
            remove_unused(attempt)
            raise
        except BaseException:  # what is wrong may be taken back, so it is kept
            lock.release()
            raise
        artifact = Artifact(attempt, manifest, lock)
        artifact.hold()
        return artifact

    def _permission_problem(self, directory: Path) -> str | None:
        for path in (self.root, directory.parent, directory):  # before anything below is looked at
            try:
                status = path.lstat()
            except FileNotFoundError:
                return None
            if stat.S_ISLNK(status.st_mode):
                if path != self.root or status.st_uid != os.geteuid():  # one's own root may be on another disk
                    return f"{path} is a link; name the folder itself, or remove the link"
                status = path.stat()
            if (problem := permission_problem(path, status)) is not None:
                return problem
        return None


def _stored(attempt: Path) -> Stored:
    """Raises FileNotFoundError where there is no manifest."""
    written = (attempt / MANIFEST).lstat().st_mtime
    last_used = timestamp(attempt / USED) or datetime.fromtimestamp(written, timezone.utc)
    try:
        manifest = read_manifest(attempt)
    except (ArtifactRejected, PermissionError):
        return Stored(attempt, attempt.parent.parent.name, attempt.parent.name, disk_usage(attempt), last_used)
    return Stored(attempt, manifest.model, manifest.fingerprint, manifest.size, last_used)


def _lock_to_read(attempt: Path) -> FileLock:
    try:
        lock = try_lock(attempt, exclusive=False)
    except FileNotFoundError:
        remove_unused(attempt)
        raise ArtifactRejected(f"incomplete: it has no {LOCK} file") from None
    if lock is None:
        raise ArtifactRejected("being written by another process")
    if not (attempt / MANIFEST).exists():
        lock.release()
        remove_unused(attempt)
        raise ArtifactRejected("incomplete: its writer is gone")
    return lock
