"""How long a boot takes: the example service as a whole, and one model by each way to keep compiled code.

    make bench
    python -m benchmarks.boot --only models --rounds 1

The service: every round starts `bentoml serve` four times: eagerly, cold with an empty BENTOML_HOME, and twice warm
with that same home. The models: see boot_ways.py. Prints tables and writes benchmarks/results/boot.json and boot.png; a
part that is not run keeps its figures there. Decides nothing by a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from benchmarks import boot_plot, boot_ways, machine, spans
from tests.servers import Server

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "benchmarks" / "results"
KINDS = ("eager", "cold", "warm")
DEADLINE = 1800.0  # seconds for one boot
TIMES = {
    "start to ready": "ready_seconds",
    "first request": "first_request_seconds",
    "compile_model": "compile_model_seconds",
}
EAGER = {"services": {"SentenceEmbedder": {"torch_compile": {"enabled": False}}}}


@dataclass(frozen=True, slots=True)
class Boot:
    """One start of the server; all times in seconds."""

    kind: str  # eager | cold | warm
    outcome: str  # of the startup span: compiled | loaded | eager
    ready_seconds: float  # from the start of the process to the first 200 of /readyz
    compile_model_seconds: float  # the startup span
    first_request_seconds: float
    stages: dict[str, float]  # the startup span, split by what it was doing


def main() -> None:
    arguments = _arguments()
    if arguments.only != "models":
        _keep(arguments.into, _service(arguments.rounds))
    if arguments.only != "service":
        _keep(arguments.into, {"models": boot_ways.measure(arguments.rounds)})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="of the service: one eager, one cold, two warm boots; of a model: one boot in each way (default: 3)",
    )
    parser.add_argument("--only", choices=("service", "models"), help="only this part")
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    return parser.parse_args()


def _service(rounds: int) -> dict[str, object]:
    boots = [boot for round_ in range(rounds) for boot in _round(round_)]
    print(_table(boots))
    return {"machine": machine.describe(), "boots": [asdict(boot) for boot in boots], "medians": _medians(boots)}


def _keep(directory: Path, figures: Mapping[str, object]) -> None:
    """Lays the figures over those of earlier runs, and draws the service's if there are any."""
    result = boot_ways.keep(directory, figures)
    if "boots" in result:
        boot_plot.draw(result, directory / "boot.png")


def _round(number: int) -> Iterable[Boot]:
    with tempfile.TemporaryDirectory(prefix="boot") as name:
        home = Path(name)
        if number == 0:
            _boot("eager", home / "discarded")  # reads every file once, so that no kind pays for the disk
        yield _boot("eager", home / "eager")
        for kind in ("cold", "warm", "warm"):
            yield _boot(kind, home / "compiled")


def _boot(kind: str, home: Path) -> Boot:
    trace = home / f"trace-{time.monotonic_ns()}.jsonl"
    server = Server(CHECKOUT, home, env=_environment(kind, trace))
    started = time.monotonic()
    with server.start(wait=False):
        server.wait_ready(DEADLINE)
        ready_seconds = time.monotonic() - started
        first_request_seconds = _request(server)
    recorded = spans.read(trace)
    startup = spans.startup(recorded)
    boot = Boot(
        kind,
        startup.attributes.get("torch_compile.outcome", "") if startup else "",
        ready_seconds,
        startup.seconds if startup else 0.0,
        first_request_seconds,
        spans.stage_seconds(recorded),
    )
    print(f"{kind:6}{boot.outcome:10}ready after {ready_seconds:.1f} s", flush=True)
    return boot


def _environment(kind: str, trace: Path) -> dict[str, str]:
    # Inductor's default cache lies under TMPDIR: a new one each time, so that a boot is warm by our artifact only.
    env = {"TMPDIR": tempfile.mkdtemp(dir=trace.parent.parent, prefix="t")}
    env |= {"OTEL_TRACES_EXPORTER": "bentoml_compile_file", "BENTOML_COMPILE_TRACE_FILE": str(trace)}
    return env | ({"BENTOML_CONFIG_OVERRIDES": json.dumps(EAGER)} if kind == "eager" else {})


def _request(server: Server) -> float:
    started = time.monotonic()
    answer = httpx.post(f"{server.base_url}/embed", json={"texts": ["How long was the boot?"]}, timeout=120)
    answer.raise_for_status()
    return time.monotonic() - started


def _medians(boots: list[Boot]) -> dict[str, dict[str, object]]:
    return {kind: _median([boot for boot in boots if boot.kind == kind]) for kind in KINDS}


def _median(boots: list[Boot]) -> dict[str, object]:
    stages = {stage for boot in boots for stage in boot.stages}
    return {
        "ready_seconds": statistics.median(boot.ready_seconds for boot in boots),
        "compile_model_seconds": statistics.median(boot.compile_model_seconds for boot in boots),
        "first_request_seconds": statistics.median(boot.first_request_seconds for boot in boots),
        "stages": {stage: statistics.median(boot.stages.get(stage, 0.0) for boot in boots) for stage in sorted(stages)},
    }


def _table(boots: list[Boot]) -> str:
    """Markdown: one column a kind of boot, one row a time, medians with the range over the boots."""
    columns = {kind: [boot for boot in boots if boot.kind == kind] for kind in KINDS}
    rows = [[(f"{kind} ({len(column)} boots)") for kind, column in columns.items()], ["---"] * len(columns)]
    rows += [[_cell(boots, name) for boots in columns.values()] for name in _row_names(boots)]
    names = ["seconds", "---", *_row_names(boots)]
    return "\n".join(f"| {' | '.join([name, *row])} |" for name, row in zip(names, rows, strict=True))


def _row_names(boots: list[Boot]) -> list[str]:
    return [*TIMES, *boot_plot.in_order({stage for boot in boots for stage in boot.stages})]


def _cell(boots: list[Boot], name: str) -> str:
    seconds = [getattr(boot, TIMES[name]) if name in TIMES else boot.stages.get(name, 0.0) for boot in boots]
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})" if max(seconds) else "-"


if __name__ == "__main__":
    main()
