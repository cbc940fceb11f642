"""explain: a service's graph breaks, without compiling or serving."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SERVICE = """
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

legacy = bentoml.legacy.Service("legacy")
"""


def explained(directory: Path, target: str) -> subprocess.CompletedProcess[str]:
    (directory / "service.py").write_text(SERVICE)
    script = f"""
from bentoml_compile.bento.explain import explain
for name, breaks in explain({target!r}):
    print(name, *(f"{{found.line}}|{{found.source}}" for found in breaks))
import torch
print("compiled:", bool(torch._dynamo.utils.counters["inductor"]))
"""
    env = os.environ | {"BENTOML_HOME": str(directory / "home"), "BENTOML_DO_NOT_TRACK": "True"}
    return subprocess.run(
        [sys.executable, "-c", script], cwd=directory, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def test_each_models_graph_breaks_are_found_without_compiling_even_where_they_are_forbidden(tmp_path: Path) -> None:
    done = explained(tmp_path, "service:Two")
    assert done.returncode == 0, done.stderr
    line = 1 + SERVICE.splitlines().index("        torch._dynamo.graph_break()")
    assert done.stdout.splitlines() == ["whole", f"broken {line}|torch._dynamo.graph_break()", "compiled: False"]


def test_a_legacy_service_is_refused_with_what_is_needed_instead(tmp_path: Path) -> None:
    done = explained(tmp_path, "service:legacy")
    assert done.returncode != 0
    assert "explain needs a class decorated with @bentoml.service" in done.stderr
