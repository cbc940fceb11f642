"""Starts the stand-in service of `traced/` and calls it as a traced client would."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.servers import Server
from tests.waiting import PATIENCE

DIRECTORY = Path(__file__).parent / "traced"


def traced_server(
    home: Path, config: Mapping[str, Any], env: Mapping[str, str | None] | None = None, target: str = "service:Traced"
) -> Server:
    """`config` is the service's own section of BentoML's config."""
    overrides = {"services": {target.split(":")[1]: dict(config)}}
    own = {"BENTOML_CONFIG_OVERRIDES": json.dumps(overrides), "FLUSH_SECONDS": str(PATIENCE)}
    return Server(DIRECTORY, home, target=target, env={**own, **(env or {})})


def call(server: Server, method: str, value: object, trace_id: str | None = None, sampled: bool = True) -> Any:
    """Calls an API method; with `trace_id`, as part of that trace."""
    return post(server, method, value, trace_id, sampled).raise_for_status().json()


def post(
    server: Server, method: str, value: object, trace_id: str | None = None, sampled: bool = True
) -> httpx.Response:
    headers = {} if trace_id is None else {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-{int(sampled):02d}"}
    argument = "xs" if isinstance(value, list) else "x"
    return httpx.post(f"{server.base_url}/{method}", json={argument: value}, headers=headers, timeout=PATIENCE)


def new_trace() -> str:
    return secrets.token_hex(16)


def request_span(receiver: OtlpReceiver, trace_id: str) -> ReceivedSpan:
    """The span that BentoML's middleware made for the request of that trace."""
    [found] = receiver.wait_until(
        lambda spans: [span for span in spans if span.trace_id == trace_id and is_request(span)],
        what=f"request span of {trace_id}",
    )
    return found


def is_request(span: ReceivedSpan) -> bool:
    """Not one of the middleware's own children, "POST /path http send" and "http receive"."""
    return span.name.startswith("POST /") and " http " not in span.name
