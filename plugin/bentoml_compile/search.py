"""What a boot finds before it compiles: its artifact, in the Bento, in this machine's store or at the remote; or
another worker, here or elsewhere, that is making it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bentoml_compile.artifacts.bundle import Bundle
from bentoml_compile.artifacts.fingerprint import Fingerprint, fingerprint
from bentoml_compile.artifacts.lease import Ended, Lease
from bentoml_compile.artifacts.places import Places
from bentoml_compile.artifacts.signing import has_private_key
from bentoml_compile.artifacts.store import Artifact, Store
from bentoml_compile.engines.failures import Failure
from bentoml_compile.errors import GraphBreakError
from bentoml_compile.fallbacks import Fallbacks
from bentoml_compile.keeping import Keeping
from bentoml_compile.listener import Stage, Timeline
from bentoml_compile.prepared import Target

if TYPE_CHECKING:
    from bentoml_compile.sharing import Sharing

logger = logging.getLogger("bentoml_compile")

_NOTHING_FROM_HOLDER: dict[Ended, tuple[str, str]] = {  # a wait's outcome, and the words for it
    "done": ("holder_gave_up", "left no artifact"),
    "died": ("holder_died", "died before its artifact was complete"),
    "timed_out": ("timed_out", "took longer than time_limit"),
}


def fingerprint_of(target: Target) -> Fingerprint:
    """What the target's artifact must match."""
    shapes = [shape.identity for shape in target.shapes]
    return fingerprint(target.model, method=target.method, config=target.config, shapes=shapes)


