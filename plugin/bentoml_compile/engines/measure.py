"""Is compiled faster than eager, for this shape, on this machine?"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MIN_PAIRS, MAX_PAIRS = 6, 40
BUDGET_SECONDS = 3.0  # of running the model, for one shape; slow models get MIN_PAIRS whatever they take
SIGNIFICANT = 0.05
CLEAR = 0.9  # ratios below this count as slower even where too few pairs fit into the budget to be sure


@dataclass(frozen=True, slots=True)
class Speedup:
    """`ratio` is median eager seconds / median compiled seconds. `slower` is the decision, see `measure`."""

    ratio: float
    slower: bool
    pairs: int


def measure(compiled: Callable[[], Any], eager: Callable[[], Any], device: torch.device) -> Speedup:
    """Runs both in turn, in alternating order, so that noise and a warming machine meet both alike.

    Stops as soon as one has won too many pairs for chance (sign test), or at MAX_PAIRS or the budget's end. Compiled
    is slower if its median and its best run are (other load on the machine spoils single runs, rarely every one) and
    either its losses are no chance or the difference is clear.
    """
    mine, theirs = [], []
    eager()  # compiled is warm already
    begin = time.perf_counter()
    lost = won = pairs = 0
    while pairs < MIN_PAIRS or (pairs < MAX_PAIRS and time.perf_counter() - begin < BUDGET_SECONDS):
        if pairs >= MIN_PAIRS and min(_by_chance(lost, pairs), _by_chance(won, pairs)) < SIGNIFICANT:
            break
        if pairs % 2:
            mine.append(_seconds(compiled, device))
            theirs.append(_seconds(eager, device))
        else:
            theirs.append(_seconds(eager, device))
            mine.append(_seconds(compiled, device))
        lost, won, pairs = lost + (mine[-1] > theirs[-1]), won + (mine[-1] < theirs[-1]), pairs + 1
    ratio = statistics.median(theirs) / max(statistics.median(mine), 1e-12)
    best = min(theirs) / max(min(mine), 1e-12)
    slower = max(ratio, best) < 1 and (_by_chance(lost, pairs) < SIGNIFICANT or max(ratio, best) < CLEAR)
    return Speedup(ratio, slower, pairs)


def _by_chance(lost: int, pairs: int) -> float:
    """Sign test: how likely equally fast code loses (or wins) at least this often."""
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
