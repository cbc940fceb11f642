"""Stands between a worker and its compiler's process: starts the compiler, and ends all that it started.

    python -I -S guard.py <pid of the worker> <directory> <command> ...

A program of its own, of the standard library alone: it must act when the compiler hangs, crashes or is killed, and when
the worker is. It waits for the command's end, for a byte on its standard input (the worker does not want the result any
more), for the end of that input (the worker died, however it did), or for another process to become its parent (the
same, where a process that the worker forked still holds the input's other end). PR_SET_PDEATHSIG would do less: it goes
to one process, not to what that has started, and it comes when a thread of the worker ends, not the worker.

It then kills every descendant. Those whose parent has died come to it (PR_SET_CHILD_SUBREAPER, Linux), so that also a
pool of processes in sessions of their own is found. Where the worker is gone it removes the directory. Its exit status
is the command's, or 128 and the number of the signal that ended that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import subprocess
import sys

_INTERVAL = 0.05  # seconds between two looks
_PR_SET_CHILD_SUBREAPER = 36


def main(worker: int, directory: str, command: list[str]) -> int:
    _take_in_orphans()
    _reset_signals()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    status, worker_lives = None, True
    while status is None and worker_lives and not _is_called_off():
        status, worker_lives = process.poll(), os.getppid() == worker
    _kill_descendants()
    if _is_closed() or os.getppid() != worker:
        shutil.rmtree(directory, ignore_errors=True)
    if status is None:
        os.killpg(0, signal.SIGKILL)  # this process too, and where orphans do not come to it what is left of the group
    assert status is not None
    return status if status >= 0 else 128 - status


def _is_called_off(seconds: float = _INTERVAL) -> bool:
    """Whether the input has something to read, which its end is too."""
    return bool(select.select([0], [], [], seconds)[0])


def _is_closed() -> bool:
    return _is_called_off(0) and not os.read(0, 1)


def _take_in_orphans() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reset_signals() -> None:
    """What the worker blocks or ignores is inherited; an ignored SIGCHLD would hide how the command ended."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # BentoML's supervisor tells a worker's children to end, too, while the worker may still answer requests. By a
    # function, since the command would inherit SIG_IGN.
    signal.signal(signal.SIGTERM, lambda signum, frame: None)


def _kill_descendants() -> None:
    """The children of each one that is killed become this process's, until there are none."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    """By the kernel's own list; none are found where it has no such list."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
