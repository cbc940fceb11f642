"""The right to compile one fingerprint among machines: one has it, the others wait for its artifact. Best effort.

It is a file at the remote, signed by its holder's key (signing.py): what no listed key signed, or for another model or
fingerprint, counts as not there. Whoever has it rewrites it every so often with a higher beat; one whose beat no longer
grows has lost its holder. Each observer counts its own seconds of that, except of one that was written long ago, which
is dead at once. Two may have it at once where the file system cannot create exclusively, where the holder was cut off
for long, or where clocks are far apart: both then compile, and no harm is done.

    lease = remote.lease("encoder", fingerprint)
    if lease.take():
        with lease:
            ...  # compile, seal and upload
    else:
        lease.wait(1800.0, found=lambda: ..., say=print)
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bentoml_compile.artifacts.lease import Ended, Turn
from bentoml_compile.artifacts.patience import Patience
from bentoml_compile.artifacts.remote_files import RemoteFiles
from bentoml_compile.artifacts.signing import PrivateKey, PublicKey, open_envelope
from bentoml_compile.errors import ArtifactRejected, ConfigError

PAYLOAD_TYPE = "application/vnd.bentoml-compile.lease+json"
TTL = 30.0  # seconds without a change until a holder counts as dead
_OLD = 900.0  # seconds since it was written, by two machines' clocks, after which nobody waits to see it change
_FIRST_POLL, _LONGEST_POLL, _GROWTH = 0.5, 5.0, 1.5  # seconds, and a factor
_SETTLE = 0.3  # seconds; in which another's write, begun before ours, is done
_MOST_BYTES = 64 << 10  # a model's name may be long
_MOST_FAILURES = 3  # in a row: one alone must not set a hundred waiting machines to work


@dataclass(frozen=True, slots=True)
class LeaseOf:
    """What it is the right to compile."""

    model: str
    fingerprint: str


class RemoteLease(Turn):
    """Whether this process has the right to compile what `path` is for; made by `Remote.lease`.

    Args:
        public_keys: whose leases count.
        key: one of theirs, which signs this process's; None: the lease can be observed, and not taken.
        ttl: seconds without a change until a holder counts as dead.

    Attributes:
        holder: who has it, or had it last, as far as is known: "<pid> on <host>".
        failure: why a wait ended early, if the remote failed.
    """

    def __init__(
        self,
        files: RemoteFiles,
        path: str,
        patience: Patience,
        *,
        of: LeaseOf,
        public_keys: Collection[PublicKey],
        key: PrivateKey | None = None,
        ttl: float = TTL,
    ) -> None:
        self._files = files
        self._path = path
        self._patience = patience
        self._of = of
        self._keys = tuple(public_keys)
        self._key = key
        self._ttl = ttl
        self._id = secrets.token_hex(8)
        self._beats = 0
        self._wanted = False
        self._stopped: threading.Event | None = None  # of the beats, which is not set while the lease is held
        self._pid = 0
        self._rewriting = threading.Lock()
        self.holder: str | None = None
        self.failure = ""

    @property
    def held(self) -> bool:
        """By this process."""
        return self._stopped is not None and not self._stopped.is_set() and self._pid == os.getpid()

    def exists(self) -> bool:
        """Whether anybody seems to have it.

        Raises:
            TimeoutError: the remote was or is too slow. Others, as its file system likes.
        """
        lease = self._read_in_time()
        return lease is not None and not lease.is_old()

    def take(self) -> bool:
        """Have it, unless another process does. If so, a `wait` takes it over from a holder that died.

        Raises:
            ConfigError: there is no key, or it is not listed.
            TimeoutError: the remote was or is too slow. Others, as its file system likes.
        """
        if self._key is None or self._key.public not in self._keys:
            raise ConfigError("a lease is taken only with a signing key that artifacts.public_keys lists")
        self._wanted = True
        return self.held or self._begin(lambda is_abandoned: self._create())

    def wait(self, seconds: float, found: Callable[[], bool], say: Callable[[float], None]) -> Ended:
        """Until the artifact is found, the holder is done or `seconds` have passed.

        Args:
            found: whether the artifact is there; called now and then.
            say: called every few seconds with the seconds waited so far.

        Returns:
            "done": the artifact is found, or the holder has left none, or the remote fails. "died": the holder no
            longer rewrites the lease, which is now held by this process if it has asked for it by `take`.
            "timed_out": somebody still holds it.
        """
        watch, failures = _Watch(self._ttl), 0

        def look() -> Ended | None:
            nonlocal failures
            self._patience.renew()
            try:
                ended, failures = self._ended(watch, found), 0
            except Exception as error:
                failures += 1
                self.failure = f"{type(error).__name__}: {error}"
                if failures >= _MOST_FAILURES:
                    return "done"
                self._patience.forgive()
                return None
            return ended

        return self._looked_at(look, seconds, say, _pauses())

    def _ended(self, watch: _Watch, found: Callable[[], bool]) -> Ended | None:
        lease = self._read_in_time()
        if found() or lease is None:  # in this order: a holder that is done has uploaded before
            return "done"
        self.holder = str(lease)
        if not (watch.is_dead(lease, time.monotonic()) or lease.is_old()):
            return None
        if self._wanted and not self._begin(lambda is_abandoned: self._take_over(lease)):
            raise FileExistsError(f"{self._path} was written by another at the same time")  # who is alive, or a failure
        return "died"

    def release(self) -> None:
        if self.held:
            self.abandon()
            with contextlib.suppress(Exception):  # as if it had died
                Patience(self._patience.seconds).call(lambda is_abandoned: self._remove())

    def abandon(self) -> None:
        """This process ends before it is done: in a while, one of those that wait takes its place."""
        if self._stopped is not None:
            self._stopped.set()

    def _begin(self, take: Callable[[Callable[[], bool]], bool]) -> bool:
        """Have it and keep it, if `take` gets it in time."""
        if not self._patience.call(take, lambda taken: self._remove() if taken else None):
            return False
        self._pid, self._stopped = os.getpid(), threading.Event()
        threading.Thread(target=self._beat, args=(self._stopped,), name="bentoml-compile-lease", daemon=True).start()
        return True

    def _create(self) -> bool:
        there, failure = self._bytes(), None
        lease = self._opened(there)
        if lease is None or lease.is_old():
            try:
                if there is None:
                    self._files.create(self._path, self._content())
                    time.sleep(_SETTLE)
                else:
                    self._overwrite()
            except Exception as error:  # another was faster; or the answer got lost
                failure = error
            lease = self._read()
            if lease is None and failure is not None:  # that other's may still be half written
                time.sleep(_SETTLE)
                lease = self._read()
        if lease is None or lease.is_old():
            raise failure or OSError(f"{self._path} is not there after it was written")
        self.holder = str(lease)
        return self._is_ours(lease)

    def _take_over(self, dead: _Content) -> bool:
        if self._read() != dead:
            return False
        self._overwrite()
        return self._is_ours(self._read())

    def _overwrite(self) -> None:
        self._files.write(self._path, self._content())
        time.sleep(_SETTLE * random.uniform(1.0, 2.0))

    def _beat(self, stopped: threading.Event) -> None:
        while not stopped.wait(self._ttl / 3):
            with self._rewriting, contextlib.suppress(Exception):  # the next one may succeed
                if not stopped.is_set():
                    lease = self._read()
                    if lease is None or lease.is_old() or self._is_ours(lease):
                        self._files.write(self._path, self._content())
                    else:  # somebody took us for dead
                        stopped.set()

    def _remove(self) -> None:
        with self._rewriting:
            if self._is_ours(self._read()):
                self._files.remove(self._path)

    def _read_in_time(self) -> _Content | None:
        return self._patience.call(lambda is_abandoned: self._read())

    def _read(self) -> _Content | None:
        return self._opened(self._bytes())

    def _bytes(self) -> bytes | None:
        try:
            return self._files.read(self._path, _MOST_BYTES)
        except FileNotFoundError:
            return None

    def _opened(self, envelope: bytes | None) -> _Content | None:
        """What a listed key has signed for this model and fingerprint."""
        if envelope is None:
            return None
        try:
            content = _Content.model_validate_json(open_envelope(envelope, self._keys, PAYLOAD_TYPE)[0])
        except (ArtifactRejected, ValidationError):
            return None
        return content if LeaseOf(content.model, content.fingerprint) == self._of else None

    def _content(self) -> bytes:
        assert self._key is not None
        self._beats += 1
        content = _Content(
            model=self._of.model,
            fingerprint=self._of.fingerprint,
            holder=self._id,
            host=socket.gethostname(),
            pid=os.getpid(),
            beat=self._beats,
            written=time.time(),
        )
        return self._key.sign(content.model_dump_json().encode(), PAYLOAD_TYPE)

    def _is_ours(self, lease: _Content | None) -> bool:
        return lease is not None and lease.holder == self._id


def _pauses() -> Iterator[float]:
    """Longer and longer, and no two machines' alike."""
    pause = _FIRST_POLL
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(pause * _GROWTH, _LONGEST_POLL)


