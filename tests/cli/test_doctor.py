"""doctor, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.doctor.findings import without_settings
from tests.doctor.test_storage import make_artifact
from tests.forked import Forked
from tests.otlp_receiver import OtlpReceiver


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_settings(monkeypatch)


SERVICE = """
import bentoml

print("imported")

@bentoml.service(
    resources={"gpu": 1},
    traffic={"timeout": 5},
    torch_compile={"artifacts": {"store": "STORE"}, "models": {"one": {"artifacts": {"remote": "file:///dev/null/shared"}}}},
    tracing={"exporter_type": "otlp", "otlp": {"protocol": "http", "endpoint": "ENDPOINT"}},
)
class Configured:
    def __init__(self):
        raise RuntimeError("made")
"""


# `load_config` reads the case's environment, as importing BentoML does in a process of its own
COMMAND = """
from bentoml._internal.configuration import load_config
from bentoml_compile.cli import main

load_config()
main()
"""


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    """Each command has a process of its own: BentoML keeps its config there, and a check that hangs ends it."""
    with Forked("torch", "_bentoml_sdk.service", "bentoml_compile.bento.compile") as forked:
        yield forked


def doctor(forked: Forked, folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "BENTOML_HOME": str(folder / "home"), "BENTOML_DO_NOT_TRACK": "True", **more}
    return forked.run(COMMAND, folder, "doctor", *arguments, env=environment)


def test_doctor_prints_a_line_for_each_finding_and_exits_by_the_worst(forked: Forked, tmp_path: Path) -> None:
    done = doctor(forked, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ok       store       {tmp_path}/home/compile: not there yet" in done.stdout
    done = doctor(forked, tmp_path, "--json", TORCH_COMPILE_DISABLE="1", CXX="/nowhere/g++")
    assert done.returncode == 1, done.stderr
    found = {item["check"]: item for item in json.loads(done.stdout)}
    assert found["environment"]["status"] == "warning"
    assert (found["compiler"]["status"], found["compiler"]["fix"]) == ("problem", "unset CXX")
    assert "torch.default_dtype" in found["machine"]["details"]


def test_a_services_config_decides_what_is_checked(forked: Forked, tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        text = SERVICE.replace("STORE", str(tmp_path / "own")).replace("ENDPOINT", receiver.endpoint)
        (tmp_path / "service.py").write_text(text)
        overrides = {"services": {"Configured": {"torch_compile": {"artifacts": {"write": False}}}}}
        overriding = {"BENTOML_CONFIG_OVERRIDES": json.dumps(overrides)}
        make_artifact(tmp_path / "compiled", 1)
        done = doctor(forked, tmp_path, "service:Configured", CXX="nowhere", **overriding)
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr
    assert lines[0].startswith("ok       service     service:Configured is loaded")
    assert any(line.startswith("warning  compiler    CXX=nowhere is no program") for line in lines)
    assert any(line.startswith(f"ok       store       {tmp_path}/own: ") and "only read" in line for line in lines)
    assert any(line.startswith("problem  remote      file:///dev/null/shared is not there") for line in lines)
    assert f"ok       exporter    BentoML's tracing config: {receiver.endpoint} takes spans" in lines
    if torch.version.cuda is None:
        assert any(line.startswith("problem  cuda  ") and "the service asks for a GPU" in line for line in lines)


LEGACY = """
import bentoml
import bentoml_compile.bento.compile

class Asking(bentoml.legacy.Runnable):
    SUPPORTED_RESOURCES, SUPPORTS_CPU_MULTI_THREADING = ("nvidia.com/gpu", "cpu"), True
    torch_compile = {"artifacts": {"store": "STORE"}}

    @bentoml.legacy.Runnable.method
    def ask(self): ...

