"""A stream that nobody reads any more ends at once, also in the worker of a service that it comes from.

Where a client leaves, BentoML drops its response to it without closing the generator that makes it. If that waits to be
collected, or reads the stream of another service (`bentoml.depends`), whose response is not closed either, a model goes
on being called for nobody, by one of its worker's threads, for as long as the stream is. `install()` closes both.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import anyio
from starlette.responses import StreamingResponse
from starlette.types import Send

logger = logging.getLogger("bentoml_compile")


def install() -> None:
    """Makes streams end with their reader; once, however often it is called."""
    for patch in (_patch_server, _patch_client):
        try:
            patch()
        except (ImportError, AttributeError) as error:
            logger.warning("streams: where a client leaves, its stream may go on to its end: %s", error)


class _Stream(StreamingResponse):
    """Closes what it streams, however it ends."""

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            with anyio.CancelScope(shield=True):
                await self.body_iterator.aclose()  # type: ignore[attr-defined]


def _closing(response: Any) -> Any:
    if type(response) is not StreamingResponse or not isinstance(response.body_iterator, AsyncGenerator):
        return response  # a user's own kind of response
    stream = _Stream(response.body_iterator, response.status_code, background=response.background)
    stream.media_type, stream.raw_headers = response.media_type, response.raw_headers
    return stream


def _patch_server() -> None:
    """`ServiceAppFactory.api_endpoint` is private; checked with BentoML 1.4.40."""
    from _bentoml_impl.server.app import ServiceAppFactory  # type: ignore[import-untyped]

    original = ServiceAppFactory.api_endpoint
    if hasattr(original, "__bentoml_compile__"):
        return

    @functools.wraps(original)
    async def api_endpoint(self: Any, name: str, request: Any) -> Any:
        return _closing(await original(self, name, request))

    api_endpoint.__bentoml_compile__ = True  # type: ignore[attr-defined]
    ServiceAppFactory.api_endpoint = api_endpoint


def _patch_client() -> None:
    """`AsyncClient._parse_stream_response` is private; checked with BentoML 1.4.40.

    To close a response that was read to its end does nothing, as will be so in a BentoML that closes it by itself.
    """
    from _bentoml_impl.client.proxy2 import AsyncClient  # type: ignore[import-untyped]

    original = AsyncClient._parse_stream_response
    if hasattr(original, "__bentoml_compile__"):
        return

    @functools.wraps(original)
    async def parse_stream_response(self: Any, endpoint: Any, response: Any) -> AsyncGenerator[Any, None]:
        try:
            async with aclosing(original(self, endpoint, response)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            response.close()

    parse_stream_response.__bentoml_compile__ = True  # type: ignore[attr-defined]
    AsyncClient._parse_stream_response = parse_stream_response
