"""The artifacts of one boot: what is found, where code is written, and what is kept for the next boot."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bentoml_compile.artifacts.bundle import Bundle
from bentoml_compile.artifacts.fingerprint import Fingerprint
from bentoml_compile.artifacts.hashing import hash_sources
from bentoml_compile.artifacts.lease import Lease
from bentoml_compile.artifacts.lock import try_lock_directory
from bentoml_compile.artifacts.store import Artifact, Draft, Lookup, Refusal, Store
from bentoml_compile.engines.build import Record
from bentoml_compile.report import GraphBreak, Rejection

logger = logging.getLogger("bentoml_compile")

_PRIVATE = "bentoml-compile-private-"
_IS_PRIVATE = re.compile(rf"{_PRIVATE}[a-z0-9_]{{8}}")  # as tempfile names them


@dataclass(eq=False)
class Keeping:
    """One model's artifacts on this machine, during a boot.

    Attributes:
        store: None where nothing is to be kept or found.
        bundle: what came with the Bento, which is asked first.
        found_in: where the last artifact was found: "bento", "store" or "remote".
    """

    name: str
    fingerprint: Fingerprint
    store: Store | None
    write: bool
    max_bytes: int | None = None
    bundle: Bundle | None = None
    rejected: list[Rejection] = field(default_factory=list)
    artifact: Artifact | None = None
    lease: Lease | None = None
    found_in: str = ""
    _draft: Draft | None = None
    _unfit: set[str] = field(default_factory=set)  # places that are not asked again: nothing of theirs loads

    def look_up(self) -> Artifact | None:
        """The artifact that fits, if any; why others were passed over is in `rejected` and the log."""
        if self.bundle is not None:
            if (found := self.asked("bento", self.bundle.lookup)) is not None:
                return found
            self._unfit.add("bento")  # it stays as it is: asked once
        return self.asked("store", self.store.lookup) if self.store is not None else None

    def asked(self, place: str, lookup: Callable[[str, Fingerprint], Lookup]) -> Artifact | None:
        """The place's artifact that fits, unless an earlier one from there did not load."""
        if place in self._unfit:
            return None
        found = lookup(self.name, self.fingerprint)
        new = [rejection for rejection in found.rejected if rejection not in self.rejected]
        self.rejected += new
        for rejection in new:
            logger.info("model %r: artifact %s passed over: %s", self.name, rejection.artifact, rejection.reason)
        if found.artifact is not None:
            self.found_in = place
        return found.artifact

    def take_lease(self) -> bool:
        """Asks for the right to compile; whether this boot has it now.

        If not, either another worker has it and is to be waited for (see `lease`), or there is none to have (`lease` is
        None: the store is not to be written, or cannot be written or locked) and this boot compiles all the same.
        """
        if self.store is None or not self.write:
            return False
        if self.lease is not None and self.lease.held:
            return True
        try:
            self.lease = self.store.lease(self.name, self.fingerprint)
        except Exception as error:  # the draft will fail for the same reason, and say so
            logger.debug("model %r: compiles without a lease: %s", self.name, error)
            return False
        return self.lease.held

    def release_lease(self) -> None:
        """Nobody need wait for this boot: the artifact is there, or there will be none."""
        if self.lease is not None:
            self.lease.release()

    def refusal(self) -> Refusal | None:
        """The GraphBreakError of an earlier boot of the same model."""
        return self.store.refusal(self.name, self.fingerprint) if self.store is not None else None

    def remember_refusal(self, message: str, breaks: tuple[GraphBreak, ...], sources: Mapping[str, str]) -> None:
        """So that the worker that BentoML starts again fails at once, with the same words."""
        if self.store is None or not self.write:
            return
        try:
            known = {**hash_sources(item.file for item in breaks if item.file), **sources}
            self.store.remember_refusal(self.name, self.fingerprint, Refusal(message, breaks, known))
        except Exception as error:
            logger.warning("model %r: the graph breaks could not be remembered: %s", self.name, error)

    def reject(self, artifact: Artifact, reason: str) -> None:
        """An artifact that was found does not load."""
        logger.warning("model %r: artifact %s %s", self.name, artifact.path.name, reason)
        self.rejected.append(Rejection(artifact.path.name, reason))
        self._unfit.add(self.found_in)
        self.found_in = ""
        artifact.release()

    def open_draft(self, *, path_with_space: bool) -> None:
        """From here on, code is written where the next boot can find it.

        Raises:
            ValueError: the store's path has a space, and the engine cannot write there.
            OSError, ArtifactRejected: the store cannot be written.
        """
        if self.store is None or not self.write:
            return
        try:
            self._draft = self._new_draft(self.store, path_with_space)
        except Exception:
            self.release_lease()
            raise

    def _new_draft(self, store: Store, path_with_space: bool) -> Draft:
        if not path_with_space and not _has_no_space(store.root):
            raise ValueError(
                f"the store's path {str(store.root)!r} has a space, with which torch.compile's compiler commands "
                "do not work; set torch_compile.artifacts.store or BENTOML_HOME to one without"
            )
        return store.draft(self.name, self.fingerprint)

    @property
    def has_draft(self) -> bool:
        return self._draft is not None

    def directory_for_code(self, *, path_with_space: bool = True) -> contextlib.AbstractContextManager[Path]:
        """The draft's; a private one where there is none, or where its path has a space and must not have one."""
        if self._draft is None or not (path_with_space or _has_no_space(self._draft.cache)):
            return private_directory()
        return contextlib.nullcontext(self._draft.cache)

    def discard_draft(self) -> None:
        if self._draft is not None:
            with contextlib.suppress(OSError):
                self._draft.discard()
            self._draft = None

    def seal(self, decisions: dict[str, Any], record: Record, engine: str) -> None:
        """Completes the draft, or brings a loaded artifact up to date.

        Raises:
            OSError, ArtifactRejected: the store cannot be written.
        """
        if self._draft is not None:
            self.artifact = self._draft.seal(decisions, record.sources, engine)
            self._draft = None
            self.make_room()
        elif self.artifact is not None:
            self.artifact.reseal(decisions)

    def make_room(self) -> None:
        """Removes what `max_bytes` has no room for and nobody uses; this boot's own artifact is in use."""
        if self.store is None or self.max_bytes is None:
            return
        try:
            removed = self.store.prune(max_bytes=self.max_bytes)
        except OSError as error:
            logger.warning("model %r: max_bytes is not kept: %s", self.name, error)
            return
        for artifact in removed:
            logger.info("artifact %s removed: the store has no room for it (max_bytes)", artifact.path)

    def is_behind(self, decisions: dict[str, Any]) -> bool:
        """Whether there is something to seal: a draft, or an artifact that knows less than this boot."""
        if self._draft is not None:
            return True
        if self.artifact is None:
            return False
        # an opened library writes nothing; Inductor may, whenever it loads
        return self.artifact.decisions != decisions or (self.artifact.engine == "jit" and self.artifact.grown())


