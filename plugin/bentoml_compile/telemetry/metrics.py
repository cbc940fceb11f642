"""Boots and calls as Prometheus metrics.

    listeners = Listeners([MetricsListener(prometheus_client)])

Make it once per process: Prometheus refuses a second metric of the same name.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from bentoml_compile.listener import Call, Executable, Listener, Stage
from bentoml_compile.report import CompileReport
from bentoml_compile.telemetry.attributes import split_seconds

if TYPE_CHECKING:
    from prometheus_client import Counter

# A compiled small model answers in well under a millisecond; a recompile inside a call may take the last bucket.
BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class MetricFactory(Protocol):
    """`prometheus_client` itself, or BentoML's client of the same names."""

    @property
    def Counter(self) -> Callable[..., Any]: ...
    @property
    def Gauge(self) -> Callable[..., Any]: ...
    @property
    def Histogram(self) -> Callable[..., Any]: ...


class MetricsListener(Listener):
    """Over several workers, counters and histograms add up; a gauge shows the slowest, or least ready, live worker."""

    def __init__(self, factory: MetricFactory) -> None:
        forget_dead_workers()
        slowest = "livemax"
        self._startup_seconds = factory.Gauge(
            "torch_compile_startup_seconds",
            "The last compile_model call, from its start to a model that can answer",
            ["model", "engine", "outcome"],
            multiprocess_mode=slowest,
        )
        self._phase_seconds = factory.Gauge(
            "torch_compile_phase_seconds",
            "That call's compiling by phase, each without the phases inside of it",
            ["model", "phase"],
            multiprocess_mode=slowest,
        )
        self._graph_breaks = factory.Gauge(
            "torch_compile_graph_breaks",
            "Graph breaks that were found at start-up",
            ["model"],
            multiprocess_mode=slowest,
        )
        self._shapes = factory.Gauge(
            "torch_compile_prepared_shapes",
            "Prepared shapes by what serves them",
            ["model", "engine"],
            multiprocess_mode=slowest,
        )
        self._ready = factory.Gauge(
            "torch_compile_ready",
            "1 once start-up is over in every worker, 0 before that",
            ["model"],
            multiprocess_mode="livemin",
        )
        self._inference_seconds = factory.Histogram(
            "torch_compile_inference_seconds",
            "Calls that returned, on the host, without compiling and queueing",
            ["model", "engine", "shape"],
            buckets=BUCKETS,
        )
        self._padding_ratio = factory.Histogram(
            "torch_compile_padding_ratio",
            "Of padded calls: the share of their padded inputs that is no data",
            ["model", "shape"],
            buckets=(0.1, 0.25, 0.5, 0.75, 0.9, 1.0),
        )
        self._recompiles: Counter = factory.Counter(
            "torch_compile_recompiles_total", "Compiles inside of calls", ["model", "reason"]
        )
        self._lookups: Counter = factory.Counter(
            "torch_compile_artifact_lookups_total", "Searches for an artifact at start-up", ["model", "outcome"]
        )
        self._unprepared: Counter = factory.Counter(
            "torch_compile_unprepared_total", "Calls whose shape was not prepared", ["model", "action"]
        )
        self._fallbacks: Counter = factory.Counter(
            "torch_compile_fallbacks_total", "Times that eager code took over", ["model", "reason"]
        )
        self._looked_up: dict[str, str] = {}
        self._observe: dict[tuple[str, str, str], Callable[[float], None]] = {}

    def preparing(self, model: str) -> None:
        self._ready.labels(model).set(0)

    def stage_ended(self, stage: Stage) -> None:
        # a metric's first value makes a file: not inside of a boot of milliseconds
        if stage.name == "lookup" and "outcome" in stage.attributes:
            self._looked_up[_model(stage)] = str(stage.attributes["outcome"])
        elif stage.parent is None and (outcome := self._looked_up.pop(_model(stage), None)) is not None:
            self._lookups.labels(_model(stage), outcome).inc()

    def ready(self, report: CompileReport) -> None:
        self._startup_seconds.labels(report.model, report.engine, report.outcome).set(report.seconds)
        for phase, seconds in report.phases.items():
            self._phase_seconds.labels(report.model, phase).set(seconds)
        self._graph_breaks.labels(report.model).set(len(report.graph_breaks))
        self._ready.labels(report.model).set(1)
        for engine in ("jit", "aot", "eager"):
            served = sum(shape.engine == engine for shape in report.shapes)
            self._shapes.labels(report.model, engine).set(served)
        for action in ("eager", "reject", "compile"):  # so that an alert sees the first one
            self._unprepared.labels(report.model, action)

    def fallback(self, model: str, reason: str) -> None:
        self._fallbacks.labels(model, reason).inc()

    def unprepared(self, model: str, action: str) -> None:
        self._unprepared.labels(model, action).inc()

    def called(self, call: Call) -> None:
        executable = call.executable
        for compile_ in call.compiles:
            self._recompiles.labels(executable.model, classify(compile_.reason)).inc()
        if call.padding_ratio is not None:
            self._padding_ratio.labels(executable.model, executable.label).observe(call.padding_ratio)
        if call.error is None:
            key = (executable.model, call.engine, executable.label)
            (self._observe.get(key) or self._observe_by(key))(split_seconds(call)["inference_seconds"])

    def answered(self, executable: Executable, started_ns: int, ended_ns: int) -> None:
        key = (executable.model, executable.engine, executable.label)
        (self._observe.get(key) or self._observe_by(key))((ended_ns - started_ns) / 1e9)

    def _observe_by(self, key: tuple[str, str, str]) -> Callable[[float], None]:
        # labels() takes a lock and builds strings: once, not per call
        observe: Callable[[float], None] = self._inference_seconds.labels(*key).observe
        return self._observe.setdefault(key, observe)


