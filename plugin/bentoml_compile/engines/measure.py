"""Is compiled faster than eager, for this shape, on this machine?"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MIN_PAIRS, MAX_PAIRS = 5, 30
BUDGET_SECONDS = 1.0  # of running the model, for one shape; slow models get MIN_PAIRS whatever they take


@dataclass(frozen=True, slots=True)
class Speedup:
    """`ratio` is median eager seconds / median compiled seconds. `slower`: too many pairs lost for chance."""

    ratio: float
    slower: bool
    pairs: int


def measure(compiled: Callable[[], Any], eager: Callable[[], Any], device: torch.device) -> Speedup:
    """Runs both in turn, in alternating order, so that noise and a warming machine meet both alike."""
    times: dict[str, list[float]] = {"compiled": [], "eager": []}
    eager()  # compiled is warm already
    begin = time.perf_counter()
    for pair in range(MAX_PAIRS):
        if pair >= MIN_PAIRS and time.perf_counter() - begin > BUDGET_SECONDS:
            break
        order = [("compiled", compiled), ("eager", eager)]
        for name, run in order if pair % 2 else reversed(order):
            times[name].append(_seconds(run, device))
    lost = sum(mine > theirs for mine, theirs in zip(times["compiled"], times["eager"], strict=True))
    ratio = statistics.median(times["eager"]) / max(statistics.median(times["compiled"]), 1e-12)
    pairs = len(times["eager"])
    return Speedup(ratio, slower=ratio < 1 and _by_chance(lost, pairs) < 0.05, pairs=pairs)


def _by_chance(lost: int, pairs: int) -> float:
    """Sign test: how likely equally fast code loses at least this often."""
    ways: int = sum(math.comb(pairs, k) for k in range(lost, pairs + 1))
    return ways / float(2**pairs)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
