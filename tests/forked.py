"""Python code in processes of its own that share their imports: forked from one that made them.

    with Forked("torch") as forked:
        done = forked.run("import torch; print(torch.__version__)", directory)
        assert (done.returncode, done.stderr) == (0, "")

For code that must not share a process, because it changes what a process has once, and would spend most of its time
importing. What is imported beforehand sees the environment of the tests, the code that of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

SERVER = """
import gc, importlib, json, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
gc.freeze()  # what is imported is neither searched for garbage by each child nor copied for that
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
    elif (answer := os.fork()) == 0:
        os.chdir(order["directory"])
        os.environ.clear()
        os.environ.update(order["env"])
        for number, path in enumerate((os.devnull, order["output"], order["errors"])):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
        sys.argv = ["-c", *order["arguments"]]
        exec(compile(order["code"], "<string>", "exec"), {"__name__": "__main__"})
        sys.exit()
    print(answer, flush=True)
"""


@dataclass(frozen=True)
class Child:
    """A process that was started, and the files that its output and its errors go to."""

    pid: int
    output: Path
    errors: Path


class Forked:
    """The process that has imported the modules, until the end of the `with`; what it started is not ended with it."""

    def __init__(self, *modules: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._numbers = itertools.count()

    def start(
        self, code: str, directory: Path, *arguments: str, env: Mapping[str, str] | None = None, errors: bool = True
    ) -> Child:
        """Runs code as `python -c` in `directory`; without `errors`, these are part of the output."""
        number = next(self._numbers)
        output = directory / f"{number}.out"
        files = (output, directory / f"{number}.err" if errors else output)
        for file in files:
            file.touch()
        order = {"code": code, "arguments": arguments, "directory": str(directory), "env": {**(env or os.environ)}}
        return Child(self._ask(**order, output=str(files[0]), errors=str(files[1])), *files)

    def wait(self, child: Child) -> int:
        """Its exit code; of one that was killed the negative signal."""
        return self._ask(wait=child.pid)

    def run(
        self, code: str, directory: Path, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        child = self.start(code, directory, *arguments, env=env)
        return subprocess.CompletedProcess(code, self.wait(child), child.output.read_text(), child.errors.read_text())

    def __enter__(self) -> Forked:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.kill()  # there is nothing for it to end, which would take seconds
        self._server.communicate()

    def _ask(self, **order: Any) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())
