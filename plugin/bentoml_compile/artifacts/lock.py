"""A lock on a directory, by flock on a file in it: exclusive while it is written or removed, shared while it is used.

The kernel frees it when its last holder is gone, however that ended, so a lock never outlives its process. The file is
closed on exec; a forked child shares its parent's lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

LOCK = "lock"


class DirectoryLock:
    """An open lock file; `try_lock` makes one that is locked."""

    def __init__(self, directory: Path, descriptor: int) -> None:
        self._directory = directory
        self._descriptor: int | None = descriptor

    def shared(self) -> bool:
        """Let others use the directory, too. False if it was removed in the moment between the two locks."""
        return self.convert(fcntl.LOCK_SH)

    def exclusive(self) -> bool:
        """Have the directory alone if nobody else uses it; if False, it is still shared."""
        if self.convert(fcntl.LOCK_EX | fcntl.LOCK_NB):
            return True
        self.convert(fcntl.LOCK_SH)  # a conversion that fails has given up the first lock: flock(2)
        return False

    def release(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def convert(self, operation: int) -> bool:
        """flock(2); False if another lock stands against it or the directory is no longer at its place."""
        if self._descriptor is None:
            return False
        try:
            fcntl.flock(self._descriptor, operation)
        except BlockingIOError:
            return False
        return _is_at(self._directory / LOCK, self._descriptor)


def try_lock(directory: Path, *, exclusive: bool) -> DirectoryLock | None:
    """The directory's lock, or None where somebody else's lock stands against it or it is being removed.

    Raises:
        OSError: the directory is gone, or the lock file cannot be opened or, if exclusive, made.
    """
    path = directory / LOCK
    # A store may be read-only for its users: a shared lock needs no more than reading.
    flags = os.O_RDWR | os.O_CREAT if exclusive else os.O_RDONLY
    lock = DirectoryLock(directory, os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    try:
        if lock.convert((fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB):
            return lock
    except BaseException:
        lock.release()
        raise
    lock.release()
    return None


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the locked file is still the one that others would find."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    return False
