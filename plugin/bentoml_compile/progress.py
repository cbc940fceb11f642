"""Says every few seconds what a boot is doing and for how long, so that a long compile does not look like a hang.

    model 'encoder': ids: int64[8, 128] (2 of 3): cpp_compile for 4 s, 35 s in all

The boot itself only keeps lists of what it has begun; a thread beside it reads them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from bentoml_compile.listener import Timeline

logger = logging.getLogger("bentoml_compile")

SAY_EVERY = 5.0  # seconds
_CLOCKS_DIFFER = 0.01  # seconds; a wait that ended a little early would be followed by another line at once


class Place(NamedTuple):
    """Which of its shapes a boot works on."""

    label: str
    number: int  # from 1
    of: int


@dataclass(eq=False)
class Progress:
    """Of one model's boot.

    Attributes:
        place: asked by the other thread, whenever there is something to say.
    """

    model: str
    timeline: Timeline
    place: Callable[[], Place | None] = lambda: None
    _phases: list[tuple[str, int]] = field(default_factory=list)  # that are open, with their start

    @contextlib.contextmanager
    def said(self) -> Iterator[None]:
        """Inside, a line every SAY_EVERY seconds of the boot; nothing where it is over before that."""
        over = threading.Event()
        thread = threading.Thread(target=self._say, args=(over,), name=f"torch_compile-{self.model}-progress")
        thread.daemon = True
        before = _running.set(self)
        try:
            with contextlib.suppress(RuntimeError):  # no more threads to be had
                thread.start()
            yield
        finally:
            over.set()
            _running.reset(before)

    def line(self) -> str:
        """What the boot is doing now; empty if it does not run, or waits for another worker, which has words of its
        own.
        """
        try:
            stage, boot, now = self.timeline.current, self.timeline.root, time.time_ns()
        except IndexError:
            return ""
        if stage.name == "wait":
            return ""
        name, started_ns = self._phase() or (stage.name, stage.started_ns)
        place = self.place() if stage is not boot else None
        where = f"{place.label} ({place.number} of {place.of}): " if place is not None else ""
        seconds, in_all = (now - started_ns) / 1e9, (now - boot.started_ns) / 1e9
        return f"model {self.model!r}: {where}{name} for {seconds:.0f} s, {in_all:.0f} s in all"

    def _phase(self) -> tuple[str, int] | None:
        """The innermost open one, from its beginning also where torch enters it again inside of itself."""
        found: tuple[str, int] | None = None
        for phase in reversed(list(self._phases)):
            if found is not None and phase[0] != found[0]:
                break
            found = phase
        return found

    def _say(self, over: threading.Event) -> None:
        """Also ends where an exception has kept `over` from being set: no stage is open then."""
        elapsed = self._elapsed()
        while elapsed is not None and not over.wait(SAY_EVERY - elapsed % SAY_EVERY + _CLOCKS_DIFFER):
            try:
                if line := self.line():
                    logger.info("%s", line)
            except Exception:  # the boot goes on meanwhile, and what is read may not fit together
                logger.debug("model %r: nothing to say", self.model, exc_info=True)
            elapsed = self._elapsed()

    def _elapsed(self) -> float | None:
        """Seconds since the boot began; None if it is over."""
        try:
            return (time.time_ns() - self.timeline.root.started_ns) / 1e9
        except IndexError:
            return None


_running: ContextVar[Progress | None] = ContextVar("bentoml_compile_progress", default=None)
"""The boot that runs here; a compiler's own thread runs in the context of the boot that called it."""


def phase_began(name: str) -> None:
    _phases_here().append((name, time.time_ns()))


def phase_ended(name: str) -> None:
    """The innermost open phase of that name is over, with all that began inside of it."""
    phases = _phases_here()
    for index in reversed(range(len(phases))):
        if phases[index][0] == name:
            del phases[index:]
            return


@contextlib.contextmanager
def phases_inside() -> Iterator[None]:
    """All phases that begin inside are over at its end, however it ends."""
    phases = _phases_here()
    depth = len(phases)
    try:
        yield
    finally:
        del phases[depth:]


def _phases_here() -> list[tuple[str, int]]:
    running = _running.get()
    return running._phases if running is not None else []
