"""A TCP proxy in front of an HTTP server that does what networks and servers do on bad days.

    with FaultyProxy("127.0.0.1", 5000) as proxy:
        proxy.fault = Fault("reset", when=r"GET /bucket/blobs/", times=1)
        ...  # talk to proxy.port

Faults: "latency" (of `seconds`, each request), "reset" (of the connection, when a request comes), "truncate" (the
answer ends after `bytes` bytes), "silence" (no answer), or the status of an answer as S3 gives it: "403", "404", "500",
"503".
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from dataclasses import dataclass
from types import TracebackType

_REQUEST = re.compile(rb"(GET|PUT|POST|HEAD|DELETE) \S+ HTTP/1\.1\r\n")
_CODES = {"403": "AccessDenied", "404": "NoSuchBucket", "500": "InternalError", "503": "SlowDown"}


@dataclass
class Fault:
    """What happens to requests whose first line matches `when`, to the first `times` of them."""

    kind: str
    when: str = ""
    times: int = 1_000_000
    seconds: float = 0.0
    bytes: int = 0


class FaultyProxy:
    """Attributes:
    port: where it listens, on the loopback interface.
    fault: what happens at the moment, to connections that are open, too.
    requests: the first line of every request that came.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.fault: Fault | None = None
        self.requests: list[str] = []
        self._open: list[socket.socket] = []
        self._counting = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._closed.set()
        for connection in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._thread.join()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(self._target)
        self._open.append(server)
        answers = _Answers(client, server)
        threading.Thread(target=answers.relay, daemon=True).start()
        with contextlib.suppress(OSError), client, server:
            while data := client.recv(1 << 16):
                fault = self._fault_for(data)
                if fault is not None and not self._act(fault, client, answers):
                    return
                server.sendall(data)

    def _fault_for(self, data: bytes) -> Fault | None:
        line = _REQUEST.match(data)
        if line is None:  # more of a request
            return None
        request = line[0].decode().strip()
        self.requests.append(request)
        with self._counting:  # requests that come at once
            fault = self.fault
            if fault is None or fault.times <= 0 or re.search(fault.when, request) is None:
                return None
            fault.times -= 1
            return fault

    def _act(self, fault: Fault, client: socket.socket, answers: _Answers) -> bool:
        """Whether the request is passed on."""
        if fault.kind == "latency":
            time.sleep(fault.seconds)
        elif fault.kind == "truncate":
            answers.left = fault.bytes
        elif fault.kind == "silence":
            self._closed.wait()
            return False
        elif fault.kind == "reset":
            _reset(client)
            return False
        else:
            client.sendall(_answer(fault.kind))
            return False
        return True


class _Answers:
    """What comes back; `left` is how many bytes of it the client still gets, if that is limited."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._client = client
        self._server = server
        self.left: int | None = None

    def relay(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._server.recv(1 << 16):
                if self.left is None:
                    self._client.sendall(data)
                    continue
                self._client.sendall(data[: self.left])
                self.left -= len(data)
                if self.left <= 0:
                    break
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_RDWR)


def _reset(client: socket.socket) -> None:
    """RST instead of FIN: socket(7), SO_LINGER."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def _answer(status: str) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{_CODES[status]}</Code><Message>a bad day</Message></Error>"
    fields = ("Content-Type: application/xml", f"Content-Length: {len(body)}", "Connection: close")
    return "\r\n".join((f"HTTP/1.1 {status} Bad", *fields, "", body)).encode()
