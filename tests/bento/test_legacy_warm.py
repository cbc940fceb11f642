"""A legacy service's models warmed, packed and explained by the commands, and then loaded by the real `bentoml serve`.

Its runner has one thread by BentoML's config, and its embedded runner what the API worker has.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bentoml_compile.artifacts.store import Store
from bentoml_compile.telemetry.file import PATH_VARIABLE
from bentoml_compile.trace_tree import read_traces
from tests.forked import Forked
from tests.servers import Server
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

SERVICE = """
import bentoml
import torch
from bentoml.io import JSON
from bentoml_compile import CompiledRunnable, compile_model, runner_service

class Net(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.scale = torch.nn.Linear(3, 2), scale

    def forward(self, x):
        return torch.tanh(self.head(x)) * self.scale

class Scorer(CompiledRunnable):
    torch_compile = {"startup": "background", "keep_eager_if_slower": False}

    def load_model(self):
        print("made for", bentoml.server_context.service_name, bentoml.server_context.worker_index)
        return Net(1.0).eval()

    def example_inputs(self):
        return [(torch.ones(1, 3),)]

    @bentoml.legacy.Runnable.method
    def score(self, rows):
        return self.model(torch.as_tensor(rows)).tolist()

class Handwritten(bentoml.legacy.Runnable):
    SUPPORTED_RESOURCES, SUPPORTS_CPU_MULTI_THREADING = ("cpu",), True

    def __init__(self):
        config = {"engine": "jit", "backend": "eager", "keep_eager_if_slower": False}
        self.model = compile_model(Net(2.0).eval(), example_inputs=[(torch.ones(1, 3),)], name="inner", config=config)

    @bentoml.legacy.Runnable.method
    def double(self, rows):
        return self.model(torch.as_tensor(rows)).tolist()

class Plain(bentoml.legacy.Runnable):
    SUPPORTED_RESOURCES, SUPPORTS_CPU_MULTI_THREADING = ("cpu",), True

    def __init__(self, fails=False):
        if fails:
            raise RuntimeError("no weights")

    @bentoml.legacy.Runnable.method
    def nothing(self):
        pass

Runner = bentoml.legacy.Runner
scorer = Runner(Scorer, name="scorer")
embedded = Runner(Handwritten, name="embedded", embedded=True)
plain = Runner(Plain, name="plain")
failing = Runner(Plain, name="failing", runnable_init_params={"fails": True})
svc = bentoml.legacy.Service("scores", runners=[scorer, embedded])
without = bentoml.legacy.Service("without", runners=[plain])
broken = bentoml.legacy.Service("broken", runners=[failing])

@svc.api(input=JSON(), output=JSON())
def score(rows):
    return {"scores": scorer.score.run(rows), "doubled": embedded.double.run(rows)}

ScorerService = runner_service(scorer)

@bentoml.service
class Api:
    scorer = bentoml.depends(ScorerService)

    @bentoml.api
    def score(self, rows: list[list[float]]) -> dict:
        return {"scores": self.scorer.score(rows)}
"""
BENTOFILE = """
service: "service:svc"
include: ["service.py", "/compiled/**"]
python: {lock_packages: false}
"""
CONFIG = {"runners": {"resources": {"cpu": 1}}, "tracing": {"sample_rate": 1.0}}
ROWS = [[0.5, -1.0, 2.0]]

COMMAND = """
from bentoml._internal.configuration import load_config
from bentoml_compile.cli import main

load_config()  # as importing BentoML does in a process of its own
main()
"""

Ran = subprocess.CompletedProcess[str]


def environment(home: Path) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("BENTOML_", "OTEL_", "OMP_"))}
    overrides = json.dumps({**CONFIG, "api_server": {"workers": 1}})
    return {**env, "BENTOML_HOME": str(home), "BENTOML_DO_NOT_TRACK": "True", "BENTOML_CONFIG_OVERRIDES": overrides}


@dataclass(frozen=True)
class Legacy:
    """The service's folder, and a machine to run commands on."""

    folder: Path
    home: Path
    forked: Forked

    def run(self, *arguments: str) -> Ran:
        return self.forked.run(COMMAND, self.folder, *arguments, env=environment(self.home))


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Legacy, Ran]]:
    """And the first warming, which compiles."""
    folder = tmp_path_factory.mktemp("service")
    (folder / "service.py").write_text(SERVICE)
    (folder / "bentofile.yaml").write_text(BENTOFILE)
    with Forked("torch._dynamo", "_bentoml_sdk.service", "bentoml_compile.bento.warm") as forked:
        legacy = Legacy(folder, tmp_path_factory.mktemp("home"), forked)
        yield legacy, legacy.run("warm", "service:svc")


@pytest.fixture(scope="module")
def legacy(warmed: tuple[Legacy, Ran]) -> Legacy:
    """Warmed."""
    legacy, done = warmed
    assert done.returncode == 0, done.stderr
    return legacy


@pytest.fixture(scope="module")
def packed(legacy: Legacy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Legacy, Ran]:
    """In another folder, with `compiled/`, and what the command has printed."""
    folder = tmp_path_factory.mktemp("packed")
    shutil.copytree(legacy.folder, folder, ignore=shutil.ignore_patterns("*.out", "*.err"), dirs_exist_ok=True)
    copy = Legacy(folder, legacy.home, legacy.forked)
    return copy, copy.run("pack", "service:svc")


