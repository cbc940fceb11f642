"""One model's artifact at the place that machines share: looked for, waited for, and put there, during a boot."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from bentoml_compile.artifacts.artifact import Artifact
from bentoml_compile.artifacts.fingerprint import Fingerprint
from bentoml_compile.artifacts.lease import Ended, is_cut_short
from bentoml_compile.artifacts.remote import Remote, uploads
from bentoml_compile.artifacts.remote_lease import RemoteLease
from bentoml_compile.artifacts.signing import PrivateKey, PublicKey
from bentoml_compile.artifacts.store import Lookup, Store
from bentoml_compile.config import ArtifactsConfig
from bentoml_compile.errors import ConfigError
from bentoml_compile.keeping import private_directory
from bentoml_compile.listener import Listeners

logger = logging.getLogger("bentoml_compile")


@dataclass(eq=False)
class Sharing:
    """Made by `sharing_of`.

    Attributes:
        can_publish: this process signs and uploads what it compiles.
        key_problem: why it does not, though it has a key.
    """

    name: str
    fingerprint: Fingerprint
    remote: Remote
    can_publish: bool
    listeners: Listeners
    key_problem: str = ""
    lease: RemoteLease | None = None
    _publishes: bool = False

    def look_up(self, store: Store | None) -> Lookup:
        """The shared artifact that fits, copied into the store, or into a private one where there is none to write."""
        found = self.remote.lookup(self.name, self.fingerprint, store or private_store())
        if found.no_room and store is not None:
            return self.remote.lookup(self.name, self.fingerprint, private_store())
        return found

    def take_turn(self, *, can_compile: bool) -> bool:
        """Whether this boot is to go on alone: no other machine compiles, as far as is known, or nothing is known."""
        if self.remote.gave_up:
            return True
        lease = self.remote.lease(self.name, self.fingerprint)
        try:
            if not (self.can_publish and can_compile):
                return not lease.exists()
            self.lease = lease
            return lease.take()
        except Exception as error:  # the upload will fail for the same reason, and say so
            logger.debug("model %r: compiles without a remote lease: %s", self.name, error)
            self.lease = None
            return True

    def end_turn(self, error: BaseException | None = None) -> None:
        """The boot needs its lease no longer; while an upload is under way, the others still wait for it.

        Args:
            error: what ends the boot. If it is none of the boot's, as where the process is told to end, one of those
                that wait takes its place.
        """
        if self.lease is not None and is_cut_short(error):
            self.lease.abandon()
        elif not self._publishes:
            self._release()

    def publish(self, artifact: Artifact) -> None:
        """Uploads it beside serving, unless it is there."""
        if self.can_publish:
            self._publishes = True
            uploads.add(self.remote, artifact, self._published)

    def _published(self, error: Exception | None) -> None:
        self._release()
        if error is not None:
            self.listeners.tell("fallback", self.name, "upload_failed")

    def _release(self) -> None:
        lease, self.lease = self.lease, None
        if lease is not None and lease.held:
            lease.release()

    def wait(self, seconds: float, found: Callable[[], bool], say: Callable[[float], None]) -> Ended:
        """Until `found`, or another machine's compile has ended; see `RemoteLease.wait`."""
        lease = self.lease or self.remote.lease(self.name, self.fingerprint)
        return lease.wait(seconds, found, say)


def sharing_of(name: str, fingerprint: Fingerprint, artifacts: ArtifactsConfig, listeners: Listeners) -> Sharing:
    """Of a config that names a remote.

    Raises:
        ConfigError: what the remote needs is not installed.
    """
    assert artifacts.remote is not None
    keys = [PublicKey.parse(text) for text in artifacts.public_keys]
    key, problem = _private_key(keys) if artifacts.write else (None, "")
    if problem:
        uploads.refuse()
    remote = Remote(artifacts.remote, timeout=artifacts.remote_timeout, public_keys=keys, key=key)
    return Sharing(name, fingerprint, remote, key is not None, listeners, problem)


def _private_key(listed: Collection[PublicKey]) -> tuple[PrivateKey | None, str]:
    """The key to sign with, or why the one that there is cannot be used: what is stored can be read without it."""
    try:
        key = PrivateKey.from_environment()
    except ConfigError as error:
        return None, str(error)
    if key is not None and key.public not in listed:
        return None, f"artifacts.public_keys does not list the key in use; add {key.public}"
    return key, ""


def private_store() -> Store:
    """For copies of shared artifacts where this machine's own store cannot be written.

    It is one of this process, in a new directory that goes when the process ends.

    Raises:
        OSError: no directory can be made.
    """
    global _private
    with _making:
        if _private is None or _private[0] != os.getpid():  # a forked process has one of its own
            until_end = contextlib.ExitStack()
            _private = os.getpid(), Store(until_end.enter_context(private_directory()))
            atexit.register(until_end.close)
        return _private[1]


_private: tuple[int, Store] | None = None
_making = threading.Lock()
