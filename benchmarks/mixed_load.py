"""Mixed batch sizes and lengths against one service written three ways: eager, by hand with torch.compile, ours.

    python -m benchmarks.mixed_load
    python -m benchmarks.mixed_load --requests 60 --into somewhere   # to try it

all-MiniLM-L6-v2 with real weights (see mixed_load_services.py), `bentoml serve` on loopback, one way after the other.
For each way, with a BENTOML_HOME and a TMPDIR of its own: a boot with nothing kept (cold), the load, and a second boot
on what the first one left behind (warm; what torch.compile leaves is Inductor's cache). BentoML's and torch's own
settings apart from a longer request timeout: one worker, one request at a time, as many torch threads as torch takes.

The load: requests of 1 to 8 texts whose longest has 8 to 128 tokens (sizes uniform, lengths uniform in their
logarithm), the same seeded sequence for each way, sent by CLIENTS clients, each of which waits for its answer before it
asks again, from the moment /readyz answers 200. Nothing is discarded. A closed loop hides stalls from percentiles, as
nobody asks while all clients wait. So the longest stall (no answer to anybody) stands beside them.

Latency is what a client sees: queueing behind other clients' requests, tokenizer, model, JSON. "p50's batch time", of
which the aim allows 3 times: a request's batch time is what the service spent on it (tokenizer, model, pooling; no
queueing), and it is compared with the median batch time of its own class in the same way: equal batch size, lengths in
the same octave (8 to 15, 16 to 31, 32 to 63, 64 to 128 tokens), since a batch of 8 x 128 takes many times the time of
1 x 8 by nature. The p99.9 of these ratios is the figure; the p99.9 of latencies over their p50 is given too.

Compiles inside requests: Dynamo's own records that began after /readyz; for ours also torch_compile_recompiles_total.
Prints tables and writes mixed_load.json and mixed_load.png in benchmarks/results. Decides nothing by a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks import machine, mixed_load_figures, mixed_load_plot
from benchmarks.mixed_load_figures import Answer, Boots, Load
from benchmarks.mixed_load_requests import Request, requests
from tests.servers import Server, value

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "benchmarks" / "results"
WAYS = {"eager": "Eager", "by hand": "ByHand", "ours": "Ours"}  # way: service
CLIENTS = 4
COMPARED = 20  # every so many answers are compared with eager's
DEADLINE = 1800.0  # seconds for one boot, and for one request
LIMIT = 600.0  # seconds after which no way is sent another request


def main() -> None:
    arguments = _arguments()
    sequence = requests(arguments.requests)
    with tempfile.TemporaryDirectory(prefix="load") as name:
        _boot(_server("Eager", Path(name, "discarded")))  # reads every file once: no way pays for the disk
        loads = {way: _measure(way, service, Path(name, service), sequence) for way, service in WAYS.items()}
    print(mixed_load_figures.tables(loads))
    _write(arguments.into, loads)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="for each way (default: 1000)")
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    return parser.parse_args()


def _measure(way: str, service: str, home: Path, sequence: list[Request]) -> Load:
    """One way: a cold boot, the load, a warm boot."""
    server = _server(service, home)
    started = time.time()
    with server.start(wait=False):
        server.wait_ready(DEADLINE)
        ready = time.time()
        print(f"{way:8}ready after {ready - started:.1f} s", flush=True)
        answers, vectors = asyncio.run(_send(server.base_url, sequence))
        load = Load(
            answers=answers,
            vectors=vectors,
            boots=Boots(cold_seconds=ready - started, warm_seconds=0.0),
            ready_at=ready,
            compiles=_ask(server, "compiles"),
            threads=_ask(server, "threads"),
            metrics=_metrics(server),
        )
        print(f"{way:8}{len(answers)} answers in {answers[-1].ended:.1f} s", flush=True)
    load.boots.warm_seconds = _boot(server)
    print(f"{way:8}ready after {load.boots.warm_seconds:.1f} s, warm", flush=True)
    return load


def _server(service: str, home: Path) -> Server:
    # Inductor's cache lies under TMPDIR by default: one a way, so that the first boot is cold and the second is warm
    temporary = home / "t"
    temporary.mkdir(parents=True)
    return Server(CHECKOUT, home, target=f"benchmarks.mixed_load_services:{service}", env={"TMPDIR": str(temporary)})


def _boot(server: Server) -> float:
    """Seconds from the start of the process to the first 200 of /readyz."""
    started = time.time()
    with server.start(wait=False):
        server.wait_ready(DEADLINE)
        return time.time() - started


def _ask(server: Server, what: str) -> Any:
    return httpx.post(f"{server.base_url}/{what}", json={}, timeout=DEADLINE).raise_for_status().json()


def _metrics(server: Server) -> dict[str, Any]:
    """What ours says of itself: compiles inside of calls, calls of a shape not prepared, calls by what served them."""
    samples = server.metrics()
    count = "torch_compile_inference_seconds_count"
    engines = sorted({one.labels["engine"] for one in samples if one.name == count})
    return {
        "recompiles": value(samples, "torch_compile_recompiles_total"),
        "unprepared": value(samples, "torch_compile_unprepared_total"),
        "calls": {engine: value(samples, count, engine=engine) for engine in engines},
    }


# the load


async def _send(base_url: str, sequence: list[Request]) -> tuple[list[Answer], dict[int, Any]]:
    """All requests by CLIENTS clients; the answers as they came, and every COMPARED-th one's vectors by its number."""
    answers: list[Answer] = []
    vectors: dict[int, Any] = {}
    waiting = iter(enumerate(sequence))
    begin = time.perf_counter()

    async def ask(http: httpx.AsyncClient) -> None:
        for number, request in waiting:
            started = time.perf_counter() - begin
            if started > LIMIT:
                return
            response = await http.post("/embed", json={"texts": request.texts})
            answers.append(_answer(number, started, time.perf_counter() - begin, response))
            if number % COMPARED == 0 and response.is_success:
                vectors[number] = response.json()

    async with httpx.AsyncClient(base_url=base_url, timeout=DEADLINE) as http:
        await asyncio.gather(*(ask(http) for _ in range(CLIENTS)))
    return answers, vectors


