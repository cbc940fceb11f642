"""Compiling ahead of time in a process of its own: its crash, hang or hunger for memory is none of the worker's.

    library = compile_in_child(program, directory, device=device, mode="default", options={}, time_limit=600)

does what `inductor.compile_program` does, and takes longer: the process imports torch and Inductor anew.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from bentoml_compile.engines.aot import guard, handover
from bentoml_compile.engines.aot.handover import HandoverError
from bentoml_compile.engines.failures import causes
from bentoml_compile.engines.limits import TimeLimitReached
from bentoml_compile.engines.phases import Phase, include, phase, recorded_phases

logger = logging.getLogger("bentoml_compile")

__all__ = ["CompilerProcessError", "HandoverError", "compile_in_child"]

_OUT, _TEMPORARY, _OUTPUT, _REPLY = "out", "tmp", "output.txt", "reply.json"
_INTERVAL = 0.05  # seconds between two looks at the process
_END = 10.0  # seconds in which the guard has ended all; it takes milliseconds but where the disk hangs
_NICENESS = 10
_LAST_LINES = 5
_LOGGED = 1 << 20  # bytes of the process's output


class CompilerProcessError(RuntimeError):
    """The compiler's process failed or ended without a word. What it raised is the cause, under the same names."""


def compile_in_child(
    program: ExportedProgram,
    directory: Path,
    *,
    device: torch.device,
    mode: str,
    options: Mapping[str, Any],
    time_limit: float,
) -> str:
    """`inductor.compile_program` in another process, of lower priority; waits for it. For any thread.

    The process has its own memory of the size of the weights, which it does not touch: nothing on the CPU, but on CUDA
    it takes them once more. What the worker has added to Inductor by other ways than its config (lowerings,
    decompositions, backends) is not there.

    Args:
        directory: must exist; files are moved into it when all are written. Until then, and only until then, it holds a
            hidden directory with all that the process writes.
        time_limit: seconds from the start of the process.

    Raises:
        HandoverError: before anything is started: something that only this process has. Compile in this process.
        TimeLimitReached: after `time_limit`; the process and all that it started are gone then, as after any other
            exception.
        CompilerProcessError: what compile_program raised is its cause; or it says how the process ended.
    """
    # inside of the directory, as compile_program's own: who finds it half written removes all of it
    parent = None if " " in str(directory.absolute()) else directory.absolute()
    with (
        phase("compiler_process"),
        tempfile.TemporaryDirectory(prefix=".child-", dir=parent, ignore_cleanup_errors=True) as name,
    ):
        work = Path(name)
        handover.write(handover.Job(program, device, mode, options), work)
        for inner in (_OUT, _TEMPORARY):
            (work / inner).mkdir()
        status = _run(work, time_limit)
        output = _read_output(work)
        if output:
            logger.debug("the compiler's process printed: %s", output)
        reply = _read_reply(work)
        include(Phase(**recorded) for recorded in reply.get("phases", ()))
        if "library" not in reply:
            raise _error(reply, status, output)
        for file in (work / _OUT).iterdir():
            shutil.move(file, directory / file.name)
        return str(reply["library"])


# the process, from outside


def _run(work: Path, time_limit: float) -> int:
    """The process's exit status, or 128 and the number of the signal that killed it."""
    if not sys.executable:
        raise HandoverError("no Python to start: sys.executable is empty")
    code = f"import sys; sys.path[:] = sys.argv[2:]; from {__name__} import main; main(sys.argv[1])"
    python = [sys.executable, "-c", code, str(work), *(entry for entry in sys.path if isinstance(entry, str))]
    with (work / _OUTPUT).open("wb") as output, _guarded(python, work, output.fileno()) as process:
        ends = time.monotonic() + time_limit
        while not _is_over(process):
            if time.monotonic() > ends:
                last = _last_lines(_read_output(work))
                raise TimeLimitReached(f"the compiler's process did not end within {time_limit:g} s{last}")
            time.sleep(_INTERVAL)
    return process.returncode


