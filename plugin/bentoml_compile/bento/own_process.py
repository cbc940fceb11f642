"""A function in a Python of its own, whose environment is there before anything is imported.

    threads = in_own_process(count, "runner 'scorer'", environment={**os.environ, "OMP_NUM_THREADS": "2"}, folder=".")

torch and its libraries read the number of threads and the GPUs once, when they are imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bentoml.exceptions import BentoMLException

from bentoml_compile.engines.limits import prompt_termination
from bentoml_compile.errors import CompileError

T = TypeVar("T")

_JOB, _REPLY, _METRICS = "job", "reply", "metrics"
_STDERR = 2
_PR_SET_PDEATHSIG = 1
_PATIENCE = 10.0  # seconds until a process that was told to end is killed


def in_own_process(do: Callable[[], T], what: str, *, environment: Mapping[str, str], folder: str) -> T:
    """What `do` returns; it and that are pickled. What it prints goes to stderr.

    Args:
        what: the process, for messages.
        folder: its working directory, from which it imports.

    Raises:
        CompileError: with the message of a BentoMLException; of any other error the traceback is on stderr.
    """
    with (
        prompt_termination(),  # else SIGTERM would leave the directory; until the process is waited for, it is killed
        tempfile.TemporaryDirectory(prefix="bentoml-compile-", ignore_cleanup_errors=True) as name,
    ):
        work = Path(name)
        (work / _METRICS).mkdir()
        (work / _JOB).write_bytes(pickle.dumps(do))
        code = f"import sys; from {__name__} import main; main(sys.argv[1], int(sys.argv[2]))"
        process = subprocess.Popen(
            [sys.executable, "-c", code, name, str(os.getpid())],
            cwd=folder,
            env={**environment, "PROMETHEUS_MULTIPROC_DIR": str(work / _METRICS)},
            stdout=_STDERR,
        )
        try:
            with prompt_termination():  # which leaves the process to what follows
                status = process.wait()
        except BaseException:
            process.terminate()
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise
        return _result(work / _REPLY, what, status)  # type: ignore[no-any-return]


def _result(file: Path, what: str, status: int) -> Any:
    try:
        reply = pickle.loads(file.read_bytes())
    except FileNotFoundError:
        how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
        raise CompileError(f"{what}: its process {how}") from None
    if "error" in reply:
        raise CompileError(f"{what}: {reply['error']}")
    return reply["result"]


def main(directory: str, parent: int) -> None:
    """The process."""
    _end_with(parent)
    work = Path(directory)
    reply: dict[str, Any]
    try:
        reply = {"result": pickle.loads((work / _JOB).read_bytes())()}
    except BentoMLException as error:
        reply = {"error": str(error)}
    except SystemExit as error:  # whatever its status: there is no result
        reply = {"error": f"it ended the process, with {error.code!r}"}
    except Exception:
        traceback.print_exc()
        reply = {"error": "it could not be made; its error is above"}
    unfinished = work / "unfinished"
    unfinished.write_bytes(pickle.dumps(reply))
    unfinished.replace(work / _REPLY)


def _end_with(parent: int) -> None:
    """Linux: SIGTERM to this process, which ends compilers too, when its parent is gone, however it went."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
