"""Locks by flock on a file: on a directory, exclusive while it is written or removed and shared while it is used; and
the lease (lease.py).

The kernel frees a lock when its last holder is gone, however that ended, so a lock never outlives its process. The
file is closed on exec; a forked child shares its parent's lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

LOCK = "lock"


class FileLock:
    """An open lock file; `try_lock` and `try_lock_file` make one that is locked."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor: int | None = descriptor

    def shared(self) -> bool:
        """Let others have it, too. False if the file was removed in the moment between the two locks."""
        return self.convert(fcntl.LOCK_SH)

    def exclusive(self) -> bool:
        """Have it alone if nobody else has it; if False, it is still shared."""
        if self.convert(fcntl.LOCK_EX | fcntl.LOCK_NB):
            return True
        self.convert(fcntl.LOCK_SH)  # a conversion that fails has given up the first lock: flock(2)
        return False

    def release(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def remove(self) -> None:
        """Remove the locked file, unless it is gone or another has taken its place.

        Raises:
            OSError: read-only.
        """
        if self._descriptor is not None and _is_at(self._path, self._descriptor):
            self._path.unlink(missing_ok=True)

    def convert(self, operation: int) -> bool:
        """flock(2); False if another lock stands against it or the file is no longer at its place."""
        if self._descriptor is None:
            return False
        try:
            fcntl.flock(self._descriptor, operation)
        except BlockingIOError:
            return False
        return _is_at(self._path, self._descriptor)


def try_lock(directory: Path, *, exclusive: bool) -> FileLock | None:
    """The directory's lock, or None where somebody else's lock stands against it or it is being removed.

    Raises:
        OSError: the directory is gone, or the lock file cannot be opened or, if exclusive, made.
    """
    return try_lock_file(directory / LOCK, exclusive=exclusive, create=exclusive)


def try_lock_file(path: Path, *, exclusive: bool, create: bool) -> FileLock | None:
    """A lock on the file, or None where somebody else's lock stands against it or it is being removed.

    Raises:
        OSError: the file is not there and not to be made, or cannot be opened or made; or its file system has no locks.
    """
    # A store may be read-only for its users: a shared lock needs no more than reading.
    flags = (os.O_RDWR if exclusive else os.O_RDONLY) | (os.O_CREAT if create else 0)
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    return _try_lock(path, descriptor, exclusive=exclusive)


def try_lock_directory(path: Path, *, exclusive: bool) -> FileLock | None:
    """A lock on the directory itself, otherwise as `try_lock_file`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    return _try_lock(path, descriptor, exclusive=exclusive)


def _try_lock(path: Path, descriptor: int, *, exclusive: bool) -> FileLock | None:
    lock = FileLock(path, descriptor)
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
