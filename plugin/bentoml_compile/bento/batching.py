"""Each request's own trace context, through BentoML's adaptive batching.

BentoML runs every batch in a task that inherits the context of the first request that it ever served, so all
later batches would show up in that one trace. `install()` gives a batch the context of its own requests.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attr
from opentelemetry import trace
from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.trace import SpanContext

from bentoml_compile.telemetry.spans import batched_requests

logger = logging.getLogger("bentoml_compile")


def install() -> None:
    """Makes batches run in their own requests' context; once, however often it is called."""
    try:
        _patch_dispatcher()
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("tracing: batched requests share one trace, this BentoML batches in another way: %s", error)


@contextmanager
def batch_context(contexts: Sequence[Context]) -> Iterator[None]:
    """Runs the block in the first sampled one of `contexts` (else in the first), with all their spans to link to."""
    spans = [trace.get_current_span(context).get_span_context() for context in contexts]
    token = attach(_leading(contexts, spans))
    reset = batched_requests.set(tuple({span.span_id: span for span in spans if span.is_valid}.values()))
    try:
        yield
    finally:
        batched_requests.reset(reset)
        detach(token)


def _leading(contexts: Sequence[Context], spans: Sequence[SpanContext]) -> Context:
    sampled = (context for context, span in zip(contexts, spans, strict=True) if span.trace_flags.sampled)
    return next(sampled, contexts[0])


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
        contexts = [job.context for job in inputs_info if isinstance(job, Job)]
        if not contexts:
            return await original(self, inputs_info, *args, **kwargs)
        with batch_context(contexts):
            return await original(self, inputs_info, *args, **kwargs)

    dispatcher.Job = Job  # type: ignore[misc]
    dispatcher.CorkDispatcher.outbound_call = outbound_call  # type: ignore[method-assign]