svc = bentoml.legacy.Service("svc", runners=[bentoml.legacy.Runner(Asking, name="asking")])
"""


def test_the_config_of_a_legacy_services_runners_decides_what_is_checked(forked: Forked, tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(LEGACY.replace("STORE", str(tmp_path / "own")))
    done = doctor(forked, tmp_path, "service:svc", CXX="nowhere")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok       service     service:svc is loaded")
    assert any(line.startswith("problem  compiler    CXX=nowhere is no program") for line in lines)
    assert any(line.startswith(f"ok       store       {tmp_path}/own: ") for line in lines)
    make_artifact(tmp_path / "compiled", 1)
    lines = doctor(forked, tmp_path, "service:svc", CXX="nowhere").stdout.splitlines()
    assert any(line.startswith("warning  compiler    CXX=nowhere is no program") for line in lines)


@pytest.mark.parametrize(
    ("target", "section", "path", "names"),
    [
        (
            "Configured",
            {"Confgured": {"torch_compile": {"mode": "default"}}},
            "services.Confgured.torch_compile",
            "Configured",
        ),
        ("Configured", {"torch_compile": {"mode": "default"}}, "services.torch_compile", "Configured"),
        (
            "Entry.first",
            {"first": {"torch_compile": {"mode": "default"}}},
            "services.first.torch_compile",
            "Configured, Entry",
        ),
        ("svc", {"Asking": {"torch_compile": {"mode": "default"}}}, "services.Asking.torch_compile", "asking, svc"),
    ],
    ids=["typo", "of all", "of a dependency", "of a Runnable's class"],
)
def test_a_section_that_nothing_reads_is_warned_about_with_the_names_that_exist(
    forked: Forked, tmp_path: Path, target: str, section: dict[str, object], path: str, names: str
) -> None:
    legacy, store = target == "svc", {"STORE": str(tmp_path / "own"), "ENDPOINT": "http://localhost:1"}
    text = LEGACY if legacy else f"{SERVICE}\n@bentoml.service\nclass Entry:\n    first = bentoml.depends(Configured)\n"
    for word, value in store.items():
        text = text.replace(word, value)
    (tmp_path / "service.py").write_text(text)
    read = (
        {"asking": {"torch_compile": {"mode": "default"}}}
        if legacy
        else {"Configured": {"torch_compile": {"mode": "default"}}}
    )
    done = doctor(
        forked, tmp_path, f"service:{target}", BENTOML_CONFIG_OVERRIDES=json.dumps({"services": section | read})
    )
    assert done.stdout.startswith("ok       service "), done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if "which nothing here reads" in line]
    assert line.startswith(f"warning  service     BentoML's config has {path}, ")
    assert line.endswith(f"the target's services and runners are: {names}")
    if names != "Configured, Entry" and path != "services.torch_compile":
        assert f"(did you mean '{names.split(',')[0]}'?)" in line


def test_a_wrong_key_of_a_runner_is_a_problem_with_the_places_where_it_may_be(forked: Forked, tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(
        LEGACY.replace("STORE", str(tmp_path / "own")).replace("artifacts", "artifact")
    )
    done = doctor(forked, tmp_path, "service:svc", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)[0]
    assert (found["check"], found["status"]) == ("service", "problem")
    assert "torch_compile.artifact: unknown key" in found["text"]
    assert found["fix"].startswith("correct torch_compile of the Runnable's class, in runnable_init_params or ")


def test_a_section_under_runners_which_bentoml_refuses_is_a_problem_with_its_right_place(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(LEGACY.replace("STORE", str(tmp_path / "own")))
    config = {"runners": {"asking": {"torch_compile": {"mode": "default"}}}}
    environment = {**os.environ, "BENTOML_HOME": str(tmp_path), "BENTOML_CONFIG_OVERRIDES": json.dumps(config)}
    command = [sys.executable, "-c", "from bentoml_compile.cli import main; main()", "doctor", "service:svc", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)[0]
    assert (found["check"], found["status"]) == ("service", "problem")
    assert "report it" not in done.stdout  # nor has a later check failed by it
    assert found["fix"] == "put it under services.asking.torch_compile instead of runners.asking"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "import bentoml\n@bentoml.service(torch_compile={'mod': 1})\nclass Any: ...",
            "torch_compile.mod: unknown key",
        ),
        ("import nowhere", "service:Any cannot be loaded"),
        ("import sys; sys.exit(3)", "service:Any cannot be loaded"),
    ],
)
def test_a_service_that_cannot_be_loaded_is_a_problem_and_the_rest_is_checked(
    forked: Forked, tmp_path: Path, code: str, text: str
) -> None:
    (tmp_path / "service.py").write_text(code)
    done = doctor(forked, tmp_path, "service:Any")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("problem  service     ")
    assert text in done.stdout
    assert "ok       home " in done.stdout


def test_the_command_ends_although_a_check_hangs(tmp_path: Path) -> None:
    """In a thread that the interpreter's end would wait for."""
    code = """
import concurrent.futures, threading
from bentoml_compile.bento import doctor
from bentoml_compile.cli import main

def look():
    return concurrent.futures.ThreadPoolExecutor().submit(threading.Event().wait).result()

doctor._checks = lambda asked: [doctor.Check("stuck", look, 0.2)]
main(["doctor"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert "problem  stuck       no answer within 0.2 s" in done.stdout
