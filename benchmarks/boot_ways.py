"""How long until a compiled model answers, by the way in which the compiled code was kept: torch's ways and ours.

    python -m benchmarks.boot_ways

The clock runs from "the eager model is in memory" to "the first compiled result is there", in a fresh process for each
way and round, ways in turn. Before the clock, for every way alike: importing torch, transformers and BentoML (a worker
has all of them), loading the model, making the inputs. `import bentoml_compile` is before the clock too, as a service
imports it at its top, beside torch; its time is reported on its own, and the ratio is also given with it counted.
Inside the clock: whatever the way needs, also the modules of Dynamo and Inductor that it is first to import, and the
first call, under inference mode. After it: a second call, the eager model's second call (no way's first call comes
after an eager one), and the comparison of both results.

    cold          torch.compile with nothing kept
    cachedir      torch.compile with the TORCHINDUCTOR_CACHE_DIR of an earlier process
    megacache     torch.compiler.load_cache_artifacts into an empty cache directory, then torch.compile
    aoti          torch._inductor.aoti_load_package, weights by reference; a package made with the default settings but
                  package_constants_in_so=False; into an empty cache directory, as on a new machine
    aoti-cachedir the same with the cache directory of the process that compiled it, which saves asking the compiler
                  what the CPU can do
    ours          bentoml_compile.model.compile_model with an artifact in its store, into an empty cache directory;
                  default config but keep_eager_if_slower=False, so that what is timed is compiled code

Each process has a TMPDIR of its own. Files have just been written: nobody waits for the disk. Prints a table and keeps
it in benchmarks/results/boot.json under "models". Decides nothing by a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import fresh, machine
from benchmarks.models import MODELS, Inputs, first_tensor, make

RESULTS = Path(__file__).resolve().parent / "results"
OURS = "ours"
WAYS = ("cold", "cachedir", "megacache", "aoti", "aoti-cachedir", OURS)
OUR_CONFIG = {"keep_eager_if_slower": False}
LARGEST_ERROR = 1e-3  # of values of about 1
MEGACACHE, PACKAGE, STORE = "megacache.bin", "package.pt2", "store"

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """One boot; all times in seconds."""

    seconds: float  # on the clock: the next two together
    ready_seconds: float  # until there is something to call; ours: compile_model
    first_call_seconds: float  # torch.compile compiles or loads in here
    second_call_seconds: float
    eager_call_seconds: float  # the eager model's second call
    import_seconds: float  # of bentoml_compile, before the clock; 0 for other ways
    max_error: float  # against the eager result


# in a process of its own: what is timed


def boot(model_key: str, way: str, directory: str) -> dict[str, float]:
    """One boot in the way; a `Sample` as JSON.

    Raises:
        RuntimeError: something was compiled that should have been found, or the result is not eager's.
    """
    import bentoml

    _ = bentoml.service  # imported when it is asked for, as every service does
    model, inputs = make(model_key)
    import_seconds = _seconds_of(_import_ours) if way == OURS else 0.0
    started = time.perf_counter()
    call = _PREPARE[way](model, inputs, Path(directory))
    ready = time.perf_counter()
    with torch.inference_mode():
        result = first_tensor(call(**inputs))
        ended = time.perf_counter()
        second_call_seconds = _seconds_of(lambda: call(**inputs))
        error = float((result - first_tensor(model(**inputs))).abs().max())
        eager_call_seconds = _seconds_of(lambda: model(**inputs))
    _check(way, call, error)
    return asdict(
        Sample(
            ended - started,
            ready - started,
            ended - ready,
            second_call_seconds,
            eager_call_seconds,
            import_seconds,
            error,
        )
    )


def _torch_compile(model: torch.nn.Module, inputs: Inputs, directory: Path) -> Call:
    compiled: Call = torch.compile(model)
    return compiled


def _megacache(model: torch.nn.Module, inputs: Inputs, directory: Path) -> Call:
    torch.compiler.load_cache_artifacts((directory / MEGACACHE).read_bytes())
    return _torch_compile(model, inputs, directory)


def _aoti(model: torch.nn.Module, inputs: Inputs, directory: Path) -> Call:
    package = torch._inductor.aoti_load_package(directory / PACKAGE)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = package.get_constant_fqns()
    package.load_constants({name: tensors[name] for name in names}, check_full_update=True, user_managed=True)
    return package


def _import_ours() -> None:
    import bentoml_compile.model  # noqa: F401


def _ours(model: torch.nn.Module, inputs: Inputs, directory: Path) -> Call:
    from bentoml_compile.model import compile_model

    return compile_model(model, example_inputs=[inputs], config=OUR_CONFIG, default_store=directory / STORE)


_PREPARE = {
    "cold": _torch_compile,
    "cachedir": _torch_compile,
    "megacache": _megacache,
    "aoti": _aoti,
    "aoti-cachedir": _aoti,
    OURS: _ours,
}


def _check(way: str, call: Any, error: float) -> None:
    if not error < LARGEST_ERROR:
        raise RuntimeError(f"{way}: the result differs from eager's by up to {error}")
    if way == OURS and (call.report.outcome, call.report.engine) not in (("loaded", "aot"), ("loaded", "jit")):
        raise RuntimeError(f"{way}: {call.report}")
    if way in ("cachedir", "megacache"):
        from torch._dynamo.utils import counters

        if (missed := counters["inductor"]["fxgraph_cache_miss"]) or not counters["inductor"]["fxgraph_cache_hit"]:
            raise RuntimeError(f"{way}: Inductor's cache missed {missed} times: {dict(counters['inductor'])}")


def _seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# in processes of their own: what the ways find


def compile_by_torch(model_key: str, directory: str) -> None:
    """Fills TORCHINDUCTOR_CACHE_DIR and writes the mega-cache."""
    model, inputs = make(model_key)
    with torch.inference_mode():
        torch.compile(model)(**inputs)
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is None:
        raise RuntimeError("torch.compiler has no cache artifacts to save")
    (Path(directory) / MEGACACHE).write_bytes(artifacts[0])


def compile_by_aoti(model_key: str, directory: str) -> None:
    """Writes the package, and runs it once for what that leaves in TORCHINDUCTOR_CACHE_DIR."""
    model, inputs = make(model_key)
    with torch.no_grad():
        program = torch.export.export(model, (), kwargs=inputs, strict=False)
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(Path(directory) / PACKAGE),
            inductor_configs={"aot_inductor.package_constants_in_so": False},
        )
        _aoti(model, inputs, Path(directory))(**inputs)


def compile_by_ours(model_key: str, directory: str) -> None:
    """Fills the store."""
    model, inputs = make(model_key)
    compiled = _ours(model, inputs, Path(directory))
    if compiled.report.outcome != "compiled":  # type: ignore[attr-defined]
        raise RuntimeError(f"nothing was compiled: {compiled.report}")  # type: ignore[attr-defined]


# here: rounds, results


def main() -> None:
    arguments = _arguments()
    keep(arguments.into, {"models": measure(arguments.rounds, arguments.model or list(MODELS))})


def keep(directory: Path, figures: Mapping[str, object]) -> dict[str, Any]:
    """Writes boot.json: the figures, and what earlier runs put there under other keys. Returns all of it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "boot.json"
    result = {**(json.loads(path.read_text()) if path.exists() else {}), **figures}
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="boots in each way (default: 3)")
    parser.add_argument("--model", action="append", choices=MODELS, help="this model; may be given more than once")
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder of boot.json (default: %(default)s)")
    return parser.parse_args()


