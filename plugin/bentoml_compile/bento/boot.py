"""The worker's start and end in traces, and who listens to its compiled models.

`install()` is called when bentoml_compile is imported, so that the worker that is about to construct the service has
the span `bentoml.worker.boot`; `listeners()` is what `compile_model` reports to.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import psutil
from bentoml._internal.configuration.containers import BentoMLContainer
from bentoml._internal.context import server_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, Tracer

from bentoml_compile.background import background
from bentoml_compile.engines.limits import ProcessEnds
from bentoml_compile.listener import Listener
from bentoml_compile.telemetry.attributes import fail
from bentoml_compile.telemetry.metrics import MetricFactory, MetricsListener
from bentoml_compile.telemetry.provider import always_on, attach_exporter, flush
from bentoml_compile.telemetry.spans import SpanListener

logger = logging.getLogger("bentoml_compile")

TRACER = "bentoml_compile"
INTERRUPT_SECONDS = 2.0  # what a compile in the background may add to it, where it is deep in native code
FLUSH_SECONDS = 3.0  # what an unreachable collector may add to a worker's end; Kubernetes kills after 30

AppMethod = Callable[[Any, Any], Awaitable[None]]


class Boot:
    """The span of one worker's boot. It begins only when a model is compiled in it: other services get no span."""

    def __init__(self, started_ns: int) -> None:
        self._started_ns = started_ns
        self._spans: list[Span] = []  # the first counts; threads that begin at once may make more, which never end

    def context(self, tracer: Tracer) -> Context:
        """The context for spans of this boot."""
        if not self._spans:
            self._spans.append(tracer.start_span("bentoml.worker.boot", context=Context(), start_time=self._started_ns))
        return trace.set_span_in_context(self._spans[0])

    def end(self, error: BaseException | None) -> None:
        for span in self._spans[:1]:
            if error is not None:
                fail(span, error, None)
            span.end()


class _Process:
    """What Prometheus and BentoML allow once per process, and therefore the only state here."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # a service may compile its models in threads
        self.is_worker = False
        self.boot: Boot | None = None
        self.metrics: MetricsListener | None = None
        self.spans: SpanListener | None = None
        self.provider: TracerProvider | None = None


_process = _Process()


def listeners() -> list[Listener]:
    """Who hears of this process's compiled models: spans, if anything exports them, and metrics.

    In a worker they go through BentoML's tracer provider and /metrics; elsewhere (a script, a test) through the
    global OpenTelemetry provider, if one was set, and Prometheus' default registry. Never raises.
    """
    with _process.lock:
        found: list[Listener | None] = [_try(_span_listener), _try(_metrics_listener)]
    return [listener for listener in found if listener is not None]


def install() -> None:
    """Makes BentoML's workers trace their boot and lose no span at their end; once, however often it is called."""
    try:
        _patch_app_factory()
        _patch_legacy_app_factories()
    except (ImportError, AttributeError) as error:
        logger.warning(
            "tracing: no bentoml.worker.boot span, this BentoML starts its workers in another way: %s", error
        )


def _try(make: Callable[[], Listener | None]) -> Listener | None:
    try:
        return make()
    except Exception:
        logger.exception("telemetry: %s failed; serving goes on without", make.__name__.strip("_"))
        return None


def _span_listener() -> SpanListener | None:
    if _process.spans is not None:
        return _process.spans
    if _in_worker():
        base = BentoMLContainer.tracer_provider.get()
        if not attach_exporter(base):
            return None
        _process.provider = always_on(base)
        tracer = _process.provider.get_tracer(TRACER)
        _process.spans = SpanListener(tracer, boot=functools.partial(_boot_context, tracer))
        return _process.spans
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        return None
    return SpanListener(always_on(provider).get_tracer(TRACER))


def _metrics_listener() -> MetricsListener:
    if _process.metrics is None:
        _process.metrics = MetricsListener(_metric_factory())
    return _process.metrics


def _metric_factory() -> MetricFactory:
    if _in_worker():
        client: MetricFactory = BentoMLContainer.metrics_client.get()
        return client
    import prometheus_client  # not at the top: it reads its environment, which BentoML sets, when imported

    return prometheus_client


