"""Waiting for what should happen in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 120.0  # seconds until something that should happen counts as failed


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.02)