def serve(directory: Path, home: Path, target: str, body: Any) -> tuple[Any, dict[str, tuple[str, str]]]:
    """What a server answers, and by model what its boot did and where it found the artifact."""
    traces = home / "traces.jsonl"
    traces.unlink(missing_ok=True)
    env = {"BENTOML_CONFIG_OVERRIDES": environment(home)["BENTOML_CONFIG_OVERRIDES"], "OMP_NUM_THREADS": None}
    env |= {"OTEL_TRACES_EXPORTER": "bentoml_compile_file", PATH_VARIABLE: str(traces)}
    with Server(directory, home, target=target, env=env) as server:
        answer = httpx.post(f"{server.base_url}/score", json=body, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text + server.log
    spans = [span for trace in read_traces(traces.read_text().splitlines()).traces for span in trace]
    startups = {span.id: span.attributes for span in spans if span.name == "torch_compile.startup"}
    places = {
        span.parent: span.attributes.get("torch_compile.place", "") for span in spans if span.name.endswith("lookup")
    }
    return answer.json(), {
        attributes["torch_compile.model"]: (attributes["torch_compile.outcome"], places[id_])
        for id_, attributes in startups.items()
    }


def rows_of(scale: float) -> Any:
    torch.manual_seed(0)
    head = torch.nn.Linear(3, 2)
    with torch.inference_mode():
        rows = (torch.tanh(head(torch.tensor(ROWS))) * scale).tolist()
    return [pytest.approx(row, abs=1e-5) for row in rows]


def test_the_models_of_all_runners_are_compiled_though_they_are_to_start_in_the_background(
    warmed: tuple[Legacy, Ran],
) -> None:
    _, done = warmed
    assert done.returncode == 0, done.stderr
    lines = [line.split()[:3] for line in done.stdout.splitlines()]
    assert lines == [["scorer", "compiled", "aot"], ["inner", "compiled", "jit"]]


def test_each_runner_is_made_in_a_process_with_its_own_name_and_threads(warmed: tuple[Legacy, Ran]) -> None:
    legacy, done = warmed
    assert "made for scorer 1" in done.stderr
    threads = {each.model: each.axes["threads"] for each in Store(legacy.home / "compile").artifacts()}
    assert threads["scorer"] == "1"


def test_a_server_loads_what_was_warmed(legacy: Legacy) -> None:
    answer, boots = serve(legacy.folder, legacy.home, "service:svc", ROWS)
    assert answer == {"scores": rows_of(1.0), "doubled": rows_of(2.0)}
    assert boots == {"scorer": ("loaded", "store"), "inner": ("loaded", "store")}


def test_why_says_of_each_runners_model_that_it_fits_in_that_runners_process(legacy: Legacy) -> None:
    done = legacy.run("artifacts", "why", "service:svc", "--json")
    assert done.returncode == 0, done.stderr
    assert [(model["model"], model["fits"]) for model in json.loads(done.stdout)] == [("scorer", True), ("inner", True)]


def test_pack_takes_what_can_travel_of_all_runners(packed: tuple[Legacy, Ran]) -> None:
    legacy, done = packed
    assert done.returncode == 1, done.stderr
    assert "  packed: compiled/scorer/" in done.stdout
    assert "  not packed: made by engine 'jit'" in done.stdout
    assert done.stdout.splitlines()[-1] == '  - "/compiled/**"'
    assert [path.name for path in (legacy.folder / "compiled").iterdir()] == ["scorer"]


def test_a_runner_of_a_bento_on_another_machine_loads_what_was_packed(
    packed: tuple[Legacy, Ran], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    answer, boots = serve(tmp_path, home, build(packed[0].folder, home), ROWS)
    assert answer["scores"] == rows_of(1.0)
    assert boots == {"scorer": ("loaded", "bento"), "inner": ("compiled", "")}


def build(folder: Path, home: Path) -> str:
    """The tag of the folder's Bento in that home."""
    command = [sys.executable, "-m", "bentoml", "build", "--output", "tag"]
    done = subprocess.run(command, cwd=folder, env=environment(home), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().rpartition("__tag__:")[2]


def test_a_runner_as_a_service_is_warmed_with_the_runners_threads_and_loaded(legacy: Legacy) -> None:
    done = legacy.run("warm", "service:Api.scorer", "--json")
    assert done.returncode == 0, done.stderr
    [report] = json.loads(done.stdout)
    assert (report["model"], report["outcome"], report["place"]) == ("scorer", "loaded", "store")  # as the runner's
    answer, boots = serve(legacy.folder, legacy.home, "service:Api", {"rows": ROWS})
    assert answer == {"scores": rows_of(1.0)}
    assert boots == {"scorer": ("loaded", "store")}


def test_explain_makes_the_runners_too(legacy: Legacy) -> None:
    done = legacy.run("explain", "service:svc")
    assert (done.returncode, done.stdout) == (0, "scorer: one graph\ninner: one graph\n"), done.stderr


def test_a_service_whose_runners_compile_nothing_says_so(legacy: Legacy) -> None:
    done = legacy.run("warm", "service:without")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "service:without compiles no model" in done.stderr


def test_a_runner_that_cannot_be_made_is_status_2_with_its_name_and_error(legacy: Legacy) -> None:
    done = legacy.run("warm", "service:broken")
    assert (done.returncode, done.stdout) == (2, "")
    assert "RuntimeError: no weights" in done.stderr
    assert "service:broken: runner 'failing': it could not be made; its error is above" in done.stderr