# Words of Dynamo's guard failures (torch 2.13), in order of precedence; the whole text is on the recompile span.
_REASONS = (
    ("first_compile", r"^first compile of frame"),
    ("cudagraphs", r"^cudagraph"),
    ("limit", r"(recompile|cache_size)_limit"),
    ("dtype", r"dtype"),
    ("dispatch_key", r"dispatch key"),  # another device, or training where inference was compiled
    ("device", r"device"),
    ("grad_mode", r"requires_grad|grad_mode|inference_mode"),
    ("global_state", r"GLOBAL_STATE|global state|torch_function|deterministic|autocast|num_threads"),
    ("stride", r"stride"),
    ("shape", r"(size|rank) mismatch|size\(\)|shape|\bEq\(|\bNe\("),
    ("type", r"expected type|type_id|TYPE_MATCH"),
    ("object", r"obj_id|ID_MATCH"),
    ("value", r"==|len\(|EQUALS_MATCH"),
)


def classify(reason: str) -> str:
    """One of few words for Dynamo's free text, fit for a label; "other" for what is not known."""
    guard = reason.split("\n", 1)[0].split("  #", 1)[0]  # the user's source line and stack follow
    return next((word for word, pattern in _REASONS if re.search(pattern, guard)), "other")


def forget_dead_workers() -> None:
    """Takes the gauges of workers that died out of Prometheus' multi-process directory.

    BentoML (checked with 1.4.40) does it at the start of a server only, so a crashed worker's `ready` would stay
    for as long as the server lives. Without multi-process mode there is nothing to do.
    """
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR", "")
    if not directory:
        return
    from prometheus_client.multiprocess import mark_process_dead

    pids = {int(found[1]) for file in Path(directory).glob("*.db") if (found := re.search(r"_(\d+)\.db$", file.name))}
    for pid in pids:
        if not psutil.pid_exists(pid):
            with contextlib.suppress(FileNotFoundError):  # another worker was faster
                mark_process_dead(pid, directory)  # type: ignore[no-untyped-call]


def _model(stage: Stage) -> str:
    while stage.parent is not None:
        stage = stage.parent
    return str(stage.attributes.get("model", "model"))
