"""The artifacts of this machine: `<root>/<model>/<fingerprint>/<attempt>/`.

Every compile writes into an attempt directory of its own, because what Inductor writes works only where it was
written, and because several processes may compile the same thing at once. An attempt counts when its manifest is
there, which is written last. Its lock file tells the living from the dead: whoever writes or uses it holds the lock.

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
import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bentoml_compile.artifacts.artifact import TRASH, Artifact, Draft, new_draft, remove_unused, sweep
from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.hashing import hash_sources
from bentoml_compile.artifacts.lock import LOCK, DirectoryLock, try_lock
from bentoml_compile.artifacts.manifest import (
    MANIFEST,
    Damaged,
    Manifest,
    check_files,
    check_permissions,
    permission_problem,
    read_checked,
    read_manifest,
    timestamp,
    write_checked,
)
from bentoml_compile.errors import ArtifactRejected
from bentoml_compile.report import GraphBreak, Rejection

__all__ = ["Artifact", "Draft", "Lookup", "Refusal", "Store"]

_REFUSAL = "refusal.json"
_NEAR_MISSES = 3  # artifacts of other fingerprints that a miss explains


@dataclass(frozen=True, slots=True)
class Lookup:
    """The artifact that fits, held, and why each other one was passed over."""

    artifact: Artifact | None
    rejected: tuple[Rejection, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A boot that ended in GraphBreakError, and the source files it depends on with their hashes."""

    message: str
    breaks: tuple[GraphBreak, ...]
    sources: Mapping[str, str]


