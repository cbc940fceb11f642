"""From the SIGKILL of a worker to the first compiled answer of the next one: by hand with torch.compile, and ours.

    python -m benchmarks.restart
    python -m benchmarks.restart --rounds 1 --into somewhere   # to try it

all-MiniLM-L6-v2 with real weights as in mixed_load_services.py (eager, by hand, ours), one `bentoml serve` for each way
at a time, with one worker and a BENTOML_HOME and TMPDIR of its own. After a cold boot, CLIENTS clients ask for the same
batch all the time, and the worker is killed, again and again. BentoML's supervisor starts another one, which finds what
the first one left: ours its artifact, torch.compile Inductor's cache directory, which is kept here though many
deployments lose it. Both have compiled before they answer: torch.compile in a warm-up call in `__init__`.

The clock runs from the signal to the end of the first successful answer that was asked for after it; the part until the
new process exists is BentoML's. Errors are those of all clients: a connection cut off by the kill, or a status of 500
and above. Prints a table and writes benchmarks/results/restart.json, with the load of the machine that each way met.
Decides nothing by a time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks import machine
from tests.servers import Server

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "benchmarks" / "results"
WAYS = {"eager": "Eager", "by hand": "ByHand", "ours": "Ours"}  # way: service
TEXTS = ["How long is a piece of string?"] * 8  # the batch that the services warm up with
CLIENTS = 2
DEADLINE = 1800.0  # seconds for one boot, and for one request
SETTLED = 10  # answers between two kills


@dataclass(frozen=True, slots=True)
class Restart:
    """One kill; seconds from the signal."""

    to_process: float  # until BentoML has started another worker
    to_answer: float
    errors: int  # that clients saw


@dataclass(frozen=True, slots=True)
class Way:
    cold_boot: float  # seconds
    busy: float  # the machine's load average over a minute, before this way began
    served_by: dict[str, str]  # of the last worker: outcome and engine of its model; only ours says
    restarts: list[Restart]


@dataclass(frozen=True, slots=True)
class Answer:
    asked: float  # epoch seconds
    ended: float
    ok: bool


class Clients:
    """Ask all the time, each for the next answer when it has one; a `with` ends them."""

    def __init__(self, server: Server) -> None:
        self._url = f"{server.base_url}/embed"
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self.answers: list[Answer] = []

    def __enter__(self) -> Clients:
        for _ in range(CLIENTS):
            self._pool.submit(self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()

    def wait_for(self, count: int, asked_after: float) -> list[Answer]:
        """At least so many successful answers to what was asked after that time, in the order of their ends."""
        ends = time.monotonic() + DEADLINE
        while len(found := [one for one in list(self.answers) if one.ok and one.asked >= asked_after]) < count:
            if time.monotonic() > ends:
                raise TimeoutError(f"{len(found)} of {count} answers in {DEADLINE} s")
            time.sleep(0.01)
        return sorted(found, key=lambda one: one.ended)

    def _ask(self) -> None:
        while not self._over.is_set():
            asked = time.time()
            try:
                ok = httpx.post(self._url, json={"texts": TEXTS}, timeout=DEADLINE).is_success
            except httpx.TransportError:
                ok = False
            self.answers.append(Answer(asked, time.time(), ok))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="kills for each way (default: %(default)s)")
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder of restart.json (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill") as name:
        ways = {way: _measure(service, Path(name, service), arguments.rounds) for way, service in WAYS.items()}
    print(table(ways))
    arguments.into.mkdir(exist_ok=True)
    result = {
        "machine": machine.describe(),
        "clients": CLIENTS,
        "ways": {way: asdict(one) for way, one in ways.items()},
    }
    (arguments.into / "restart.json").write_text(json.dumps(result, indent=1) + "\n")


def table(ways: dict[str, Way]) -> str:
    rows = ["| way | kills | to process, s | to first answer, s | worst | errors | cold boot, s | load |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for name, way in ways.items():
        answers = [one.to_answer for one in way.restarts]
        rows.append(
            f"| {name} | {len(answers)} | {statistics.median(one.to_process for one in way.restarts):.2f} | "
            f"{statistics.median(answers):.2f} | {max(answers):.2f} | {sum(one.errors for one in way.restarts)} | "
            f"{way.cold_boot:.1f} | {way.busy:.1f} |"
        )
    return "\n".join(rows)


def _measure(service: str, home: Path, rounds: int) -> Way:
    busy = os.getloadavg()[0]
    temporary = home / "t"  # Inductor's cache lies under TMPDIR by default
    temporary.mkdir(parents=True)
    target = f"benchmarks.mixed_load_services:{service}"
    server = Server(CHECKOUT, home, target=target, env={"TMPDIR": str(temporary)})
    started = time.time()
    with server.start(wait=False):
        server.wait_ready(DEADLINE)
        cold_boot = time.time() - started
        with Clients(server) as clients:
            restarts = [_restart(server, clients) for _ in range(rounds)]
        way = Way(cold_boot, busy, _served_by(server), restarts)
    print(f"{service:8}{[round(one.to_answer, 1) for one in restarts]}", flush=True)
    return way


def _restart(server: Server, clients: Clients) -> Restart:
    clients.wait_for(SETTLED, time.time())
    worker, before = _worker(server, ()), len(clients.answers)
    killed = time.time()
    worker.kill()
    answered = clients.wait_for(1, killed)[0].ended
    process = _worker(server, [worker.pid])
    errors = sum(not one.ok for one in clients.answers[before:])
    return Restart(process.create_time() - killed, answered - killed, errors)


def _worker(server: Server, not_of: Sequence[int]) -> psutil.Process:
    [found] = [
        one for one in server.processes() if one.pid not in not_of and "_bentoml_impl.worker.service" in one.cmdline()
    ]
    return found


def _served_by(server: Server) -> dict[str, str]:
    startups = [one.labels for one in server.metrics() if one.name == "torch_compile_startup_seconds"]
    return {key: startups[-1][key] for key in ("outcome", "engine")} if startups else {}


if __name__ == "__main__":
    main()
