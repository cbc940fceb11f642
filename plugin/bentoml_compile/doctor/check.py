"""A check and what it finds. Whatever it does, it ends in findings, within a time.

check = Check("compiler", compiler, seconds=90)
for finding in check.run():
    print(check.name, finding.status, finding.text, finding.fix)
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from bentoml_compile.words import one_line

Status = Literal["ok", "warning", "problem"]
T = TypeVar("T")

_THREAD = "bentoml_compile doctor"


@dataclass(frozen=True, slots=True)
class Finding:
    """Attributes:
    fix: the command that ends a warning or a problem, or what to change where no command does.
    details: named values, for a reader who wants them all.
    """

    status: Status
    text: str
    fix: str = ""
    details: Mapping[str, str] = field(default_factory=dict)


def ok(text: str, **details: str) -> Finding:
    return Finding("ok", text, details=details)


def warning(text: str, fix: str) -> Finding:
    return Finding("warning", text, fix)


def problem(text: str, fix: str) -> Finding:
    return Finding("problem", text, fix)


@dataclass(frozen=True, slots=True)
class Check:
    """Attributes:
    look: yields findings; it runs in a thread of its own.
    seconds: after so many it is left behind.
    stuck: what to do where that happens.
    """

    name: str
    look: Callable[[], Iterable[Finding]]
    seconds: float
    stuck: str = "run it again; if it stays so, see what this machine waits for: dmesg | tail"

    def run(self) -> list[Finding]:
        """What was found, and a problem where the check ended in an error or did not end."""
        found: list[Finding] = []
        try:
            within(self.seconds, lambda: found.extend(self.look()))
        except TimeoutError:  # a list of its own: what is found later would follow it
            return [*found, problem(f"no answer within {self.seconds:g} s", self.stuck)]
        except BaseException as error:
            found.append(problem(f"the check itself failed: {in_one_line(error)}", "report it with this line"))
        return found


def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises; a thread that takes longer is left behind.

    Raises:
        TimeoutError: it takes longer.
    """
    ended: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            ended.append((work(), None))
        except BaseException as error:
            ended.append((None, error))

    thread = threading.Thread(target=run, name=_THREAD, daemon=True)
    thread.start()
    thread.join(seconds)
    if not ended:
        raise TimeoutError(f"no answer within {seconds:g} s")
    result, error = ended[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # of `work`, which may return None


def left_behind() -> bool:
    """Whether a check still waits for something; then the interpreter's own end may wait for it, too."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


@dataclass(frozen=True, slots=True)
class Ran:
    status: int
    output: str

    @property
    def line(self) -> str:
        """The output's first line that tells of an error, else its last line."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it says nothing")


def run(command: list[str], *, seconds: float, directory: Path | None = None) -> Ran:
    """The exit status and all output of a program; with what it started it is ended after `seconds`.

    Raises:
        TimeoutError: it takes longer. OSError: it cannot be started.
    """
    process = subprocess.Popen(
        command,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise TimeoutError(f"{command[0]} did not end within {seconds:g} s") from None
    return Ran(process.returncode, output)


def install(debian: str, redhat: str) -> str:
    """The command that installs a package of the system."""
    if shutil.which("apt-get") is None and shutil.which("dnf") is not None:
        return f"dnf install -y {redhat}"
    return f"apt-get update && apt-get install -y {debian}"


def in_one_line(error: BaseException) -> str:
    text = one_line(error, 300)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