class Store:
    """A directory of artifacts that belongs to this user. Nothing is created before the first draft."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root).expanduser().absolute()

    def lookup(self, model: str, fingerprint: Fingerprint) -> Lookup:
        """Find an artifact that fits in every respect, and check all of it.

        Damaged artifacts of this fingerprint and drafts whose writer is gone are removed.

        Returns:
            The artifact with its lock held: `release` it if it is not used after all. Whatever goes wrong is a
            rejection with its reason, never an exception.
        """
        rejected: list[Rejection] = []
        try:
            directory = self._directory(model, fingerprint.id)
            if (problem := self._permission_problem(directory)) is not None:
                return Lookup(None, (Rejection(str(self.root), problem),))
            for attempt in _newest_first(directory):
                try:
                    return Lookup(_checked(attempt, model, fingerprint), tuple(rejected))
                except (ArtifactRejected, OSError) as error:
                    rejected.append(Rejection(self._label(attempt), str(error)))
            rejected += self._near_misses(model, fingerprint)
        except OSError as error:
            rejected.append(Rejection(str(self.root), f"the store cannot be read: {error}"))
        return Lookup(None, tuple(rejected))

    def draft(self, model: str, fingerprint: Fingerprint) -> Draft:
        """A new directory to compile into.

        Raises:
            ArtifactRejected: the store belongs to someone else, or others can write it.
            OSError: read-only, full.
        """
        try:
            return new_draft(self._make_directory(model, fingerprint), model, fingerprint)
        except FileNotFoundError:  # a prune removed the empty directory in between
            return new_draft(self._make_directory(model, fingerprint), model, fingerprint)

    def remember_refusal(self, model: str, fingerprint: Fingerprint, refusal: Refusal) -> None:
        """Keep why this fingerprint does not boot, so that the respawned worker need not compile to say it again.

        Raises:
            ArtifactRejected, OSError: as `draft`.
        """
        directory = self._make_directory(model, fingerprint)
        write_checked(directory / _REFUSAL, dataclasses.asdict(refusal))

    def refusal(self, model: str, fingerprint: Fingerprint) -> Refusal | None:
        """What `remember_refusal` kept; None if there is none, it is damaged or one of its source files changed."""
        directory = self._directory(model, fingerprint.id)
        try:
            if self._permission_problem(directory) is not None:
                return None
            content = read_checked(directory / _REFUSAL)
            breaks = tuple(GraphBreak(**entry) for entry in content["breaks"])
            refusal = Refusal(content["message"], breaks, content["sources"])
        except (ArtifactRejected, OSError, KeyError, TypeError):
            return None
        return None if _changed_source(refusal.sources) else refusal

    def artifacts(self) -> list[Artifact]:
        """All complete artifacts, the last used first. Their content is not checked."""
        return sorted(self._complete("*"), key=lambda artifact: artifact.last_used, reverse=True)

    def prune(
        self, *, older_than: float | None = None, max_bytes: int | None = None, dry_run: bool = False
    ) -> list[Artifact]:
        """Remove artifacts that are not in use: by age, then the least recently used until the rest is small enough.

        Drafts whose writer is gone and refusals older than `older_than` go as well.

        Args:
            older_than: seconds since the last use.
            max_bytes: what all artifacts may take together.
            dry_run: remove nothing; the artifacts in use cannot be told then.

        Returns:
            The artifacts that were removed (with `dry_run`: would be).
        """
        kept = self.artifacts()
        deadline = None if older_than is None else time.time() - older_than
        size = sum(artifact.size for artifact in kept)
        removed = []
        for artifact in reversed(kept):
            too_old = deadline is not None and artifact.last_used.timestamp() <= deadline
            too_much = max_bytes is not None and size > max_bytes
            if (too_old or too_much) and (dry_run or remove_unused(artifact.path)):
                removed.append(artifact)
                size -= artifact.size
        if not dry_run:
            self._tidy(deadline)
        return removed

    def _tidy(self, deadline: float | None) -> None:
        """Remove what is neither an artifact nor in use, then the directories that are empty."""
        for directory in self._directories("*"):
            with contextlib.suppress(OSError):
                sweep(directory)
                for attempt in _newest_first(directory):
                    if not (attempt / MANIFEST).exists():
                        remove_unused(attempt)
                refused = timestamp(directory / _REFUSAL)
                if refused is not None and deadline is not None and refused.timestamp() <= deadline:
                    (directory / _REFUSAL).unlink()
                directory.rmdir()
            with contextlib.suppress(OSError):
                directory.parent.rmdir()

    def _near_misses(self, model: str, fingerprint: Fingerprint) -> list[Rejection]:
        others = sorted(self._complete(_slug(model)), key=lambda artifact: artifact.created, reverse=True)
        others = [artifact for artifact in others if artifact.fingerprint != fingerprint.id]
        return [
            Rejection(
                self._label(artifact.path),
                "; ".join(fingerprint.differences(artifact.axes, artifact.manifest.attributes)),
            )
            for artifact in others[:_NEAR_MISSES]
        ]

    def _complete(self, slug: str) -> Iterator[Artifact]:
        for directory in self._directories(slug):
            for attempt in _newest_first(directory):
                with contextlib.suppress(ArtifactRejected, OSError):
                    yield Artifact(attempt, read_manifest(attempt))

    def _directories(self, slug: str) -> list[Path]:
        return [path for path in sorted(self.root.glob(f"{slug}/*")) if path.is_dir() and not path.is_symlink()]

    def _directory(self, model: str, fingerprint: str) -> Path:
        return self.root / _slug(model) / fingerprint

    def _make_directory(self, model: str, fingerprint: Fingerprint) -> Path:
        directory = self._directory(model, fingerprint.id)
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.root, directory.parent, directory):
            path.mkdir(mode=0o700, exist_ok=True)  # each alone: `parents=True` would follow the umask
        if (problem := self._permission_problem(directory)) is not None:
            raise ArtifactRejected(problem)
        return directory

    def _label(self, attempt: Path) -> str:
        return str(attempt.relative_to(self.root))

    def _permission_problem(self, directory: Path) -> str | None:
        for path in (self.root, directory.parent, directory):
            try:
                status = path.stat()
            except FileNotFoundError:
                return None
            if (problem := permission_problem(path, status)) is not None:
                return problem
        return None


def _checked(attempt: Path, model: str, fingerprint: Fingerprint) -> Artifact:
    """The artifact in `attempt`, all of it compared with its manifest, and held."""
    lock = _lock_to_read(attempt)
    try:
        check_permissions(attempt)
        manifest = _read_whole(attempt, model, fingerprint)
        if (path := _changed_source(manifest.sources)) is not None:
            raise ArtifactRejected(f"source changed: {path}")
    except Damaged:
        lock.release()
        remove_unused(attempt)
        raise
    except (ArtifactRejected, OSError):  # what is wrong may be taken back, so it is kept
        lock.release()
        raise
    artifact = Artifact(attempt, manifest, lock)
    artifact.hold()
    return artifact


def _read_whole(attempt: Path, model: str, fingerprint: Fingerprint) -> Manifest:
    manifest = read_manifest(attempt)
    if (manifest.model, manifest.fingerprint) != (model, fingerprint.id):
        raise Damaged(f"made for {manifest.model!r} {manifest.fingerprint}, and moved here")
    check_files(attempt, manifest.files)
    return manifest


def _lock_to_read(attempt: Path) -> DirectoryLock:
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


def _changed_source(sources: Mapping[str, str]) -> str | None:
    now = hash_sources(sources)
    return next((source for source, known in sources.items() if now.get(source, known) != known), None)


def _newest_first(directory: Path) -> list[Path]:
    """The attempt directories."""
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink() and not path.name.startswith(TRASH):
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def _slug(model: str) -> str:
    """A directory name for any model name; different names never share one."""
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", model).strip("-")[:60]
    return slug if slug == model else f"{slug or 'model'}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"
