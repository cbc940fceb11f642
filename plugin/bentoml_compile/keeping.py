"""The artifacts of one boot: what is found, where code is written, and what is kept for the next boot."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bentoml_compile.artifacts.fingerprint import Fingerprint
from bentoml_compile.artifacts.hashing import hash_sources
from bentoml_compile.artifacts.store import Artifact, Draft, Refusal, Store
from bentoml_compile.engines.build import Record
from bentoml_compile.report import GraphBreak, Rejection

logger = logging.getLogger("bentoml_compile")


@dataclass(eq=False)
class Keeping:
    """One model's share of a store, during a boot; `store` is None where nothing is to be kept or found."""

    name: str
    fingerprint: Fingerprint
    store: Store | None
    write: bool
    rejected: list[Rejection] = field(default_factory=list)
    artifact: Artifact | None = None
    _draft: Draft | None = None

    def look_up(self) -> Artifact | None:
        """The artifact that fits, if any; why others were passed over is in `rejected` and the log."""
        if self.store is None:
            return None
        lookup = self.store.lookup(self.name, self.fingerprint)
        self.rejected += lookup.rejected
        for rejection in lookup.rejected:
            logger.info("model %r: artifact %s passed over: %s", self.name, rejection.artifact, rejection.reason)
        return lookup.artifact

    def refusal(self) -> Refusal | None:
        """The GraphBreakError of an earlier boot of the same model."""
        return self.store.refusal(self.name, self.fingerprint) if self.store is not None else None

    def remember_refusal(self, message: str, breaks: tuple[GraphBreak, ...], sources: set[str]) -> None:
        """So that the worker that BentoML starts again fails at once, with the same words."""
        if self.store is None or not self.write:
            return
        try:
            known = hash_sources({*sources, *(item.file for item in breaks if item.file)})
            self.store.remember_refusal(self.name, self.fingerprint, Refusal(message, breaks, known))
        except Exception as error:
            logger.warning("model %r: the graph breaks could not be remembered: %s", self.name, error)

    def reject(self, artifact: Artifact, reason: str) -> None:
        """An artifact that was found does not load."""
        logger.warning("model %r: artifact %s %s", self.name, artifact.path.name, reason)
        self.rejected.append(Rejection(artifact.path.name, reason))
        artifact.release()

    def open_draft(self, *, path_with_space: bool) -> None:
        """From here on, code is written where the next boot can find it.

        Raises:
            ValueError: the store's path has a space, and the engine cannot write there.
            OSError, ArtifactRejected: the store cannot be written.
        """
        if self.store is None or not self.write:
            return
        if not path_with_space and any(character.isspace() for character in str(self.store.root)):
            raise ValueError(
                f"the store's path {str(self.store.root)!r} has a space, with which torch.compile's compiler commands "
                "do not work; set torch_compile.artifacts.store or BENTOML_HOME to one without"
            )
        self._draft = self.store.draft(self.name, self.fingerprint)

    def directory_for_code(self) -> contextlib.AbstractContextManager[Path]:
        """The draft's, else a private one."""
        return contextlib.nullcontext(self._draft.cache) if self._draft is not None else private_directory()

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
            self.artifact = self._draft.seal(decisions, hash_sources(record.sources), engine)
            self._draft = None
        elif self.artifact is not None:
            self.artifact.reseal(decisions)

    def is_behind(self, decisions: dict[str, Any]) -> bool:
        """Whether there is something to seal: a draft, or an artifact that knows less than this boot."""
        if self._draft is not None:
            return True
        if self.artifact is None:
            return False
        # an opened library writes nothing; Inductor may, whenever it loads
        return self.artifact.decisions != decisions or (self.artifact.engine == "jit" and self.artifact.grown())


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """For code that is not kept; once it is loaded it needs its files no longer.

    Never Inductor's own directory: that lies at a name that anybody can foresee, and what is in it would not be new.
    """
    with tempfile.TemporaryDirectory(prefix="torch_compile_", ignore_cleanup_errors=True) as directory:
        yield Path(directory)