@contextlib.contextmanager
def _guarded(command: Sequence[str], work: Path, output: int) -> Iterator[subprocess.Popen[bytes]]:
    """The command below a guard, in a session and group of their own; all of them are gone after the block.

    Where this thread is interrupted before it has the process, its pipe is closed, which ends it as well.
    """
    python = [sys.executable, "-I", "-S", str(Path(guard.__file__).absolute())]
    process = subprocess.Popen(
        [*python, str(os.getpid()), str(work), *command],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env={**os.environ, "TMPDIR": str(work / _TEMPORARY), "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        try:
            _end(process)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so that the number is still its own
            process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(b"\n")  # a process that was forked meanwhile may hold the pipe open
        process.stdin.close()
    ends = time.monotonic() + _END
    while not _is_over(process) and time.monotonic() < ends:
        time.sleep(_INTERVAL)


def _is_over(process: subprocess.Popen[bytes]) -> bool:
    """Without reaping it."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # the program ignores SIGCHLD
        return True


def _read_output(work: Path) -> str:
    with (work / _OUTPUT).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOGGED))
        return file.read().decode(errors="replace").strip()


def _last_lines(output: str) -> str:
    return "\n".join(["; it printed last:", *output.splitlines()[-_LAST_LINES:]]) if output else ""


def _read_reply(work: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((work / _REPLY).read_text()))
    except (OSError, ValueError):
        return {}


# its failure, as it would have been in this process


def _error(reply: Mapping[str, Any], status: int, output: str) -> CompilerProcessError:
    last = _last_lines(output)
    if "error" not in reply:
        return CompilerProcessError(f"the compiler's process {_ended(status)}{last}")
    error = CompilerProcessError(f"compiling failed in a process of its own{last}")
    error.__cause__ = _rebuilt(reply["error"])
    return error


def _ended(status: int) -> str:
    number = status - 128 if status > 128 else -status
    if number == signal.SIGKILL:
        return "was killed by signal 9, perhaps out of memory"
    if number > 0:
        return f"was ended by signal {number} ({signal.strsignal(number) or 'unknown'})"
    return f"ended with exit status {status} and without a result"


def _described(error: BaseException) -> list[dict[str, Any]]:
    """The error and its causes, as plain values."""
    return [
        {
            "type": type(link).__name__,
            "message": str(link),
            "errno": getattr(link, "errno", None),
            "returncode": getattr(link, "returncode", None),
            "output": _text(getattr(link, "output", None)) or _text(getattr(link, "stderr", None)),
        }
        for link in causes(error)
    ]


def _text(printed: object) -> str | None:
    text = printed.decode(errors="replace") if isinstance(printed, bytes) else str(printed or "")
    return text or None


def _rebuilt(links: Sequence[Mapping[str, Any]]) -> BaseException | None:
    cause: BaseException | None = None
    for link in reversed(links):
        error = _exception(link)
        error.__cause__ = cause
        cause = error
    return cause


def _exception(link: Mapping[str, Any]) -> Exception:
    """Of the class that `failures.classify` asks for, or a class of the same name."""
    name, message, errno = link["type"], link["message"], link["errno"]
    if name == "CalledProcessError":
        return subprocess.CalledProcessError(link["returncode"], message, output=link["output"])
    base: type[Exception] = _BASES.get(name, OSError if isinstance(errno, int) else Exception)
    error: Any = type(name, (base,), {})(message)
    error.errno, error.output = errno, link["output"]
    return error  # type: ignore[no-any-return]


_BASES: dict[str, type[Exception]] = {"MemoryError": MemoryError, "OutOfMemoryError": torch.OutOfMemoryError}


# the process, from inside


def main(directory: str) -> None:
    """Compiles what `handover.write` wrote into the directory; leaves there a reply of plain JSON."""
    work = Path(directory)
    _step_back()
    faulthandler.enable()
    reply: dict[str, Any] = {}
    phases: list[Phase] = []
    try:
        from bentoml_compile.engines.aot.inductor import compile_program

        with handover.reading(work) as job, recorded_phases() as phases:
            reply["library"] = compile_program(
                job.program, work / _OUT, device=job.device, mode=job.mode, options=job.options
            )
    except Exception as error:
        traceback.print_exc()
        reply["error"] = _described(error)
    reply["phases"] = [{field: getattr(item, field) for field in Phase.__slots__} for item in phases]
    (work / "unfinished").write_text(json.dumps(reply))
    (work / "unfinished").replace(work / _REPLY)


def _step_back() -> None:
    """Behind the worker for the CPU, and before it when the kernel looks for a process to kill for its memory."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