@dataclass(eq=False)
class Search:
    """Of one boot. `kept` is its share of the store once it has looked; `while_leased` is open until it needs no lease.

    Attributes:
        is_late: for a shape that a call has asked for, beside the model's own artifact.
    """

    target: Target
    timeline: Timeline
    fallbacks: Fallbacks
    places: Places
    is_late: bool = False
    kept: Keeping | None = None
    _shared: Sharing | None = None
    _has_opened_remote: bool = False
    while_leased: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def look_up(self) -> Artifact | None:
        """The stored artifact that fits. If there is none, this boot has the lease or another worker does.

        Raises:
            GraphBreakError: an earlier boot of the same model was stopped by it.
        """
        return self._looking(self._look_up)

    def wait(self) -> Artifact | None:
        """The artifact of the worker that compiles this model, if any does; None if it is this worker's turn to."""
        lease = self._held_by_another()
        if lease is not None:
            found = self._wait_for(lease)
            if found is not None or not lease.held:
                return found
        return None if self.target.config.artifacts.refresh else self._wait_for_others()

    def release_shared(self) -> None:
        """Other machines need not wait for this boot: what it makes, if anything, does not travel."""
        if self._shared is not None:
            self._shared.end_turn()

    def publish(self) -> None:
        """This boot's artifact goes to the other machines, if it is one that travels and this one signs."""
        kept = self.kept
        if kept is None or kept.artifact is None or kept.artifact.engine != "aot" or kept.found_in == "remote":
            return
        if not self._has_remote:
            return
        if not has_private_key():
            logger.info("model %r: nothing is uploaded: this process has no signing key", self.target.name)
        elif (shared := self._sharing()) is not None:
            shared.publish(kept.artifact)

    def _looking(self, look: Callable[[Stage], Artifact | None]) -> Artifact | None:
        with self.timeline.stage("lookup", outcome="disabled") as stage:
            try:
                return look(stage)
            except GraphBreakError:
                raise
            except Exception as error:
                self.fallbacks.none(Failure("lookup_failed", f"{type(error).__name__}: {error}"), error)
                return None

    def _look_up(self, stage: Stage) -> Artifact | None:
        kept = self.kept = self.kept or self._open()
        if kept.store is None and kept.bundle is None and not self._has_remote:
            return None
        stage.attributes["outcome"] = "miss"
        if self.target.config.artifacts.refresh:
            return None
        found = self._look_into(kept, stage)
        if found is not None or not (self._can_compile() or self._has_remote):
            return found
        if kept.take_lease():
            assert kept.lease is not None
            self.while_leased.enter_context(kept.lease)
            found = self._look_into(kept, stage)  # another may have ended between the look-up and the lease
        if found is None and self._held_by_another() is None:
            found = self._look_beyond(kept, stage)
        return found

    def _open(self) -> Keeping:
        target, artifacts = self.target, self.target.config.artifacts
        root = artifacts.store or self.places.store
        store = Store(root) if root is not None else None
        bundle = Bundle(self.places.bundle) if self.places.bundle is not None else None
        return Keeping(target.name, fingerprint_of(target), store, artifacts.write, artifacts.max_bytes, bundle)

    @property
    def _has_remote(self) -> bool:
        return self.target.config.artifacts.remote is not None and self.target.config.may_export

    def _sharing(self) -> Sharing | None:
        """Opened when it is asked for first, since that takes a second: what is found here does without."""
        if self._has_remote and not self._has_opened_remote:
            self._has_opened_remote = True
            self._shared = self._open_remote()
        return self._shared

    def _open_remote(self) -> Sharing | None:
        assert self.kept is not None
        try:
            from bentoml_compile.sharing import sharing_of

            artifacts, listeners = self.target.config.artifacts, self.timeline.listeners
            shared = sharing_of(self.target.name, self.kept.fingerprint, artifacts, listeners)
        except Exception as error:
            self.fallbacks.none(Failure("remote_failed", f"artifacts.remote is not used: {error}"), error)
            return None
        if shared.key_problem:
            self.fallbacks.none(Failure("upload_failed", f"nothing is uploaded: {shared.key_problem}"), None)
        return shared

    def _look_beyond(self, kept: Keeping, stage: Stage) -> Artifact | None:
        """At the remote; its artifact is then this machine's own, too."""
        shared = self._sharing()
        if shared is None or shared.remote.gave_up:
            return None
        own = kept.store if kept.lease is not None else None  # without a lease the store cannot be written
        found = kept.asked("remote", lambda model, fingerprint: shared.look_up(own))
        if shared.remote.gave_up:
            reason = kept.rejected[-1].reason if kept.rejected else "no answer"
            self.fallbacks.none(Failure("remote_failed", f"artifacts.remote is not used: {reason}"), None)
        if found is not None:
            stage.attributes["outcome"] = "hit"
            stage.attributes["place"] = "remote"
            kept.release_lease()
            kept.make_room()
        return found

    def _look_again(self, kept: Keeping) -> Artifact | None:
        """At the remote, where another machine may have ended between the look-up and this machine's turn."""
        if self._shared is None or self._shared.remote.gave_up:
            return None

        def look(stage: Stage) -> Artifact | None:
            stage.attributes["outcome"] = "miss"
            return self._look_beyond(kept, stage)

        return self._looking(look)

    def _look_into(self, kept: Keeping, stage: Stage) -> Artifact | None:
        refusal = kept.refusal() if self.target.config.fullgraph == "require" else None
        if refusal is not None:
            stage.attributes["outcome"] = "hit"
            raise GraphBreakError(refusal.message, refusal.breaks)
        artifact = kept.look_up()
        others = kept.rejected and not self.is_late  # which has artifacts for other shapes beside its own
        stage.attributes["outcome"] = "hit" if artifact else "rejected" if others else "miss"
        if artifact is not None:
            stage.attributes["place"] = kept.found_in
            kept.release_lease()
        return artifact

    def _can_compile(self) -> bool:
        """Without a compiler every worker fails on its own: nobody need wait for that."""
        return self.target.config.backend != "inductor" or shutil.which(os.environ.get("CXX", "g++")) is not None

    def _held_by_another(self) -> Lease | None:
        lease = self.kept.lease if self.kept is not None else None
        return lease if lease is not None and not lease.held else None

    def _wait_for(self, lease: Lease) -> Artifact | None:
        """The artifact of the worker that compiles this model, or None if it is this worker's turn to compile."""
        kept, name, limit = self.kept, self.target.name, self.target.config.time_limit
        assert kept is not None
        with self.timeline.stage("wait") as stage:
            logger.info("model %r: process %s compiles it; waiting for that, at most %g s", name, lease.holder, limit)
            ended = lease.wait(
                limit,
                lambda seconds: logger.info("model %r: waiting for process %s for %.0f s", name, lease.holder, seconds),
            )
            stage.attributes["outcome"], words = _NOTHING_FROM_HOLDER[ended]
            if lease.holder is not None:
                stage.attributes["holder"] = lease.holder
            if lease.held:
                self.while_leased.enter_context(lease)
            found = None if ended == "timed_out" else self._looking(lambda lookup: self._look_into(kept, lookup))
            if found is not None:
                stage.attributes["outcome"] = "loaded"
            else:
                logger.warning("model %r: process %s %s; compiling here", name, lease.holder, words)
        return found

    # other machines

    def _wait_for_others(self) -> Artifact | None:
        """The artifact of the machine that compiles this model, or None if it is this machine's turn to compile."""
        kept, shared, name, limit = self.kept, self._sharing(), self.target.name, self.target.config.time_limit
        if kept is None or shared is None:
            return None
        self.while_leased.push(lambda kind, error, trace: shared.end_turn(error))
        if shared.take_turn(can_compile=self._can_compile()):
            return self._look_again(kept)
        found: list[Artifact] = []

        with self.timeline.stage("wait") as stage:

            def look() -> bool:
                artifact = self._look_beyond(kept, stage)
                found.extend([artifact] if artifact is not None else [])
                return artifact is not None

            logger.info("model %r: another machine compiles it; waiting for that, at most %g s", name, limit)
            ended = shared.wait(limit, look, functools.partial(logger.info, "waiting for another machine for %.0f s"))
            stage.attributes["outcome"], words = _NOTHING_FROM_HOLDER[ended]
            if not found and ended == "done":
                found.extend(filter(None, [self._look_again(kept)]))  # one answer that failed is no reason to compile
            if found:
                stage.attributes["outcome"] = "loaded"
            else:
                logger.warning("model %r: another machine %s; compiling here", name, words)
        return found[0] if found else None