def _in_worker() -> bool:
    """Whether BentoML serves in this process: a new-style worker, or a legacy runner's, which names its service."""
    return _process.is_worker or server_context.service_name is not None


def _boot_context(tracer: Tracer) -> Context | None:
    boot = _process.boot  # once: a thread may go on with a model after the boot
    return None if boot is None else boot.context(tracer)


def _process_start_ns() -> int:
    """When this worker's process began; where BentoML's app runs in somebody else's process (a test), now."""
    now = time.time_ns()
    if server_context.service_name is None:
        return now
    return min(now, int(psutil.Process().create_time() * 1e9))


@contextlib.contextmanager
def _booting() -> Iterator[None]:
    _process.is_worker = True
    boot = _process.boot = Boot(_process_start_ns())
    _try(_span_listener)  # where nothing is compiled, too: a request's trace begins in the service that passes it on
    try:
        yield
    except BaseException as error:
        boot.end(error)
        _flush(FLUSH_SECONDS)  # now: the process is about to end, and not every end runs exit handlers
        if isinstance(error, (ProcessEnds, KeyboardInterrupt)):
            logger.info("told to end during the boot")
            raise type(error)(*error.args) from None  # a hundred lines of the compiler's traceback say nothing here
        raise
    else:
        boot.end(None)
        _flush(0)
    finally:
        _process.boot = None


async def _traced_boot(create_instance: AppMethod, factory: Any, app: Any) -> None:
    with _booting():
        await create_instance(factory, app)


async def _flushed_end(destroy_instance: AppMethod, factory: Any, app: Any) -> None:
    try:
        await destroy_instance(factory, app)
    finally:
        await _flush_at_end()


async def _flush_at_end() -> None:
    if server_context.service_name is not None:  # else somebody else's process (a test), which goes on
        await asyncio.to_thread(background.end, INTERRUPT_SECONDS)
    await asyncio.to_thread(_flush, FLUSH_SECONDS)


def _flush(seconds: float) -> None:
    if _process.provider is not None and not flush(_process.provider, seconds) and seconds:
        logger.warning("telemetry: the trace exporter took more than %s s; its last spans may be lost", seconds)


def _patch_app_factory() -> None:
    """Wraps the construction and the end of a worker's service instance.

    `ServiceAppFactory` is private; checked with BentoML 1.4.40. Where it is missing, boots have no
    `bentoml.worker.boot` span, their startup spans are roots, and up to 5 s of spans are lost when a worker is stopped.
    """
    from _bentoml_impl.server.app import ServiceAppFactory  # type: ignore[import-untyped]

    if hasattr(ServiceAppFactory.create_instance, "__bentoml_compile__"):
        return
    create, destroy = ServiceAppFactory.create_instance, ServiceAppFactory.destroy_instance
    ServiceAppFactory.create_instance = _wrapped(create, _traced_boot)
    ServiceAppFactory.destroy_instance = _wrapped(destroy, _flushed_end)


def _patch_legacy_app_factories() -> None:
    """The same for a legacy runner's process, and for a legacy service's API worker, in which embedded runners live.

    Both make their runners in `lifespan`. They are private; checked with BentoML 1.4.40.
    """
    from bentoml._internal.server.http_app import HTTPAppFactory
    from bentoml._internal.server.runner_app import RunnerAppFactory

    for factory in (HTTPAppFactory, RunnerAppFactory):
        if not hasattr(factory.lifespan, "__bentoml_compile__"):
            factory.lifespan = _traced_lifespan(factory.lifespan)  # type: ignore[method-assign]


def _traced_lifespan(lifespan: Callable[[Any, Any], AbstractAsyncContextManager[None]]) -> Any:
    @contextlib.asynccontextmanager
    @functools.wraps(lifespan)
    async def traced(self: Any, app: Any) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(_flush_at_end)
            with _booting():
                await stack.enter_async_context(lifespan(self, app))
            yield

    traced.__bentoml_compile__ = True  # type: ignore[attr-defined]
    return traced


def _wrapped(original: AppMethod, around: Callable[[AppMethod, Any, Any], Awaitable[None]]) -> Any:
    @functools.wraps(original)
    async def method(self: Any, app: Any) -> None:
        await around(original, self, app)

    method.__bentoml_compile__ = True  # type: ignore[attr-defined]
    return method