class _Content(BaseModel):
    """`written` is in seconds since 1970 by the holder's clock."""

    model_config = ConfigDict(strict=True, frozen=True)
    model: str
    fingerprint: str
    holder: str
    host: str
    pid: int
    beat: int
    written: Annotated[float, Field(allow_inf_nan=False)]

    def is_old(self) -> bool:
        return time.time() - self.written > _OLD

    def __str__(self) -> str:
        return f"{self.pid} on {self.host[:100]}"


class _Watch:
    """Whether a lease's holder still rewrites it. Whoever can write at the remote can put back what once was there."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._holder: str | None = None
        self._beats: dict[str, int] = {}  # the highest that was seen, by holder
        self._unchanged = self._last = 0.0

    def is_dead(self, lease: _Content, now: float) -> bool:
        """Whether its beat has not grown, nor a new holder appeared, for `ttl` seconds, of which no gap between two
        looks counts for more than a third: an observer that was stopped has not observed.
        """
        highest = self._beats.get(lease.holder)
        if highest is None or (lease.holder == self._holder and lease.beat > highest):
            self._unchanged = 0.0
        else:
            self._unchanged += min(now - self._last, self._ttl / 3)
        self._beats[lease.holder] = max(lease.beat, highest or 0)
        self._holder, self._last = lease.holder, now
        return self._unchanged >= self._ttl
