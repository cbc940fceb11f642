"""A service whose model is a stand-in: it reports a boot and calls as the core does, in milliseconds and without torch.

BOOT=raise, exit or crash ends `__init__` inside of the compile stage. GLOBAL_ENDPOINT sets up a global
OpenTelemetry provider, as `opentelemetry-instrument` would. FLUSH_SECONDS is how long a collector may hold up the end:
one that answers may take more than the 3 s of a worker where the machine is busy.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import bentoml

from bentoml_compile.bento import batching, boot
from bentoml_compile.listener import Call, Compile, Listeners, Timeline
from bentoml_compile.report import CompileReport

boot.install()
batching.install()
boot.FLUSH_SECONDS = float(os.environ.get("FLUSH_SECONDS", boot.FLUSH_SECONDS))

if endpoint := os.environ.get("GLOBAL_ENDPOINT"):
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    trace.set_tracer_provider(provider)


# BentoML refuses what it thinks would take longer, and one slow batch of a few makes it think that all would.
MAX_LATENCY = 600_000


@dataclass(frozen=True)
class Shape:
    model: str = "toy"
    engine: str = "jit"
    label: str = "x: float32[1]"
    prepared: bool = True


class Toy:
    """Doubles its inputs."""

    def __init__(self) -> None:
        self.listeners = Listeners(boot.listeners())
        self.shape = Shape()
        timeline = Timeline(self.listeners)
        with timeline.stage("startup", model="toy", mode="default"):
            with timeline.stage("lookup") as lookup:
                lookup.attributes["outcome"] = "miss"
            with timeline.stage("compile") as compile_:
                end_as_told(os.environ.get("BOOT", ""))
            timeline.past("phase.dynamo", compile_, compile_.started_ns, compile_.ended_ns or 0)
            timeline.event("fallback", reason="graph_break")
            report = CompileReport(
                "toy", "jit", "compiled", 1.5, "f" * 8, "default", fullgraph=False, phases={"dynamo": 0.5}
            )
            self.listeners.tell("ready", report)

    def __call__(self, xs: Sequence[float], recompiles: bool = False) -> list[float]:
        started = time.time_ns()
        time.sleep(0.005)  # as a model would: so that requests queue up behind a batch
        ended = time.time_ns()
        compiles = [Compile(started, (started + ended) // 2, "size mismatch at index 0")] if recompiles else []
        self.listeners.tell("called", Call(self.shape, started, ended, compiles, batch_size=len(xs)))
        return [2 * x for x in xs]


def end_as_told(how: str) -> None:
    if how == "raise":
        raise RuntimeError("no such weights")
    if how == "crash":
        atexit.register(os._exit, 1)  # runs before the exit handler of the tracer provider, which is older
        raise RuntimeError("out of luck")
    if how == "exit":
        raise SystemExit(3)


@bentoml.service(threads=4)
class Traced:
    def __init__(self) -> None:
        self.toy = Toy()
        self.held, self.released = threading.Semaphore(0), threading.Event()

    @bentoml.api
    def double(self, x: float) -> float:
        return self.toy([x])[0]

    @bentoml.api
    async def double_async(self, x: float) -> float:
        return self.toy([x])[0]

    @bentoml.api
    def recompile(self, x: float) -> float:
        return self.toy([x], recompiles=True)[0]

    @bentoml.api(batchable=True, max_batch_size=4, max_latency_ms=MAX_LATENCY)
    def batched(self, xs: list[float]) -> list[float]:
        """Fails where one of its numbers is negative, and compiles for one above 1,000."""
        doubled = self.toy(xs, recompiles=any(x > 1000 for x in xs))
        if any(x < 0 for x in xs):
            raise ValueError("a negative number")
        return doubled

    @bentoml.api(batchable=True, max_batch_size=4, max_latency_ms=MAX_LATENCY)
    def batched_twice(self, xs: list[float]) -> list[float]:
        return self.toy([x / 2 for x in self.toy(xs)])

    @bentoml.api
    def hold(self) -> None:
        """Keeps a thread until `release`."""
        self.held.release()
        self.released.wait()

    @bentoml.api
    async def holding(self, threads: int) -> None:
        """Waits until so many threads are kept."""
        for _ in range(threads):
            while not self.held.acquire(blocking=False):
                await asyncio.sleep(0.01)

    @bentoml.api
    async def release(self) -> float:
        """Says when, in seconds since the epoch."""
        now = time.time()
        self.released.set()
        return now

    @bentoml.api(batchable=True, max_batch_size=4, max_latency_ms=MAX_LATENCY)
    async def batched_async(self, xs: list[float]) -> list[float]:
        return self.toy(xs)


@bentoml.service
class Plain:
    """Compiles nothing."""

    @bentoml.api
    def echo(self, x: float) -> float:
        return x
