from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import torch

from bentoml_compile.engines.dynamo import start_watching, watch
from bentoml_compile.listener import Call, Compile, Listeners, Timeline
from bentoml_compile.report import CompileReport, GraphBreak
from bentoml_compile.telemetry.metrics import MetricsListener, classify, forget_dead_workers
from tests import executable

Shape = partial(executable.Shape, engine="jit")


class Measured:
    """A metrics listener in a registry of its own."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        kinds = ("Counter", "Gauge", "Histogram")
        factory = {kind: partial(getattr(prometheus_client, kind), registry=self.registry) for kind in kinds}
        self.listener = MetricsListener(SimpleNamespace(**factory))

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"torch_compile_{name}", {"model": "encoder", **labels})


@pytest.fixture
def measured() -> Measured:
    return Measured()


def test_a_boot_is_not_ready_until_its_report(measured: Measured) -> None:
    break_ = GraphBreak("model.py", 3, "print(x)", "print", "take it out")
    report = CompileReport(
        "encoder", "jit", "compiled", 2.5, "f", "default", False, phases={"dynamo": 0.5}, graph_breaks=(break_,)
    )
    measured.listener.preparing("encoder")
    assert measured.value("ready") == 0
    measured.listener.ready(report)
    assert measured.value("ready") == 1
    assert measured.value("startup_seconds", engine="jit", outcome="compiled") == 2.5
    assert measured.value("phase_seconds", phase="dynamo") == 0.5
    assert measured.value("graph_breaks") == 1


@pytest.mark.parametrize("outcome", ["hit", "miss", "rejected", "disabled"])
def test_a_lookup_counts_by_its_outcome(measured: Measured, outcome: str) -> None:
    timeline = Timeline(Listeners([measured.listener]))
    with timeline.stage("startup", model="encoder"), timeline.stage("lookup") as lookup:
        lookup.attributes["outcome"] = outcome
    assert measured.value("artifact_lookups_total", outcome=outcome) == 1


def test_a_calls_compile_time_is_not_inference_time(measured: Measured) -> None:
    compiles = [Compile(0, 3_000_000_000, "tensor 'x' size mismatch at index 0")]
    measured.listener.called(Call(Shape(), 0, 5_000_000_000, compiles, queue_seconds=1.0))
    labels = {"engine": "jit", "shape": "x: float32[2, 4]"}
    assert measured.value("inference_seconds_sum", **labels) == pytest.approx(1.0)
    assert measured.value("recompiles_total", reason="shape") == 1


def test_a_call_that_raised_is_not_a_latency(measured: Measured) -> None:
    measured.listener.called(Call(Shape(), 0, 10))
    measured.listener.called(Call(Shape(), 0, 10, error=IndexError("out of range")))
    assert measured.value("inference_seconds_count", engine="jit", shape="x: float32[2, 4]") == 1


def test_a_plain_call_is_measured_like_any_other(measured: Measured) -> None:
    measured.listener.called(Call(Shape(), 0, 1_000_000_000))
    measured.listener.answered(Shape(), 0, 3_000_000_000)
    labels = {"engine": "jit", "shape": "x: float32[2, 4]"}
    assert measured.value("inference_seconds_sum", **labels) == pytest.approx(4.0)
    assert measured.value("inference_seconds_count", **labels) == 2


def test_fallbacks_and_unprepared_calls_count(measured: Measured) -> None:
    measured.listener.fallback("encoder", "guard")
    measured.listener.called(Call(Shape(), 0, 10, fallback="guard"))  # the same one, told as a call's
    measured.listener.unprepared("encoder", "eager")
    assert measured.value("fallbacks_total", reason="guard") == 1
    assert measured.value("unprepared_total", action="eager") == 1


def test_the_share_of_padding_is_measured_for_padded_calls_alone(measured: Measured) -> None:
    measured.listener.called(Call(Shape(), 0, 10, padding_ratio=0.25))
    measured.listener.called(Call(Shape(), 0, 10))
    assert measured.value("padding_ratio_sum", shape="x: float32[2, 4]") == 0.25
    assert measured.value("padding_ratio_count", shape="x: float32[2, 4]") == 1


def recompile_reason(first: tuple[object, ...], then: tuple[object, ...]) -> str:
    """What Dynamo itself says when a function compiled for `first` meets `then`."""
    fresh = eval("lambda x, y: x * y")  # a code object of its own, which Dynamo has not seen
    compiled: Any = torch.compile(fresh, backend="eager", dynamic=False)
    start_watching()  # not before: where nothing has imported Dynamo there is nothing to watch
    compiled(*first)
    watch.take()
    compiled(*then)
    [compile_] = watch.take()
    return compile_.reason


@pytest.mark.parametrize(
    ("first", "then", "word"),
    [
        ((torch.ones(2), 1.5), (torch.ones(3), 1.5), "shape"),
        ((torch.ones(2), 1.5), (torch.ones(2, 2), 1.5), "shape"),
        ((torch.ones(2), 1.5), (torch.ones(2, dtype=torch.float64), 1.5), "dtype"),
        ((torch.ones(2), 1.5), (torch.ones(2, device="meta"), 1.5), "dispatch_key"),
        ((torch.ones(2, 3), 1.5), (torch.ones(3, 2).T, 1.5), "stride"),
        ((torch.ones(2), 1.5), (torch.ones(2, requires_grad=True), 1.5), "grad_mode"),
        ((torch.ones(2), 1.5), (torch.ones(2), 2.5), "value"),
        ((torch.ones(2), torch.ones(2)), (torch.ones(2), 1), "type"),
    ],
)
def test_dynamos_own_words_become_few_reasons(first: tuple[object, ...], then: tuple[object, ...], word: str) -> None:
    assert classify(recompile_reason(first, then)) == word


def test_unknown_words_are_other() -> None:
    assert classify("the moon is full") == "other"
    assert classify("0/0: the moon  # x.dtype == torch.float32  # model.py:3 in forward") == "other"


def test_the_gauges_of_a_dead_worker_are_forgotten_and_its_counts_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [f"gauge_livemin_{ended.pid}.db", f"counter_{ended.pid}.db", f"gauge_livemin_{os.getpid()}.db"]
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    forget_dead_workers()
    assert {file.name for file in tmp_path.iterdir()} == set(names[1:])
