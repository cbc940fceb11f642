"""explain: a service's graph breaks, without compiling or serving."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import Forked

SERVICE = """
import os

import bentoml
import torch
from bentoml_compile import compile_model

class Whole(torch.nn.Module):
    def forward(self, x):
        return x + 1

class Broken(torch.nn.Module):
    def forward(self, x):
        x = x + 1
        torch._dynamo.graph_break()
        return x + 2

@bentoml.service(torch_compile={"fullgraph": "require"})
class Two:
    def __init__(self):
        self.whole = compile_model(Whole(), example_inputs=[(torch.ones(2),)], name="whole")
        self.broken = compile_model(Broken(), example_inputs=[(torch.ones(2),)], name="broken")

class Debugged(torch.nn.Module):
    def forward(self, x):
        return print(x) or x if os.environ.get("DEBUG") else x

@bentoml.service(envs=[{"name": "DEBUG", "value": "1"}])
class Debugging:
    def __init__(self):
        self.model = compile_model(Debugged(), example_inputs=[(torch.ones(2),)], name="debugged")

legacy = bentoml.legacy.Service("legacy")
"""


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with Forked("torch._dynamo", "_bentoml_sdk.service", "bentoml_compile.bento.compile") as forked:
        yield forked


def explained(forked: Forked, directory: Path, target: str) -> subprocess.CompletedProcess[str]:
    (directory / "service.py").write_text(SERVICE)
    script = f"""
from bentoml_compile.bento.explain import explain
for name, breaks in explain({target!r}).models:
    print(name, *(f"{{found.line}}|{{found.source}}" for found in breaks))
import torch
print("compiled:", bool(torch._dynamo.utils.counters["inductor"]))
"""
    env = os.environ | {"BENTOML_HOME": str(directory / "home"), "BENTOML_DO_NOT_TRACK": "True"}
    return forked.run(script, directory, env=env)


def test_each_models_graph_breaks_are_found_without_compiling_even_where_they_are_forbidden(
    forked: Forked, tmp_path: Path
) -> None:
    done = explained(forked, tmp_path, "service:Two")
    assert done.returncode == 0, done.stderr
    line = 1 + SERVICE.splitlines().index("        torch._dynamo.graph_break()")
    assert done.stdout.splitlines() == ["whole", f"broken {line}|torch._dynamo.graph_break()", "compiled: False"]


def test_a_service_is_made_in_the_environment_of_its_worker(forked: Forked, tmp_path: Path) -> None:
    done = explained(forked, tmp_path, "service:Debugging")
    assert done.returncode == 0, done.stderr
    [model, _] = done.stdout.splitlines()
    assert model.startswith("debugged ")  # and where it breaks


def test_a_legacy_service_without_runners_has_no_models(forked: Forked, tmp_path: Path) -> None:
    done = explained(forked, tmp_path, "service:legacy")
    assert (done.returncode, done.stdout) == (0, "compiled: False\n"), done.stderr
