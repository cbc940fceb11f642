"""moto's S3 server in a process of its own, which counts what each machine of benchmarks/herd.py asks of it.

with CountingServer() as server:
    ...  # boot with server.uri and server.options(3) as the third machine's `s3` section of fsspec's config
    server.take()[3].requests["GET lease"]
"""

from __future__ import annotations

import logging
import multiprocessing
import re
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs

BUCKET = "herd"
_MACHINE = re.compile(r"machine/(\d+)")
_KINDS = {"/blobs/": "blob", ".json": "envelope", "/lease": "lease"}


@dataclass(slots=True)
class Asked:
    """What one machine asked of the server: requests by kind, e.g. "GET blob", and the bytes of their bodies."""

    requests: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  # e.g. "412 PUT lease"; among the requests, too
    received_bytes: int = 0  # by the server
    sent_bytes: int = 0

    def add(self, other: Asked) -> None:
        self.requests += other.requests
        self.errors += other.errors
        self.received_bytes += other.received_bytes
        self.sent_bytes += other.sent_bytes


class CountingServer:
    """On the loopback interface, with one empty bucket; each machine names itself in its User-Agent."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.url = f"http://127.0.0.1:{self._ours.recv()}"
        self.uri = f"s3://{BUCKET}/models"
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT")).close()

    def options(self, machine: int) -> dict[str, Any]:
        return {
            "endpoint_url": self.url,
            "key": "test",
            "secret": "test",
            "config_kwargs": {"user_agent_extra": f"machine/{machine}"},
        }

    def take(self) -> dict[int, Asked]:
        """By machine, since the last time."""
        self._ours.send(None)
        asked: dict[int, Asked] = self._ours.recv()
        return asked

    def __enter__(self) -> CountingServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()


class _Counted:
    """A WSGI application around moto's."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._asked: dict[int, Asked] = {}

    def take(self) -> dict[int, Asked]:
        with self._lock:
            asked, self._asked = self._asked, {}
        return asked

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        machine, kind = _MACHINE.search(environ.get("HTTP_USER_AGENT", "")), _kind(environ)

        def started(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            if machine is not None:
                sent = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
                one = Asked(Counter([kind]), received_bytes=int(environ.get("CONTENT_LENGTH") or 0))
                one.sent_bytes = 0 if environ["REQUEST_METHOD"] == "HEAD" else sent
                if not status.startswith("2"):
                    one.errors[f"{status[:3]} {kind}"] += 1
                with self._lock:
                    self._asked.setdefault(int(machine[1]), Asked()).add(one)
            return start_response(status, headers, *rest)

        return self._app(environ, started)


def _kind(environ: dict[str, Any]) -> str:
    method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
    query = parse_qs(environ.get("QUERY_STRING", ""))
    if "list-type" in query:
        return "LIST"
    return f"{method} {next((name for part, name in _KINDS.items() if part in path), 'bucket')}"


def _serve(pipe: Connection) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # no line for each request
    app = _Counted(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.port)
    while True:
        try:
            pipe.recv()
        except EOFError:  # whoever asks is gone
            return
        pipe.send(app.take())
