"""Processes that boot one model at once, each running lease_process.py, and what has become of them so far."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forked import Child, Forked

DEADLINE = 300.0  # seconds until something that should happen counts as failed


class Worker:
    """A process that boots; see lease_process.py."""

    def __init__(self, child: Child, forked: Forked) -> None:
        self._child, self._forked = child, forked
        self._code: int | None = None

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, signal: signal.Signals) -> None:
        if self._code is None:  # until then the number is this process's
            os.kill(self.pid, signal)

    def wait(self) -> int:
        if self._code is None:
            self._code = self._forked.wait(self._child)
        return self._code

    @property
    def output(self) -> str:
        return self._child.output.read_text()

    def is_in(self, stage: str) -> bool:
        return stage in self.output.splitlines()

    @property
    def result(self) -> dict[str, Any]:
        assert self.wait() == 0, self.output
        [result] = [line for line in self.output.splitlines() if line.startswith("{")]  # a log line may come after it
        return json.loads(result)


class Crowd:
    """Workers that compile when they are let to."""

    def __init__(self, directory: Path, forked: Forked) -> None:
        self.all: list[Worker] = []
        self._directory, self._forked = directory, forked
        self._gate = directory / "gate"

    def wait_until(self, *, compiling: int, waiting: int) -> None:
        self._poll(lambda: (len(self.those_in("compile")), len(self.those_in("wait"))) == (compiling, waiting))

    def wait_until_seen(self, holder: Worker, by: list[Worker]) -> None:
        """They look for it a few times a second, and may not have looked since it took the lease."""
        self._poll(lambda: all(worker.is_in(f"sees {holder.pid}") for worker in by))

    def those_in(self, stage: str) -> list[Worker]:
        """Those that have come so far, and perhaps further."""
        return [worker for worker in self.all if worker.is_in(stage)]

    def let_compile(self) -> None:
        self._gate.touch()

    def close(self) -> None:
        for worker in self.all:
            worker.send(signal.SIGKILL)
            worker.wait()

    def _poll(self, done: Callable[[], bool]) -> None:
        ends = time.monotonic() + DEADLINE
        while not done():
            assert time.monotonic() < ends, [worker.output for worker in self.all]
            time.sleep(0.02)
