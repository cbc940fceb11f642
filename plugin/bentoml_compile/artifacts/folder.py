"""Artifacts in a folder: `<root>/<model>/<fingerprint>/<attempt>/`, as a store (store.py) and a Bento (bundle.py) hold
them. What is here reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from bentoml_compile.artifacts.artifact import TRASH, Artifact
from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.hashing import hash_sources
from bentoml_compile.artifacts.manifest import Damaged, Manifest, check_files, read_manifest
from bentoml_compile.errors import ArtifactRejected
from bentoml_compile.report import Rejection

_NEAR_MISSES = 3  # artifacts of other fingerprints that a miss explains
_FINGERPRINT = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Lookup:
    """The artifact that fits, held, and why each other one was passed over.

    Attributes:
        no_room: it fits, but the store that it was to be copied into is full.
    """

    artifact: Artifact | None
    rejected: tuple[Rejection, ...] = ()
    no_room: bool = False


class Folder(ABC):
    """Artifacts below `root`, which need not be there.

    Attributes:
        words: what it is called in messages.
    """

    words: ClassVar[str]

    def __init__(self, root: Path) -> None:
        self.root = Path(root).expanduser().absolute()

    def artifacts(self) -> list[Artifact]:
        """All complete artifacts, the last used first. Their content is not checked."""
        return sorted(self._complete("*"), key=lambda artifact: artifact.last_used, reverse=True)

    def lookup(self, model: str, fingerprint: Fingerprint) -> Lookup:
        """Find an artifact that fits in every respect, and check all of it.

        Returns:
            The artifact, held: `release` it if it is not used after all. Whatever goes wrong is a rejection with its
            reason, never an exception.
        """
        rejected: list[Rejection] = []
        try:
            directory = self.directory(model, fingerprint.id)
            if (problem := self._ready(directory)) is not None:
                return Lookup(None, (Rejection(str(self.root), problem),))
            for attempt in newest_first(directory):
                try:
                    return Lookup(self._checked(attempt, model, fingerprint), tuple(rejected))
                except Exception as error:  # of any kind: a manifest can name sources of any name
                    rejected.append(Rejection(self.label(attempt), str(error)))
            rejected += self.near_misses(model, fingerprint)
        except OSError as error:
            rejected.append(Rejection(str(self.root), f"{self.words} cannot be read: {error}"))
        return Lookup(None, tuple(rejected))

    def _ready(self, directory: Path) -> str | None:
        """Why nothing below the directory may be looked at; called before anything is."""
        return None

    @abstractmethod
    def _checked(self, attempt: Path, model: str, fingerprint: Fingerprint) -> Artifact:
        """The artifact that lies there, all of it compared with its manifest, and held.

        Raises:
            ArtifactRejected, OSError: why it is passed over.
        """

    def near_misses(self, model: str, fingerprint: Fingerprint) -> list[Rejection]:
        """The newest artifacts of the model with other fingerprints, and in which axes these differ.

        Raises:
            OSError: the folder cannot be read.
        """
        others = sorted(self._complete(slug(model)), key=lambda artifact: artifact.created, reverse=True)
        others = [artifact for artifact in others if artifact.fingerprint != fingerprint.id]
        return [
            Rejection(
                self.label(artifact.path),
                "; ".join(fingerprint.differences(artifact.axes, artifact.manifest.attributes)),
            )
            for artifact in others[:_NEAR_MISSES]
        ]

    def directory(self, model: str, fingerprint: str) -> Path:
        """Where the attempts at one fingerprint lie."""
        return self.root / slug(model) / fingerprint

    def label(self, attempt: Path) -> str:
        return str(attempt.relative_to(self.root))

    def _complete(self, slug: str) -> Iterator[Artifact]:
        for directory in self._directories(slug):
            for attempt in newest_first(directory):
                with contextlib.suppress(ArtifactRejected, OSError):
                    yield Artifact(attempt, read_manifest(attempt))

    def _directories(self, slug: str) -> list[Path]:
        """Of the fingerprints. Nothing else is looked into: a root by mistake may be any directory."""
        models = _subdirectories(self.root) if slug == "*" else [self.root / slug]
        found = [path for model in models for path in _subdirectories(model)]
        return sorted(path for path in found if _FINGERPRINT.fullmatch(path.name))


def read_whole(attempt: Path, model: str, fingerprint: Fingerprint) -> Manifest:
    """The manifest of an attempt, every file compared with it, for code that is unchanged since.

    Raises:
        ArtifactRejected, Damaged: the reason.
        OSError: something cannot be read.
    """
    manifest = read_manifest(attempt)
    if (manifest.model, manifest.fingerprint) != (model, fingerprint.id):
        raise Damaged(f"made for {manifest.model!r} {manifest.fingerprint}, and moved here")
    check_files(attempt, manifest.files)
    refuse_changed_sources(manifest.sources)
    return manifest


def refuse_changed_sources(sources: Mapping[str, str]) -> None:
    """Raises ArtifactRejected where a source is not what it was."""
    if (source := changed_source(sources)) is not None:
        raise ArtifactRejected(f"source changed: {source}")


def changed_source(sources: Mapping[str, str]) -> str | None:
    """The first source that is not what it was."""
    now = hash_sources(sources)
    return next((source for source, known in sources.items() if now.get(source, known) != known), None)


def newest_first(directory: Path) -> list[Path]:
    """The attempt directories; none where the directory is gone.

    Raises:
        OSError: it cannot be read.
    """
    found = []
    for path in _subdirectories(directory):
        with contextlib.suppress(OSError):
            if not path.name.startswith(TRASH):
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def _subdirectories(directory: Path) -> list[Path]:
    """Links left out. What is removed meanwhile by another process is not there."""
    try:
        with os.scandir(directory) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def slug(model: str) -> str:
    """A directory name for any model name; different names never share one."""
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", model).strip("-")[:60]
    return slug if slug == model else f"{slug or 'model'}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"
