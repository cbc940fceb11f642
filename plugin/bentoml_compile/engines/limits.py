"""What may end a compile early: the time limit, SIGTERM and Ctrl-C, and the end of the worker that it runs beside. The
worker then goes on, or ends, promptly.

BentoML constructs services inside of its event loop's start-up, where uvicorn's own handlers only set a flag that
nobody reads until the compile is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import psutil


class TimeLimitReached(BaseException):
    """Not an Exception: torch's and Inductor's own `except Exception` must not swallow it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeLimitReached inside the block after `seconds`, and ends the compiler processes that it started.

    In the main thread by SIGALRM, which also interrupts a blocked call; in another thread, or where the program
    uses SIGALRM itself, between two bytecodes (a child compiler that it waits for is killed, which unblocks it).
    """
    children = _Children()
    reached = threading.Event()

    def stop() -> None:
        reached.set()
        children.kill()

    arm = _alarm if _alarm_is_free() else _async_exception
    try:
        with arm(seconds, stop):
            yield
    except TimeLimitReached:
        raise
    except BaseException as error:
        if reached.is_set() and isinstance(error, Exception):  # the killed compiler was reported as an error first
            raise TimeLimitReached from error
        raise


def _alarm_is_free() -> bool:
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, None)
        and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    )


@contextlib.contextmanager
def _alarm(seconds: float, stop: Any) -> Iterator[None]:
    def on_alarm(_signum: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # here, since it may come outside of the `try`, or as that ends
        stop()
        raise TimeLimitReached

    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@contextlib.contextmanager
def _async_exception(seconds: float, stop: Any) -> Iterator[None]:
    thread = ctypes.c_ulong(threading.get_ident())
    over = threading.Lock()  # held by whoever comes first: the end of the block or the timer

    def on_time() -> None:
        if over.acquire(blocking=False):
            stop()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeLimitReached))

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), on_time)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if not over.acquire(blocking=False):
            timer.join()  # the exception is set by now, and is raised here at the latest


class ProcessEnds(SystemExit):
    """The process is told to end: no failure of the compile that it ends."""


@contextlib.contextmanager
def prompt_termination() -> Iterator[None]:
    """SIGTERM and SIGINT inside the block end the process's compilers and raise ProcessEnds or KeyboardInterrupt.

    Does nothing outside of the main thread, which is the only one that may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    children = _Children()
    before: dict[int, Any] = {}

    def on_signal(signum: int, _frame: FrameType | None) -> None:
        _restore(before)
        children.kill()
        raise KeyboardInterrupt if signum == signal.SIGINT else ProcessEnds(128 + signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(signum) not in (signal.SIG_IGN, None):
            before[signum] = signal.signal(signum, on_signal)
    try:
        yield
    finally:
        _restore(before)


def _restore(handlers: dict[int, Any]) -> None:
    while handlers:
        signal.signal(*handlers.popitem())


class Interruption:
    """What ends a compile of the thread that makes this object. It starts no compiler from then on."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._children = _Children()

    def __call__(self, seconds: float) -> None:
        """Raises ProcessEnds in that thread, between two bytecodes, and waits for its end so long, but no longer.

        Its compilers are told to end, which unblocks it. The program's own children that are as new are told as well,
        as BentoML's supervisor has told them: they end with this process.
        """
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(ProcessEnds))
        ends, told = time.monotonic() + seconds, set[psutil.Process]()
        while self._thread.is_alive() and time.monotonic() < ends:
            self._children.terminate(told)
            self._thread.join(0.05)
        self._children.terminate(told)


class _Children:
    """The child processes that start after this object was made; the worker's earlier ones are none of our business."""

    def __init__(self) -> None:
        self._before = _child_pids()

    def kill(self) -> None:
        for process in self._new():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def terminate(self, told: set[psutil.Process]) -> None:
        """Those that were not told before."""
        for process in self._new():
            if process not in told:
                told.add(process)
                with contextlib.suppress(psutil.Error):
                    process.terminate()

    def _new(self) -> Iterator[psutil.Process]:
        """With all their descendants: a compiler driver has children of its own."""
        for pid in _child_pids() - self._before:
            with contextlib.suppress(psutil.Error):
                child = psutil.Process(pid)
                yield from (*child.children(recursive=True), child)


def _child_pids() -> set[int]:
    """This process's direct children, by the kernel's own list: psutil searches all of /proc, for milliseconds."""
    pids: set[int] = set()
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children") as children:
                pids.update(map(int, children.read().split()))
    except OSError:  # not Linux, or a kernel without CONFIG_PROC_CHILDREN, or a thread that has just ended
        return {child.pid for child in psutil.Process().children()}
    return pids
