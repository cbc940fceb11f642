"""Runs the real `bentoml serve` for tests.

    with Server(directory, tmp_path / "home", env={"BENTOML_CONFIG_OVERRIDES": json.dumps({...})}) as server:
        httpx.post(f"{server.base_url}/embed", json={"texts": ["hello"]})
        server.stop()
        server.start()  # again, with the same home: a warm boot

BENTOML_HOME also tells a server's processes apart from all others, so each server needs a home of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

BOOT = 300.0  # seconds until a boot, or a line in its log, counts as failed; a busy machine takes minutes
# Seconds until an end counts as failed. A /readyz of BentoML 1.4.40 that was asked while a service's dependency booted
# may hang until the request's timeout of 60 s, and a worker ends with its last request.
END = 120.0

# What the caller's shell must not pass on to a server under test.
_DROPPED = ("OTEL_", "BENTOML_", "PROMETHEUS_", "TORCH_COMPILE_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_LOGS")


class Server:
    """One `bentoml serve TARGET` in `directory`.

    `env` is added to a clean environment, a value of None takes that variable out. The same `home` again is a
    restart of "the same machine"; another one is a machine that never saw the model.
    """

    def __init__(
        self,
        directory: Path,
        home: Path,
        *,
        target: str = ".",
        env: Mapping[str, str | None] | None = None,
        arguments: Sequence[str] = (),
        command: Sequence[str] = (sys.executable, "-m", "bentoml"),
    ) -> None:
        self.directory = directory
        self.home = home
        self.target = target
        self.env = dict(env or {})
        self.arguments = tuple(arguments)
        self.command = tuple(command)
        self.port = 0
        self._reservation: socket.socket | None = None  # of the port, for as long as the server may use it
        self._process: subprocess.Popen[bytes] | None = None
        home.mkdir(parents=True, exist_ok=True)
        self._log = home / "server.log"

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The supervisor's; `processes()` has the workers too."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything the server wrote since its last start, stdout and stderr together."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def start(self, *, wait: bool = True, deadline: float = BOOT) -> Server:
        """Starts it on a free port and, unless `wait` is False, waits for /readyz to answer 200."""
        assert self._process is None, "the server runs already"
        self._give_port_back()
        self._reservation = _reserve_port()
        self.port = int(self._reservation.getsockname()[1])
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.command, "serve", self.target, *where, *self.arguments],
                cwd=self.directory,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if wait:
            self.wait_ready(deadline)
        return self

    def wait_ready(self, deadline: float = BOOT) -> None:
        """Returns when /readyz answers 200; AssertionError with the log if the server ends or `deadline` passes."""
        self._poll(self._is_ready, deadline, "/readyz did not answer 200")

    def wait_for_log(self, text: str, deadline: float = BOOT) -> None:
        """Returns when `text` stands in the log."""
        self._poll(lambda: text in self.log, deadline, f"{text!r} did not appear in the log")

    def stop(self, how: signal.Signals = signal.SIGTERM, deadline: float = END) -> int:
        """Signals the supervisor, waits until every process of this server is gone, returns the exit code.

        AssertionError if one is left after `deadline` seconds; whatever is left is killed first.
        """
        assert self._process is not None, "the server was not started"
        process, self._process = self._process, None
        ends = time.monotonic() + deadline
        if process.poll() is None:
            process.send_signal(how)
        while process.poll() is None and time.monotonic() < ends:
            time.sleep(0.02)
        while (left := self.processes()) and time.monotonic() < ends:
            time.sleep(0.02)
        if left:
            names = [_command(one) for one in left]
            _kill(left)
            process.wait()
            raise AssertionError(f"still running {deadline} s after {how.name}: {names}\n{self.log}")
        self._give_port_back()
        return process.wait()

    def restart(self, how: signal.Signals = signal.SIGTERM) -> Server:
        self.stop(how)
        return self.start()

    def processes(self) -> list[psutil.Process]:
        """Every living process of this server: supervisor, workers, and what those started."""
        return [one for one in psutil.process_iter() if _has_home(one, str(self.home))]

    def commands(self) -> list[tuple[psutil.Process, list[str]]]:
        """The same with their command lines; without those that end meanwhile."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                found.append((process, process.cmdline()))
        return found

    def names(self) -> set[str]:
        """The names of the programs that its processes run, as the kernel has them."""
        found = set()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                found.add(process.name())
        return found

    def metrics(self) -> list[Sample]:
        """The samples of BentoML's /metrics, over all workers."""
        with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=BOOT) as answer:
            text = answer.read().decode()
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def __enter__(self) -> Server:
        try:
            return self if self._process is not None else self.start()
        except BaseException:
            self._kill()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        if error is not None:
            self._kill()
            return
        self.stop()

    def _environment(self) -> dict[str, str]:
        env: dict[str, str | None] = {k: v for k, v in os.environ.items() if not k.startswith(_DROPPED)}
        env |= {"BENTOML_HOME": str(self.home), "BENTOML_DO_NOT_TRACK": "True", "HF_HUB_OFFLINE": "1"}
        env |= {"PYTHONUNBUFFERED": "1"}
        env |= self.env
        return {key: value for key, value in env.items() if value is not None}

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _poll(self, done: Callable[[], bool], deadline: float, complaint: str) -> None:
        assert self._process is not None, "the server was not started"
        ends = time.monotonic() + deadline
        while True:
            ended = self._process.poll() is not None  # before the look: what it did last counts
            if done():
                return
            if ended:
                raise AssertionError(f"the server ended with {self._process.returncode}; {complaint}\n{self.log}")
            if time.monotonic() > ends:
                raise AssertionError(f"{complaint} in {deadline} s\n{self.log}")
            time.sleep(0.05)

    def _kill(self) -> None:
        _kill(self.processes())
        if self._process is not None:
            self._process.wait()
            self._process = None
        self._give_port_back()

    def _give_port_back(self) -> None:
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 for a server that is started inside; nobody else is given it meanwhile."""
    with _reserve_port() as reservation:
        yield int(reservation.getsockname()[1])


def free_port() -> int:
    """A port that is free now, for what does not get as far as to listen."""
    with reserved_port() as port:
        return port


def _reserve_port() -> socket.socket:
    """A socket at a free port, which another one may share with it as long as this one does not listen.

    Between a mere look for a free port and the server's bind, seconds later, the kernel may give the port to another
    process. It gives none that is bound, and a server that names the port sets one of these options.
    """
    reservation = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        reservation.setsockopt(socket.SOL_SOCKET, option, 1)
    reservation.bind(("127.0.0.1", 0))
    return reservation


def value(samples: Iterable[Sample], name: str, **labels: str) -> float:
    """The sum of the samples called `name` whose labels include `labels`; 0.0 if there is none."""
    chosen = [one for one in samples if one.name == name and labels.items() <= one.labels.items()]
    return sum((one.value for one in chosen), 0.0)


def _has_home(process: psutil.Process, home: str) -> bool:
    try:
        return bool(process.environ().get("BENTOML_HOME") == home and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "?"


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