def _has_no_space(path: Path) -> bool:
    return not any(character.isspace() for character in str(path))


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """For code that is not kept; once it is loaded it needs its files no longer.

    Never Inductor's own directory: that lies at a name that anybody can foresee, and what is in it would not be new.
    """
    _remove_left_behind(Path(tempfile.gettempdir()))
    with contextlib.ExitStack() as until_used:
        lock = None
        while lock is None:  # once, unless another process takes it for one that was left behind
            directory = tempfile.TemporaryDirectory(prefix=_PRIVATE, ignore_cleanup_errors=True)
            path = Path(until_used.enter_context(directory))
            try:
                lock = try_lock_directory(path, exclusive=False)
            except FileNotFoundError:
                continue
            except OSError:  # a file system without locks, where nothing is taken away either
                break
        if lock is not None:
            until_used.callback(lock.release)
        yield path


def _remove_left_behind(parent: Path) -> None:
    """The private directories of processes that were killed; nobody has a lock on them."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if _IS_PRIVATE.fullmatch(name):  # all of it: what is not ours may begin like it
                with contextlib.suppress(OSError):
                    _remove_unless_locked(parent / name)


def _remove_unless_locked(path: Path) -> None:
    lock = try_lock_directory(path, exclusive=True) if path.lstat().st_uid == os.geteuid() else None
    if lock is not None:
        try:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            lock.release()
