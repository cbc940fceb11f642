"""How much memory a process takes with one model loaded: eager, and ours after a warm boot.

    python -m benchmarks.memory

A fresh process for each way and round goes through the steps of a worker and reads its resident memory (RSS, of
/proc/self/smaps_rollup) after each, with garbage collected and free heap pages given back. `imports` is torch and
transformers, `bentoml` what every service imports besides; then the model, and one call under inference mode. Ours has
two more steps before its call: importing bentoml_compile, and compile_model with an artifact in the store. The input
stays alive, the output does not. Anonymous memory (heap, stacks, weights that are no file's) is given apart from the
rest (libraries, mapped weight files). RSS and not PSS is compared: PSS divides a page by the processes that map it, so
other processes with torch in them would change it; it is in the results. Prints tables and writes
benchmarks/results/memory.json. Decides nothing by a figure.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import fresh
from benchmarks.models import MODELS

RESULTS = Path(__file__).resolve().parent / "results"
SMAPS = Path("/proc/self/smaps_rollup")
EAGER, OURS = "eager", "ours"
FIELDS = {"Rss": "rss_mb", "Anonymous": "anonymous_mb", "Pss": "pss_mb"}
COMPILER = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx", "sympy")  # what serving needs none of

Step = dict[str, float]


@dataclass(slots=True)
class Process:
    """What one process took after each step, in MB (10^6 bytes), and which of COMPILER it had imported at its end."""

    steps: dict[str, Step] = field(default_factory=dict)
    imported: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        self.steps[name] = resident()


# in a process of its own


def serve(model_key: str, way: str, directory: str) -> dict[str, Any]:
    """A worker with one model that has answered one call; a `Process` as JSON.

    Raises:
        RuntimeError: ours found no artifact in the directory, or does not serve compiled code.
    """
    process = Process()
    import torch
    import transformers.modeling_utils  # noqa: F401  transformers itself imports lazily

    process.add("imports")
    import bentoml

    _ = bentoml.service  # imported when it is asked for, as every service does
    process.add("bentoml")
    from benchmarks.models import make

    model, inputs = make(model_key)
    process.add("model")
    call = model if way == EAGER else _compiled(model, inputs, directory, process)
    with torch.inference_mode():
        call(**inputs)
    process.add("call")
    process.imported = [name for name in COMPILER if name in sys.modules]
    return {"steps": process.steps, "imported": process.imported}


def _compiled(model: Any, inputs: Any, directory: str, process: Process) -> Any:
    from bentoml_compile.model import compile_model

    process.add("import bentoml_compile")
    config = {"keep_eager_if_slower": False}
    compiled = compile_model(model, example_inputs=[inputs], config=config, default_store=Path(directory))
    if compiled.report.outcome != "loaded" or compiled.report.engine == "eager":
        raise RuntimeError(f"not a warm boot: {compiled.report}")
    process.add("compile_model")
    return compiled


def compile_into(model_key: str, directory: str) -> None:
    """Fills the store."""
    from benchmarks.models import make
    from bentoml_compile.model import compile_model

    model, inputs = make(model_key)
    config = {"keep_eager_if_slower": False}
    compile_model(model, example_inputs=[inputs], config=config, default_store=Path(directory))


def resident() -> Step:
    """This process's memory in MB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = dict(line.split(":", 1) for line in SMAPS.read_text().splitlines()[1:])
    return {name: int(found[key].split()[0]) * 1024 / 1e6 for key, name in FIELDS.items()}


# here: rounds, results


def main() -> None:
    arguments = _arguments()
    models = {MODELS[key]: measure(key, arguments.rounds) for key in arguments.model or MODELS}
    print(table(models))
    from benchmarks import machine

    arguments.into.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine.describe(), "rounds": arguments.rounds, "models": models}
    (arguments.into / "memory.json").write_text(json.dumps(result, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each way (default: 3)")
    parser.add_argument("--model", action="append", choices=MODELS, help="this model; may be given more than once")
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder of memory.json (default: %(default)s)")
    return parser.parse_args()


def measure(key: str, rounds: int) -> dict[str, Any]:
    """Compiles one model, then runs the processes in turn; the medians of each way and the comparison."""
    with tempfile.TemporaryDirectory(prefix="memory") as store:
        env = {"PYTHONWARNINGS": "ignore"}
        fresh.run("benchmarks.memory:compile_into", key, store, env=env)
        ways = (EAGER, OURS)
        processes: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                processes[way].append(fresh.run("benchmarks.memory:serve", key, way, store, env=env))
    medians = {way: median(processes[way]) for way in ways}
    imported = {way: processes[way][-1]["imported"] for way in ways}
    return {"steps": medians, "compiler_imported": imported, **compare(medians)}


def median(processes: Sequence[Mapping[str, Any]]) -> dict[str, Step]:
    """The median of each figure after each step."""
    steps = processes[0]["steps"]
    return {
        step: {name: statistics.median(one["steps"][step][name] for one in processes) for name in figures}
        for step, figures in steps.items()
    }


def compare(medians: Mapping[str, Mapping[str, Step]]) -> dict[str, float]:
    """How much more ours takes at the end, of the whole process and of what it has beyond its imports."""
    eager, ours = (medians[way]["call"]["rss_mb"] for way in (EAGER, OURS))
    share = eager - medians[EAGER]["bentoml"]["rss_mb"]
    return {
        "eager_mb": eager,
        "ours_mb": ours,
        "difference_mb": ours - eager,
        "percent": 100 * (ours - eager) / eager,
        "eager_beyond_imports_mb": share,
        "percent_beyond_imports": 100 * (ours - eager) / share,
    }


def table(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a row a model with the end of each way, then a row a step with what it added."""
    lines = ["| model | eager, MB | ours, MB | difference | beyond imports: eager, MB | difference |"]
    lines.append("|---|---|---|---|---|---|")
    for model, found in models.items():
        difference = f"{found['difference_mb']:+.1f} MB ({found['percent']:+.1f}%)"
        beyond = f"{found['eager_beyond_imports_mb']:.1f} | {found['percent_beyond_imports']:+.1f}%"
        lines.append(f"| {model} | {found['eager_mb']:.1f} | {found['ours_mb']:.1f} | {difference} | {beyond} |")
    lines += ["", "| model | way | after | RSS, MB | added | anonymous, MB |", "|---|---|---|---|---|---|"]
    for model, found in models.items():
        for way, steps in found["steps"].items():
            lines += [f"| {model} | {way} | {cells} |" for cells in _step_cells(steps)]
    return "\n".join(lines)


def _step_cells(steps: Mapping[str, Step]) -> list[str]:
    before = [0.0, *(figures["rss_mb"] for figures in steps.values())]
    return [
        f"{step} | {figures['rss_mb']:.1f} | {figures['rss_mb'] - earlier:+.1f} | {figures['anonymous_mb']:.1f}"
        for (step, figures), earlier in zip(steps.items(), before, strict=False)
    ]


if __name__ == "__main__":
    main()