def _answer(number: int, started: float, ended: float, response: httpx.Response) -> Answer:
    if not response.is_success:
        return Answer(number, started, ended, batch=0, length=0, batch_seconds=0.0, ok=False)
    batch, length = map(int, response.headers["batch-shape"].split("x"))
    return Answer(number, started, ended, batch, length, float(response.headers["batch-seconds"]), ok=True)


# results


def _write(into: Path, loads: Mapping[str, Load]) -> None:
    into.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": machine.describe(),
        "clients": CLIENTS,
        "ways": {way: _rounded(asdict(mixed_load_figures.figures(load))) for way, load in loads.items()},
        "compiles": {way: load.in_requests() for way, load in loads.items()},
        "metrics_of_ours": loads["ours"].metrics,
        "largest_difference_from_eager": mixed_load_figures.differences(loads),
        "aims": mixed_load_figures.aims(loads),
        "answers": {way: _columns(load.answers) for way, load in loads.items()},
    }
    (into / "mixed_load.json").write_text(_lists_on_one_line(json.dumps(result, indent=1)) + "\n")
    mixed_load_plot.draw(result, into / "mixed_load.png")


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(number, 4) for name, number in figures.items()}


def _columns(answers: list[Answer]) -> dict[str, list[Any]]:
    """In the order of the answers; times in milliseconds."""
    rows = [
        (one.number, one.batch, one.length, *(round(s * 1e3) for s in (one.started, one.ended)), one.batch_seconds)
        for one in answers
    ]
    names = ("number", "batch", "length", "started_ms", "ended_ms", "batch_ms")
    columns: dict[str, list[Any]] = {
        name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }
    columns["batch_ms"] = [round(seconds * 1e3, 1) for seconds in columns["batch_ms"]]
    return columns


def _lists_on_one_line(text: str) -> str:
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)


if __name__ == "__main__":
    main()