def measure(rounds: int, keys: Sequence[str] = tuple(MODELS)) -> dict[str, Any]:
    """Boots each model in each way and prints the tables; returns what boot.json has under "models"."""
    samples = {MODELS[key]: _boot_all(key, rounds) for key in keys}
    print(table(samples))
    ways = {model: {way: summary(of_way) for way, of_way in by_way.items()} for model, by_way in samples.items()}
    ratios = {model: ratio(by_way) for model, by_way in samples.items()}
    return {"machine": machine.describe(), "config": OUR_CONFIG, "ways": ways, "ratios": ratios}


def _boot_all(key: str, rounds: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="ways") as name:
        directory = Path(name)
        for compiler in ("torch", "aoti", "ours"):
            seconds = _seconds_of(lambda by=compiler: _compile(by, key, directory))  # type: ignore[misc]
            print(f"{MODELS[key]}: compiled by {compiler} in {seconds:.0f} s", flush=True)
        for _ in range(rounds):
            for way in WAYS:
                samples[way].append(_boot(key, way, directory))
                print(f"{MODELS[key]}: {way:14}{samples[way][-1].seconds:8.3f} s", flush=True)
    return samples


def _compile(compiler: str, key: str, directory: Path) -> None:
    env = _environment(directory, cache=directory / f"cache-{compiler}")
    fresh.run(f"benchmarks.boot_ways:compile_by_{compiler}", key, directory, env=env)


def _boot(key: str, way: str, directory: Path) -> Sample:
    with tempfile.TemporaryDirectory(dir=directory) as empty:
        kept = {"cachedir": directory / "cache-torch", "aoti-cachedir": directory / "cache-aoti"}
        env = _environment(Path(empty), cache=kept.get(way, Path(empty) / "cache"))
        return Sample(**fresh.run("benchmarks.boot_ways:boot", key, way, directory, env=env))


def _environment(temporary: Path, *, cache: Path) -> Mapping[str, str]:
    return {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONWARNINGS": "ignore"}


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """The median of each time, and all samples."""
    rows = [asdict(sample) for sample in samples]
    return {"median": {name: statistics.median(row[name] for row in rows) for name in rows[0]}, "samples": rows}


def ratio(samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """How many times ours the best other way takes, by medians; also with our import counted."""
    medians = {way: statistics.median(one.seconds for one in of_way) for way, of_way in samples.items()}
    best = min((way for way in medians if way != OURS), key=lambda way: medians[way])
    imported = statistics.median(one.seconds + one.import_seconds for one in samples[OURS])
    return {
        "best_other": best,
        "best_other_over_ours": medians[best] / medians[OURS],
        "best_other_over_ours_with_import": medians[best] / imported,
    }


def table(samples: Mapping[str, Mapping[str, Sequence[Sample]]]) -> str:
    """Markdown: medians in seconds, with the range of the whole."""
    lines = [
        "| model | way | first result, s | ready | first call | second call | eager's call | our import | times ours |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model, by_way in samples.items():
        ours = statistics.median(one.seconds for one in by_way[OURS])
        lines += [f"| {model} | {way} | {_cells(of_way, ours)} |" for way, of_way in by_way.items()]
    return "\n".join(lines)


def _cells(samples: Sequence[Sample], ours: float) -> str:
    median = summary(samples)["median"]
    seconds = [one.seconds for one in samples]
    names = ("ready_seconds", "first_call_seconds", "second_call_seconds", "eager_call_seconds")
    imported = f"{median['import_seconds']:.3f}" if median["import_seconds"] else "-"
    cells = [f"{median['seconds']:.3f} ({min(seconds):.3f} to {max(seconds):.3f})"]
    cells += [f"{median[name]:.3f}" for name in names]
    return " | ".join([*cells, imported, f"{median['seconds'] / ours:.1f}"])


if __name__ == "__main__":
    main()
