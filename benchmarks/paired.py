"""How much longer one call takes than another, where the difference is smaller than the noise.

Both are called in short blocks in turn, in an order that is drawn anew each round, so that a slow moment of the machine
meets both alike. The answer is the median of the differences within a round, with the interval that holds it in 95 of
100 repetitions (by the binomial distribution of ranks: nothing is assumed of how times are distributed).
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.call_ways import Way

BLOCK_SECONDS = 0.001  # a block is at least one call, and about so long


@dataclass(frozen=True, slots=True)
class Difference:
    """Of `way` against `than`, a call; the first three in microseconds, then in percent of `than`'s median."""

    way: str
    than: str
    than_us: float
    way_us: float
    difference_us: float
    percent: float
    percent_low: float  # of the 95% interval
    percent_high: float
    rounds: int


def blocks(ways: Mapping[str, Way], seconds: float) -> dict[str, list[float]]:
    """Seconds a call, one value a round for each way; as many rounds as fit, at least two."""
    calls = max(1, round(BLOCK_SECONDS / _fastest(ways)))
    order, draw = list(ways), random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[order[0]]) < 2:
        draw.shuffle(order)
        for name in order:
            times[name].append(_block(ways[name], calls))
    return times


def compare(times: Mapping[str, Sequence[float]], way: str, than: str) -> Difference:
    """The paired difference of two ways' blocks."""
    base = statistics.median(times[than])
    differences = [mine - other for mine, other in zip(times[way], times[than], strict=True)]
    low, middle, high = median_interval(differences)
    return Difference(
        way,
        than,
        than_us=base * 1e6,
        way_us=statistics.median(times[way]) * 1e6,
        difference_us=middle * 1e6,
        percent=100 * middle / base,
        percent_low=100 * low / base,
        percent_high=100 * high / base,
        rounds=len(differences),
    )


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower end, median, upper end of the median's 95% interval; for fewer than six values all of their range."""
    ranked, count = sorted(values), len(values)
    outside = math.floor(count / 2 - 1.96 * math.sqrt(count) / 2)
    first = max(0, outside)
    return ranked[first], statistics.median(ranked), ranked[count - 1 - first]


def table(differences: Mapping[str, Sequence[Difference]]) -> str:
    """Markdown: a row a comparison, by model."""
    lines = ["| model | way | call, us | than | call, us | difference, us | percent (95% interval) | rounds |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    lines += [f"| {model} | {_cells(one)} |" for model, found in differences.items() for one in found]
    return "\n".join(lines)


def _cells(one: Difference) -> str:
    percent = f"{one.percent:+.2f}% ({one.percent_low:+.2f} to {one.percent_high:+.2f})"
    calls = f"{one.way} | {one.way_us:.2f} | {one.than} | {one.than_us:.2f} | {one.difference_us:+.2f}"
    return f"{calls} | {percent} | {one.rounds}"


def _fastest(ways: Mapping[str, Way]) -> float:
    return min(min(_block(way, 1) for _ in range(5)) for way in ways.values())


def _block(way: Way, calls: int) -> float:
    call = way.call
    with way.inside():
        call()  # the caches hold another way's code
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - started) / calls
