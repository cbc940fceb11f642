"""The one thread of this process in which compiles run that no request and no start-up waits for."""

from __future__ import annotations

import contextvars
import functools
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from bentoml_compile.engines.limits import Interruption, ProcessEnds

logger = logging.getLogger("bentoml_compile")

Job = Callable[[], object]


class Background:
    """Runs jobs one after the other. Its thread ends with the process: a worker's end waits for no compile."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[int, Job]] = SimpleQueue()  # with the number of ends before it was queued
        self._ends = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._interrupt: Interruption | None = None  # the job that runs

    def run(self, job: Job) -> None:
        """Queues the job, with the caller's context: torch keeps its settings there. What it raises is logged."""
        with self._lock:
            self._jobs.put((self._ends, functools.partial(contextvars.copy_context().run, job)))
            if self._thread is None or not self._thread.is_alive():  # the latter in a forked child
                self._thread = threading.Thread(target=self._work, name="bentoml_compile", daemon=True)
                self._thread.start()

    def end(self, seconds: float) -> None:
        """The process is about to end: no job begins, and the one that runs leaves no compiler behind, and its lease to
        another process. Waits for that, at most so long."""
        with self._lock:
            self._ends += 1
            interrupt = self._interrupt
        if interrupt is not None:
            interrupt(seconds)

    def _work(self) -> None:
        while True:
            ends, job = self._jobs.get()
            try:
                if self._begins(ends):
                    job()
            except ProcessEnds:
                return  # threads are silent about a SystemExit, but not about a kind of it
            except Exception:
                logger.exception("a compile in the background failed; serving goes on")
            finally:
                self._interrupt = None
            del job  # it holds a model

    def _begins(self, ends: int) -> bool:
        """Whether a job may begin, which `end` then interrupts; not one that was queued before the last `end`."""
        with self._lock:
            if ends == self._ends:
                self._interrupt = Interruption()
            return ends == self._ends


background = Background()
