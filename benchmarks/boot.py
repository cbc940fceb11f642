"""How long the example service takes to boot: eager, cold (nothing stored) and warm (from the artifact).

    make bench

Every round starts `bentoml serve` four times: eagerly, cold with an empty BENTOML_HOME, and twice warm with that same
home. Prints a table and writes benchmarks/results/boot.json and boot.png. Decides nothing by a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from benchmarks import boot_plot, machine, spans
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
    boots = [boot for round_ in range(arguments.rounds) for boot in _round(round_)]
    result = {"machine": machine.describe(), "boots": [asdict(boot) for boot in boots], "medians": _medians(boots)}
    print(_table(boots))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "boot.json").write_text(json.dumps(result, indent=1) + "\n")
    boot_plot.draw(result, RESULTS / "boot.png")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=3, help="one eager, one cold and two warm boots each (default: 3)"
    )
    return parser.parse_args()


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
