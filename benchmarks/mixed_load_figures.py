"""What benchmarks/mixed_load.py says of a load: percentiles, stalls, compiles inside requests, and the aims."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

EAGER, BY_HAND, OURS = "eager", "by hand", "ours"


@dataclass(frozen=True, slots=True)
class Answer:
    """One request; times in seconds since the load began."""

    number: int  # of the request in the sequence
    started: float
    ended: float
    batch: int
    length: int  # tokens of the longest text
    batch_seconds: float  # the service's own time for it
    ok: bool

    @property
    def seconds(self) -> float:
        """The latency."""
        return self.ended - self.started

    @property
    def kind(self) -> tuple[int, int]:
        """The class whose batch times are compared: the batch size, and the octave of the length."""
        return self.batch, min(self.length, 127).bit_length()


@dataclass(slots=True)
class Boots:
    """From the start of the process to the first 200 of /readyz, in seconds."""

    cold_seconds: float
    warm_seconds: float


@dataclass(slots=True)
class Load:
    """All that was measured of one way."""

    answers: list[Answer]  # as they came
    vectors: dict[int, Any]  # of some requests, by their number
    boots: Boots
    ready_at: float  # seconds since the epoch
    compiles: list[dict[str, Any]]  # Dynamo's: at (seconds since the epoch), seconds, reason
    threads: int  # torch's, in the worker
    metrics: dict[str, Any]

    def in_requests(self) -> list[dict[str, Any]]:
        """The compiles that began after /readyz: `after` so many seconds, for how many, and why."""
        late = [one for one in self.compiles if one["at"] > self.ready_at]
        return [
            {"after": one["at"] - self.ready_at, "seconds": one["seconds"], "reason": _guard(one["reason"])}
            for one in late
        ]


def _guard(reason: str) -> str:
    """The guard that failed, without Dynamo's advice and the user's stack behind it."""
    return reason.split("\n", 1)[0].split("  #", 1)[0]


@dataclass(frozen=True, slots=True)
class Figures:
    """One column of the table; all times in seconds."""

    answers: int
    errors: int
    threads: int
    cold_boot: float
    warm_boot: float
    requests_per_second: float
    p50: float
    p99: float
    p99_9: float
    longest_request: float
    longest_stall: float  # without an answer to any client
    p99_9_over_p50: float
    batch_p50: float
    batch_ratio_p99_9: float  # batch time over the median of its class
    compiles_in_requests: int


def figures(load: Load) -> Figures:
    """The figures of one way; failed requests count as errors alone."""
    good = [one for one in load.answers if one.ok]
    latencies = [one.seconds for one in good]
    ends = [0.0, *(one.ended for one in load.answers)]
    return Figures(
        answers=len(good),
        errors=len(load.answers) - len(good),
        threads=load.threads,
        cold_boot=load.boots.cold_seconds,
        warm_boot=load.boots.warm_seconds,
        requests_per_second=len(good) / ends[-1],
        p50=percentile(latencies, 50),
        p99=percentile(latencies, 99),
        p99_9=percentile(latencies, 99.9),
        longest_request=max(latencies),
        longest_stall=max(after - before for before, after in pairwise(ends)),
        p99_9_over_p50=percentile(latencies, 99.9) / percentile(latencies, 50),
        batch_p50=percentile([one.batch_seconds for one in good], 50),
        batch_ratio_p99_9=percentile(batch_ratios(good), 99.9),
        compiles_in_requests=len(load.in_requests()),
    )


def batch_ratios(answers: Sequence[Answer]) -> list[float]:
    """Each answer's batch time over the median batch time of its class."""
    kinds: dict[tuple[int, int], list[float]] = defaultdict(list)
    for one in answers:
        kinds[one.kind].append(one.batch_seconds)
    medians = {kind: statistics.median(times) for kind, times in kinds.items()}
    return [one.batch_seconds / medians[one.kind] for one in answers]


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest of the sorted values, in proportion."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def differences(loads: Mapping[str, Load]) -> dict[str, float]:
    """The largest difference of a component of an answer's unit vectors from eager's, over the answers compared."""
    eager = loads[EAGER].vectors
    return {
        way: max(_difference(vectors, eager[number]) for number, vectors in load.vectors.items() if number in eager)
        for way, load in loads.items()
        if way != EAGER
    }


def _difference(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    rows = zip(left, right, strict=True)
    return max(abs(a - b) for row in rows for a, b in zip(*row, strict=True))


def aims(loads: Mapping[str, Load]) -> dict[str, Any]:
    """The aims for ours, with the figures that they stand on; a shortest compile of None: nothing was compiled."""
    ours = figures(loads[OURS])
    shortest = min((one["seconds"] for one in loads[BY_HAND].compiles), default=None)
    return {
        "compiles_in_requests": ours.compiles_in_requests + loads[OURS].metrics["recompiles"],
        "batch_ratio_p99_9": ours.batch_ratio_p99_9,
        "longest_request": ours.longest_request,
        "shortest_compile_by_hand": shortest,
        "met": {
            "no compile inside a request": not ours.compiles_in_requests and not loads[OURS].metrics["recompiles"],
            "p99.9 within 3 times p50's batch time": ours.batch_ratio_p99_9 <= 3,
            "no request over the shortest compile by hand": shortest is not None and ours.longest_request <= shortest,
        },
    }


# in words

_ROWS = {
    "boot, cold, s": "cold_boot",
    "boot, warm, s": "warm_boot",
    "answers": "answers",
    "errors": "errors",
    "requests a second": "requests_per_second",
    "latency p50, ms": "p50",
    "latency p99, ms": "p99",
    "latency p99.9, ms": "p99_9",
    "longest request, ms": "longest_request",
    "longest stall, ms": "longest_stall",
    "latency p99.9 over p50": "p99_9_over_p50",
    "batch time p50, ms": "batch_p50",
    "batch time over its class's p50, p99.9": "batch_ratio_p99_9",
    "compiles inside requests": "compiles_in_requests",
    "torch threads": "threads",
}


def tables(loads: Mapping[str, Load]) -> str:
    """Markdown: a column a way; then the compiles, what served ours, and the aims."""
    columns = {way: figures(load) for way, load in loads.items()}
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {row} | {' | '.join(_cell(row, getattr(one, name)) for one in columns.values())} |"
        for row, name in _ROWS.items()
    ]
    return "\n".join([*lines, "", *_remarks(loads)])


def _cell(row: str, number: float) -> str:
    if isinstance(number, int):
        return str(number)
    return f"{number * 1e3:,.0f}" if row.endswith("ms") else f"{number:.1f}"


def _remarks(loads: Mapping[str, Load]) -> list[str]:
    lines = [
        f"{way}: a compile inside a request, {one['after']:.0f} s after /readyz, {one['seconds']:.1f} s: "
        f"{one['reason']}"
        for way, load in loads.items()
        for one in load.in_requests()
    ]
    lines += [f"{way}: vectors within {most:.1e} of eager's" for way, most in differences(loads).items()]
    lines.append(f"ours, by its own metrics: {loads[OURS].metrics}")
    found = aims(loads)
    lines += [f"aim: {aim}: {'met' if met else 'not met'}" for aim, met in found["met"].items()]
    if found["shortest_compile_by_hand"] is not None:
        lines.append(f"the shortest compile by hand took {found['shortest_compile_by_hand']:.1f} s")
    return lines
