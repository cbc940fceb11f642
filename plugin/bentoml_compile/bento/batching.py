"""Each request's own trace context, through BentoML's adaptive batching.

BentoML runs every batch in a task that inherits the context of the first request that it ever served, so all
later batches would show up in that one trace. `install()` gives a batch the context of its own requests, and each of
these a span that says what the batch cost it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attr
from opentelemetry import trace
from opentelemetry.context import Context, attach, detach, get_current

from bentoml_compile.telemetry.batches import Batch, Request, running_batch

logger = logging.getLogger("bentoml_compile")


def install() -> None:
    """Makes batches run in their own requests' context; once, however often it is called."""
    try:
        _patch_dispatcher()
        _patch_threads()
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("tracing: batched requests share one trace, this BentoML batches in another way: %s", error)


@contextmanager
def _answering(dispatcher: Any, jobs: Sequence[Any]) -> Iterator[None]:
    """Runs the block in the context of the first sampled one of the jobs' requests, else in the first one's.

    If one is sampled, `running_batch` is set, and each sampled request has a span of the batch at its end.
    """
    leading = next((job for job in jobs if _is_sampled(job.context)), None)
    token = attach((leading or jobs[0]).context)
    batch = None if leading is None else Batch([_request(dispatcher, job) for job in jobs])
    reset = running_batch.set(batch)
    try:
        yield
    finally:
        running_batch.reset(reset)
        detach(token)
        if batch is not None:
            _end(batch, jobs)


def _is_sampled(context: Context) -> bool:
    return trace.get_current_span(context).get_span_context().trace_flags.sampled


def _request(dispatcher: Any, job: Any) -> Request:
    try:
        rows = int(dispatcher.get_batch_size(job.data))
    except Exception:
        rows = 1  # as BentoML takes it
    return Request(job.context, int(job.enqueue_time * 1e9), rows)


def _end(batch: Batch, jobs: Sequence[Any]) -> None:
    try:
        batch.end([_error(job.future) for job in jobs])
    except Exception:
        logger.exception("telemetry: the spans of a batch failed; serving goes on")


def _error(future: Any) -> BaseException | None:
    """What BentoML answers the request with, in place of a result."""
    result = future.result() if future.done() and not future.cancelled() else None
    return result if isinstance(result, BaseException) else None


def _patch_dispatcher() -> None:
    """Lets a queued job remember its request's context, and a batch run in it.

    `Job` and `CorkDispatcher.outbound_call` are private; checked with BentoML 1.4.40. Where they are missing, batches
    keep the context of the first request. `attr.evolve` copies the context when BentoML splits a job in two.
    """
    from bentoml._internal.marshal import dispatcher

    if hasattr(dispatcher.Job, "__bentoml_compile__"):
        return
    original = dispatcher.CorkDispatcher.outbound_call

    @attr.define
    class Job(dispatcher.Job):  # type: ignore[type-arg]
        __bentoml_compile__ = True
        context: Context = attr.field(factory=get_current)

    @functools.wraps(original)
    async def outbound_call(self: Any, inputs_info: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        jobs = [job for job in inputs_info if isinstance(job, Job)]
        if not jobs:
            return await original(self, inputs_info, *args, **kwargs)
        with _answering(self, jobs):
            return await original(self, inputs_info, *args, **kwargs)

    dispatcher.Job = Job  # type: ignore[misc]
    dispatcher.CorkDispatcher.outbound_call = outbound_call  # type: ignore[method-assign]


def _patch_threads() -> None:
    """Counts a batch's wait for one of the service's threads as queueing.

    `ServiceAppFactory._to_thread` is private; checked with BentoML 1.4.40. Where it is missing, that wait counts as the
    batch's own time.
    """
    from _bentoml_impl.server.app import ServiceAppFactory  # type: ignore[import-untyped]

    original = ServiceAppFactory._to_thread
    if hasattr(original, "__bentoml_compile__"):
        return

    @functools.wraps(original)
    async def to_thread(self: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (batch := running_batch.get()) is not None:
            function = _beginning(batch, function)
        result: Awaitable[Any] = original(self, function, *args, **kwargs)
        return await result

    to_thread.__bentoml_compile__ = True  # type: ignore[attr-defined]
    ServiceAppFactory._to_thread = to_thread


def _beginning(batch: Batch, function: Callable[..., Any]) -> Callable[..., Any]:
    def begun(*args: Any, **kwargs: Any) -> Any:
        batch.begin()
        return function(*args, **kwargs)

    return begun
