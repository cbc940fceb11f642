"""The ways to call a model that benchmarks/call.py compares, all made in one process from one model.

What is timed is what a service would write for one call: arguments by keyword, and `torch.inference_mode()` entered for
the call. A CompiledModel and a library's caller in ours enter it themselves, so for `eager`, `torch.compile` and the
bare libraries the call is wrapped in it. The bare libraries take their inputs as a list, know no signature and return a
list: they are the floor under a CompiledModel, not a way to serve.

Telemetry is what a worker of BentoML has: the listeners that the bento room makes there, BentoML's own tracer provider
with a batching exporter (which drops what it is given) and BentoML's Prometheus client in multi-process mode.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import bentoml
import torch
from bentoml._internal.configuration.containers import BentoMLContainer
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from bentoml_compile.bento import boot
from bentoml_compile.engines.aot.library import BoundLibrary, Library
from bentoml_compile.listener import Listener
from bentoml_compile.model import CompiledModel, compile_model
from tests.engines.aot import libraries

CPU = torch.device("cpu")
OFF, AGAIN, UNSAMPLED, SAMPLED = "ours, telemetry off", "ours, off again", "ours, unsampled", "ours, sampled"
TORCH = "torch.compile"
CONFIG = {"keep_eager_if_slower": False, "engine": "aot"}  # so that what is timed is compiled code

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Way:
    """A call without arguments, and the context that a thread is in while it calls, which is not timed."""

    call: Callable[[], object]
    inside: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


@contextmanager
def ways(model: torch.nn.Module, inputs: Inputs, listeners: Sequence[Listener], home: Path) -> Iterator[dict[str, Way]]:
    """Every way by its name, each already called once; `home` is an empty directory.

    The listeners are those of `worker_listeners`.
    """
    compiled = torch.compile(model)
    plain = {
        "eager": Way(_in_inference_mode(lambda: model(**inputs))),
        TORCH: Way(_in_inference_mode(lambda: compiled(**inputs))),
    }
    for way in plain.values():
        way.call()  # torch.compile compiles before anything of ours is in the process
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(_libraries(model, inputs, home))
        ours = stack.enter_context(_compiled_models(model, inputs, listeners, home))
        found = {**plain, **bare, **ours}
        for way in found.values():
            way.call()
        yield found


@contextmanager
def _libraries(model: torch.nn.Module, inputs: Inputs, home: Path) -> Iterator[dict[str, Way]]:
    tensors = tuple(inputs.values())
    path = libraries.compile_library(model, tensors, home, "model")
    weights = libraries.weights_of(model)
    binding = BoundLibrary(path, device=CPU, weights=weights)
    ours = Library(path, device=CPU, weights=weights)
    yield {
        "AOTInductor's binding": Way(_in_inference_mode(lambda: binding.run(tensors))),
        "ours, the bare library": Way(_in_inference_mode(lambda: ours.run(tensors))),
    }
    ours.close()
    binding.close()


@contextmanager
def _compiled_models(
    model: torch.nn.Module, inputs: Inputs, listeners: Sequence[Listener], home: Path
) -> Iterator[dict[str, Way]]:
    """Twice without listeners, for the noise between two equal things, and once with them."""
    off, again, told = (_compiled(model, inputs, name, told, home) for name, told in _named(listeners))
    yield {
        OFF: Way(lambda: off(**inputs)),
        AGAIN: Way(lambda: again(**inputs)),
        UNSAMPLED: Way(lambda: told(**inputs), lambda: _request(sampled=False)),
        SAMPLED: Way(lambda: told(**inputs), lambda: _request(sampled=True)),
    }
    for compiled in (off, again, told):
        compiled.close()


def _named(listeners: Sequence[Listener]) -> tuple[tuple[str, Sequence[Listener]], ...]:
    return (("off", ()), ("again", ()), ("told", listeners))


def _compiled(
    model: torch.nn.Module, inputs: Inputs, name: str, listeners: Sequence[Listener], home: Path
) -> CompiledModel:
    store = home / "store"
    if (store / "off").exists():  # artifacts stand under the model's name; those of "off" fit all
        shutil.copytree(store / "off", store / name)
    compiled = compile_model(
        model, example_inputs=[inputs], name=name, config=CONFIG, listeners=listeners, default_store=store
    )
    if compiled.report.engine != "aot":
        raise RuntimeError(f"not compiled ahead of time: {compiled.report}")
    return compiled


def _in_inference_mode(call: Callable[[], object]) -> Callable[[], object]:
    def inside() -> object:
        with torch.inference_mode():
            return call()

    return inside


# telemetry


@contextmanager
def worker_listeners() -> Iterator[list[Listener]]:
    """What the compiled models of a BentoML worker report to; BENTOML_HOME must name a directory that is theirs."""
    bentoml.server_context.service_name = "Benchmark"  # by which the bento room knows a worker
    BentoMLContainer.tracer_provider.get().add_span_processor(BatchSpanProcessor(_Dropped()))
    found = boot.listeners()
    if len(found) != 2:
        raise RuntimeError(f"a worker has a listener for spans and one for metrics, not {found}")
    yield found
    # else it would forget this process only at the interpreter's end, when it can no longer import what it needs
    BentoMLContainer.metrics_client.get().multiproc = False


class _Dropped(SpanExporter):
    """Takes spans as fast as it is given them; what a collector costs is not measured here."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


@contextmanager
def _request(*, sampled: bool) -> Iterator[None]:
    """The span of a request as BentoML's middleware makes it for a caller that has decided about sampling.

    BentoML's default sample rate is 0: a caller that asks for it is sampled, any other request is not.
    """
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    caller = NonRecordingSpan(SpanContext(trace_id=1, span_id=1, is_remote=True, trace_flags=flags))
    tracer = BentoMLContainer.tracer_provider.get().get_tracer("request")
    with tracer.start_as_current_span("request", context=trace.set_span_in_context(caller)) as span:
        if span.get_span_context().trace_flags.sampled != sampled:
            raise RuntimeError(f"the request's span should be sampled: {sampled}")
        yield
