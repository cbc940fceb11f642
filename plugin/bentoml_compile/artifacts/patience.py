"""What may hang is waited for only so long: calls in a thread of their own, which is abandoned when the time is up."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from typing import TypeVar

Result = TypeVar("Result")


_AGAIN_AFTER = 60.0  # seconds
_given_up: dict[str, tuple[float, str]] = {}  # of this process: until when, and why


class Patience:
    """With something that may be slow or dead: seconds for all calls together, until `renew`.

    Args:
        subject: what it is; one that was given up is not asked by others of this process for a minute either. Empty: it
            is nobody else's.

    Attributes:
        gave_up: why nothing is asked any more; empty as long as every call has ended in time.
    """

    def __init__(self, seconds: float, subject: str = "") -> None:
        self.seconds = seconds
        self._subject = subject
        self.gave_up = ""
        self._left = seconds

    def renew(self) -> None:
        """Begin anew to count; what was given up stays so."""
        self._left = self.seconds

    def forgive(self) -> None:
        """Begin anew to count, also after it was given up: for who waits anyway."""
        self.gave_up = ""
        _given_up.pop(self._subject, None)
        self.renew()

    @staticmethod
    def forget_all() -> None:
        """Whatever was given up in this process is asked again."""
        _given_up.clear()

    def call(
        self, work: Callable[[Callable[[], bool]], Result], discard: Callable[[Result], object] = lambda result: None
    ) -> Result:
        """What `work` returns.

        Args:
            work: is given a function that tells whether nobody waits for it any longer, and should then end.
            discard: takes a result that came too late.

        Raises:
            TimeoutError: the time is up, now or in an earlier call. Whatever `work` raises.
        """
        until, reason = _given_up.get(self._subject, (0.0, ""))
        self.gave_up = self.gave_up or (reason if time.monotonic() < until else "")
        if self.gave_up:
            raise TimeoutError(self.gave_up)
        future: Future[Result] = Future()
        started = time.monotonic()
        # No executor: the interpreter waits for its threads when it ends.
        threading.Thread(target=_run, args=(future, work, discard), name="bentoml-compile-remote", daemon=True).start()
        try:
            wait([future], timeout=max(self._left, 0.0))
        finally:
            self._left -= time.monotonic() - started
            is_late = future.cancel()  # a result that is there cannot be cancelled
        if is_late:
            self.gave_up = f"no answer within {self.seconds:g} s; not asked again in this boot"
            if self._subject:
                _given_up[self._subject] = time.monotonic() + _AGAIN_AFTER, self.gave_up
            raise TimeoutError(self.gave_up)
        return future.result()


def _run(
    future: Future[Result], work: Callable[[Callable[[], bool]], Result], discard: Callable[[Result], object]
) -> None:
    try:
        result = work(future.cancelled)
    except BaseException as error:  # raised again where it is waited for
        with contextlib.suppress(InvalidStateError):
            future.set_exception(error)
        return
    try:
        future.set_result(result)
    except InvalidStateError:
        discard(result)
