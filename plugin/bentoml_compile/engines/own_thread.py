"""A thread that code of one model never leaves, for engines whose state belongs to the thread that made it.

    thread = OwnThread("encoder")
    thread.run(function, *args)     # from any thread; the result or the exception comes back
    thread.close()

torch's CUDA graphs are such an engine (https://github.com/pytorch/pytorch/issues/123177).

Not concurrent.futures.ThreadPoolExecutor(max_workers=1), whose Future it does use: the executor's thread is not a
daemon, so that a compile which hangs would keep the process from ending, it does not tell a caller whose thread was
lost by a fork, and an interrupted caller (time limit, SIGTERM, Ctrl-C) leaves its running call behind.

A server that gives up a request leaves its call behind: BentoML 1.4.40 answers 504 when `traffic.timeout` is over, lets
the thread of a synchronous method go on and starts the next one beside it, whatever `threads` says; where a client
leaves, nothing happens before that. Such a call runs when its turn comes, as it would without this thread.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import ctypes
import functools
import threading
import time
import weakref
from collections.abc import Callable, Collection
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from bentoml_compile.engines.thread_state import ThreadState, check_it_can_be_left, default_device, modes

T = TypeVar("T")

_POLL_SECONDS = 0.1  # an exception that is set in a waiting thread (limits.py) is raised between two waits


class CallInterrupted(BaseException):
    """Its caller was interrupted. No Exception: nobody is to answer it in another way."""


class LastWait(threading.local):
    """When the calling thread's last call of any OwnThread arrived and began; nanoseconds since the epoch.

    For a call's trace: a call that began after `began_ns` has not waited.
    """

    arrived_ns = 0
    began_ns = 0

    @property
    def seconds(self) -> float:
        return max(0, self.began_ns - self.arrived_ns) / 1e9


last_wait = LastWait()


class OwnThread:
    """One daemon thread, and a queue before it.

    The thread ends by `close`, or when nobody holds this object any more, or with the process.

    Args:
        name: of the model; errors and the thread's name have it.
        cuda_devices: indices of those that the calls work on; the caller's current streams there are used.
    """

    def __init__(self, name: str, cuda_devices: Collection[int] = ()) -> None:
        self.name = name
        self._cuda_devices = frozenset(cuda_devices)
        self._modes = modes()  # of the boot; its default device is the thread's
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._closed = False
        self._entering = threading.Lock()  # so that no call enters the queue after close has emptied it
        self._thread = threading.Thread(
            target=_serve, args=(self._calls, default_device()), name=f"torch_compile-{name}", daemon=True
        )
        weakref.finalize(self, self._calls.put, None)  # before an interruption can come, which start() waits long for
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Calls the function on the thread, after all calls that came before. On the thread itself, at once.

        It sees the caller's context variables, and what thread_state.py says of torch's state. Where the caller is
        interrupted, the function is not called any more, or is interrupted by CallInterrupted and waited for.

        Raises:
            GuardMiss: the caller is in a torch mode or a functorch transform.
            RuntimeError: closed, or the process is a fork of the one that has the thread.
            BaseException: whatever the function raises.
        """
        if self.is_current:
            return function(*args, **kwargs)
        check_it_can_be_left(self._modes)
        call = _Call(functools.partial(function, *args, **kwargs), ThreadState.of_this_thread(self._cuda_devices))
        try:
            result: T = call.wait(self._enter)
            return result
        except concurrent.futures.CancelledError:
            if not call.future.cancelled():
                raise
            raise self._closed_error() from None
        finally:
            last_wait.arrived_ns, last_wait.began_ns = call.arrived_ns, call.began_ns
            del call  # as in _Call.execute

    def close(self) -> None:
        """Waits for the call that runs, refuses those that wait with RuntimeError, and ends the thread.

        A second call only waits. On the thread itself nothing is waited for: it ends after the call that closes it.
        """
        if self._thread.is_alive():
            with self._entering:
                if not self._closed:
                    self._closed = True
                    _cancel_all(self._calls)
                    self._calls.put(None)
            if not self.is_current:
                self._thread.join()

    def _enter(self, call: _Call) -> None:
        if not self._thread.is_alive() and not self._closed:  # before the lock, which a fork may have left taken
            raise RuntimeError(f"the thread of {self.name!r} is in the parent process: compile after the fork")
        with self._entering:
            if self._closed:
                raise self._closed_error()
            self._calls.put(call)

    def _closed_error(self) -> RuntimeError:
        return RuntimeError(f"the thread of {self.name!r} was closed")


def _serve(calls: SimpleQueue[_Call | None], device: torch.device | None) -> None:
    """The thread's life. It holds no OwnThread, and between calls no call, so that both can be collected."""
    if device is not None:
        torch.set_default_device(device)
    while (call := calls.get()) is not None:
        call.execute()
        del call


def _cancel_all(calls: SimpleQueue[_Call | None]) -> None:
    try:
        while True:
            if (call := calls.get_nowait()) is not None:
                call.future.cancel()
    except Empty:
        pass


class _Call:
    """What waits in the queue, runs, and is waited for."""

    def __init__(self, function: Callable[[], Any], state: ThreadState) -> None:
        self.arrived_ns = time.time_ns()
        self.began_ns = 0
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._function = function
        self._state = state
        self._context = contextvars.copy_context()
        self._interrupting = threading.Lock()
        self._given_up = False
        self._runs_in: int | None = None  # the thread that may be interrupted

    # in the thread

    def execute(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        self.began_ns = time.time_ns()
        try:
            try:
                self._open_to_interruption()
                result = self._context.run(_run, self._function, self._state)
            finally:
                self._end_interruption()
        except BaseException as error:
            self.future.set_exception(error)
            del self  # the error knows this frame: a cycle would keep the call's tensors
        else:
            self.future.set_result(result)

    def _open_to_interruption(self) -> None:
        with self._interrupting:
            if self._given_up:
                raise CallInterrupted("the caller was interrupted")
            self._runs_in = threading.get_ident()

    def _end_interruption(self) -> None:
        """One that was sent is raised in here at the latest: CPython looks for it when it leaves the `with`.

        It must not be taken back: PyThreadState_SetAsyncExc with NULL leaves CPython 3.11 in the belief that one is to
        come, and a thread with a profile function then hangs.
        """
        with self._interrupting:
            self._runs_in = None

    # in the caller's

    def wait(self, enter: Callable[[_Call], None] = lambda call: None) -> Any:
        """`enter` puts the call into the queue, here, since it runs from then on: an interruption must reach it."""
        try:
            enter(self)
            self._until_done()
        except BaseException:
            self._give_up()
            raise
        future = self.future
        try:
            return future.result()
        finally:
            del self, future  # as in `execute`

    def _until_done(self) -> None:
        while not self.future.done():
            with contextlib.suppress(concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
                self.future.exception(_POLL_SECONDS)

    def _give_up(self) -> None:
        """A second interruption ends the waiting here; the call then goes on alone."""
        if self.future.cancel():
            return
        with self._interrupting:
            self._given_up = True
            if self._runs_in is not None:
                _set_async_exception(self._runs_in, CallInterrupted)
        self._until_done()


def _run(function: Callable[[], Any], state: ThreadState) -> Any:
    with state.entered():
        return function()


def _set_async_exception(thread: int, error: type[BaseException]) -> None:
    """Raised in that thread between two bytecodes."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
