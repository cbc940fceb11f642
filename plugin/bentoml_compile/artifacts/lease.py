"""The right to compile one fingerprint: one worker of a machine has it, the others wait for its artifact.

It is an flock on the file `lease` beside the artifacts of the fingerprint, which the kernel frees when its holder dies.
The file tells how a holder ended: one that ended by itself has removed it, one that was ended has left it.

    lease = store.lease("encoder", fingerprint)
    if lease.held:
        with lease:
            ...  # compile and seal
    else:
        lease.wait(1800.0, say=print)  # then look up again
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal

from typing_extensions import Self

from bentoml_compile.artifacts.lock import FileLock, try_lock_file

LEASE = "lease"
_POLL = 0.05  # seconds; flock(2) cannot wait with a limit
_SAY_EVERY = 5.0  # seconds

Ended = Literal["done", "died", "timed_out"]


def is_cut_short(error: BaseException | None) -> bool:
    """What is no Exception (SystemExit, KeyboardInterrupt) ends the process, and not its work."""
    return not isinstance(error, Exception | None)


class Turn(ABC):
    """A right that its holder gives back at the end of a `with`, or leaves to the next one."""

    @abstractmethod
    def release(self) -> None:
        """This process is done, whatever came of it. Does nothing if it is not held."""

    @abstractmethod
    def abandon(self) -> None:
        """This process ends before it is done: one of those that wait takes its place."""

    @staticmethod
    def _looked_at(
        look: Callable[[], Ended | None], seconds: float, say: Callable[[float], None], pauses: Iterator[float]
    ) -> Ended:
        """What the first look says that says anything; the pauses between them are in seconds."""
        started = said = time.monotonic()
        while True:
            if (ended := look()) is not None:
                return ended
            now = time.monotonic()
            if now - started >= seconds:
                return "timed_out"
            if now - said >= _SAY_EVERY:
                say(now - started)
                said = now
            time.sleep(min(next(pauses), started + seconds - now))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if is_cut_short(error):
            self.abandon()
        else:
            self.release()


class Lease(Turn):
    """Whether this process has the right to compile what the directory is for; made by `Store.lease`.

    Attributes:
        holder: the process that has it, or had it last, as far as is known.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LEASE
        self._lock: FileLock | None = None
        self.holder: int | None = None

    @property
    def held(self) -> bool:
        """By this process."""
        return self._lock is not None

    def take(self) -> bool:
        """Have it, unless another process does.

        Raises:
            OSError: the directory is gone or cannot be written, or its file system has no locks.
        """
        return self._try(create=True)

    def wait(self, seconds: float, say: Callable[[float], None]) -> Ended:
        """Until the holder is done or `seconds` have passed; counted over all holders, if others take over in between.

        Args:
            say: called every few seconds with the seconds waited so far.

        Returns:
            "done": the holder ended by itself, and has left an artifact or found that there is none to be had. "died":
            it was ended, and the lease is now held by this process. "timed_out": somebody still holds it.
        """
        return self._looked_at(self._ended, seconds, say, itertools.repeat(_POLL))

    def _ended(self) -> Ended | None:
        try:
            return "died" if self._try(create=False) else None
        except OSError:  # removed; or out of reach, and then nobody can be waited for
            return "done"

    def _try(self, *, create: bool) -> bool:
        lock = try_lock_file(self._path, exclusive=True, create=create)
        if lock is None:
            self.holder = self._read_holder() or self.holder
            return False
        self._lock = lock
        _held.add(lock)
        with contextlib.suppress(OSError):  # the lock is what counts
            self._path.write_text(f"{os.getpid()}\n")
        return True

    def _read_holder(self) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int(self._path.read_text())
        return None

    def release(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):  # read-only since: as if it had died
                self._lock.remove()
        self.abandon()

    def abandon(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


def remove_unheld(directory: Path) -> bool:
    """Remove the lease file of a holder that died; False if one lives.

    Raises:
        OSError: read-only.
    """
    try:
        lock = try_lock_file(directory / LEASE, exclusive=True, create=False)
    except FileNotFoundError:
        return True
    if lock is None:
        return False
    try:
        lock.remove()
    finally:
        lock.release()
    return True


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _let_go() -> None:
    """A forked child shares its parent's locks, and would keep the lease when the parent dies."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go)
