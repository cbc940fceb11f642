"""A project with a tiny service, warmed once for the tests of `warm` and `pack`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forked import Child, Forked

SERVICE = """
import os
import signal

import bentoml
import torch
from bentoml_compile import compile_model

print("imported")

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.head(x))

class Broken(torch.nn.Module):
    def forward(self, x):
        x = x + 1
        torch._dynamo.graph_break()
        return x + 2

def tiny(name="tiny", **config):
    config = {"keep_eager_if_slower": False, **config}
    return compile_model(Tiny().eval(), example_inputs=[(torch.ones(2, 3),)], name=name, config=config)

@bentoml.service
class Dependency:
    def __init__(self):
        print("dependency made")
        self.model = tiny()

    @bentoml.api
    def number(self) -> int:
        return 3

@bentoml.service(torch_compile={"startup": "background", "keep_eager_if_slower": False})
class Entry:
    dependency = bentoml.depends(Dependency)

    def __init__(self):
        print("worker:", bentoml.server_context.worker_index)
        self.model = compile_model(Tiny().eval(), example_inputs=[(torch.ones(2, 3),)], name="tiny")

    @bentoml.task
    def number(self) -> int:
        return 3

@bentoml.service
class Front:
    first = bentoml.depends(Dependency)
    second = bentoml.depends(Entry)

@bentoml.service
class InBackground:
    def __init__(self):
        self.model = tiny(startup="background")

@bentoml.service
class Hooked:
    @bentoml.on_startup
    def start(self):
        self.model = tiny()

@bentoml.service
class Threaded:
    def __init__(self):
        from threading import Thread
        thread = Thread(target=self.make)
        thread.start()
        thread.join()

    def make(self):
        self.model = tiny()

@bentoml.service
class Calling:
    dependency = bentoml.depends(Dependency)

    def __init__(self):
        self.number = self.dependency.number()

@bentoml.service(envs=[{"name": "OMP_NUM_THREADS", "value": "1"}])
class Placed:
    def __init__(self):
        self.model = tiny("placed", engine="jit", backend="eager")

@bentoml.service(envs=[{"name": "BOTH", "value": "inner"}, {"name": "OWN", "value": "inner"}])
class Inner:
    def __init__(self):
        print("sees", os.environ["BOTH"], os.environ["OWN"], os.environ["OUTER"])

@bentoml.service(envs=[{"name": "BOTH", "value": "outer"}, {"name": "OUTER", "value": "outer"}])
class Outer:
    inner = bentoml.depends(Inner)

@bentoml.service(envs=[{"name": "ANY", "value": "1"}])
class Failing:
    def __init__(self):
        raise RuntimeError("no weights")

@bentoml.service(envs=[{"name": "ANY", "value": "1"}])
class Leaving:
    def __init__(self):
        raise SystemExit(3)

@bentoml.service(envs=[{"name": "ANY", "value": "1"}])
class Killed:
    def __init__(self):
        os.kill(os.getpid(), 9)

@bentoml.service(envs=[{"name": "ANY", "value": "1"}])
class Endless:
    def __init__(self):
        with open("pid.new", "w") as file:
            file.write(str(os.getpid()))
        os.rename("pid.new", "pid")
        signal.pause()

@bentoml.service
class Mixed:
    def __init__(self):
        self.models = tiny(), tiny("off", enabled=False), tiny("traced", engine="jit", backend="eager")

@bentoml.service
class Unkept:
    def __init__(self):
        self.model = tiny(artifacts={"write": False}, engine="jit", backend="eager")

@bentoml.service(torch_compile={"engine": "jit", "fullgraph": "require"})
class Refused:
    def __init__(self):
        self.model = compile_model(Broken(), example_inputs=[(torch.ones(2),)], name="broken")

@bentoml.service
class Crash:
    def __init__(self):
        raise RuntimeError("no weights")

@bentoml.service
class Exiting:
    def __init__(self):
        raise SystemExit(0)

@bentoml.service(envs=[{"name": "NOT_SET_ANYWHERE"}])
class Demanding: ...

@bentoml.service
class Nothing: ...

legacy = bentoml.legacy.Service("legacy")
"""

COMMAND = "from bentoml_compile.cli import main; main()"

Ran = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Project:
    """A folder with service.py, and the store of its machine in `home`."""

    folder: Path
    forked: Forked

    @property
    def store(self) -> Path:
        return self.folder / "home" / "compile"

    def run(self, *arguments: str, **env: str) -> Ran:
        """The command, in a process of its own, since BentoML keeps its config there."""
        return self.forked.run(COMMAND, self.folder, *arguments, env=self._environment(env))

    def python(self, code: str) -> Ran:
        """As `run`."""
        return self.forked.run(code, self.folder, env=self._environment({}))

    def start(self, *arguments: str) -> Child:
        """As `run`, without waiting for it."""
        return self.forked.start(COMMAND, self.folder, *arguments, env=self._environment({}))

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        own = {"BENTOML_HOME": str(self.folder / "home"), "BENTOML_DO_NOT_TRACK": "True"}
        return {**os.environ, **own, **more}

    def copied(self, to: Path) -> Project:
        """On another machine, as it were."""
        shutil.copytree(self.folder, to, ignore=shutil.ignore_patterns("home", "*.out", "*.err"))
        return Project(to, self.forked)


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Project, Ran]]:
    """The project, and its first warming, which compiles."""
    folder = tmp_path_factory.mktemp("warmed")
    (folder / "service.py").write_text(SERVICE)
    with Forked("torch._dynamo", "_bentoml_sdk.service", "bentoml_compile.bento.warm") as forked:
        project = Project(folder, forked)
        traces = str(folder / "traces.jsonl")
        done = project.run(
            "warm", "service:Entry", OTEL_TRACES_EXPORTER="bentoml_compile_file", BENTOML_COMPILE_TRACE_FILE=traces
        )
        yield project, done


@pytest.fixture
def project(first: tuple[Project, Ran], tmp_path: Path) -> Project:
    """A copy of it with its store, which the test may change."""
    original, done = first
    assert done.returncode == 0, done.stderr
    shutil.copytree(original.folder, tmp_path / "project", ignore=shutil.ignore_patterns("*.out", "*.err"))
    return Project(tmp_path / "project", original.forked)
