"""warm: a service made as its worker makes it, without serving."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from bentoml_compile.artifacts.signing import KEY, PrivateKey
from bentoml_compile.artifacts.store import Store
from tests.cli.conftest import Project, Ran


def test_a_model_is_compiled_and_stored_though_it_is_to_start_in_the_background(first: tuple[Project, Ran]) -> None:
    project, done = first
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    name, outcome, engine, seconds, unit, fingerprint = line.split()
    assert (name, outcome, engine, unit) == ("tiny", "compiled", "aot", "s")
    assert float(seconds) > 0
    [artifact] = Store(project.store).artifacts()
    assert (artifact.model, artifact.fingerprint, artifact.engine) == ("tiny", fingerprint, "aot")


def test_the_service_is_made_as_its_first_worker_without_its_dependency(first: tuple[Project, Ran]) -> None:
    _, done = first
    assert "worker: 1" in done.stderr
    assert "dependency made" not in done.stderr
    assert "not made: service:Entry.dependency" in done.stderr


def test_its_traces_are_written_before_the_command_ends(first: tuple[Project, Ran]) -> None:
    project, _ = first
    tree = project.run("trace", "traces.jsonl").stdout
    assert "bentoml.worker.boot" in tree
    assert "torch_compile.startup" in tree
    assert "outcome=compiled" in tree


@pytest.mark.parametrize("service", ["Entry", "Entry.dependency", "InBackground", "Hooked", "Threaded"])
def test_a_stored_model_is_loaded_wherever_the_worker_compiles_it(project: Project, service: str) -> None:
    done = project.run("warm", f"service:{service}", "--json")
    assert done.returncode == 0, done.stderr
    [report] = json.loads(done.stdout)  # and nothing of what the service has printed
    assert (report["model"], report["outcome"], report["engine"]) == ("tiny", "loaded", "aot")
    assert "imported" in done.stderr


def test_a_model_that_is_served_eagerly_is_told_with_the_reason_and_status_1(project: Project) -> None:
    done = project.run("warm", "service:Mixed")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tiny  loaded  aot  ")
    assert lines[1].startswith("off  eager  eager  ")
    assert lines[2] == "  compiling is switched off (enabled: false, or TORCH_COMPILE_DISABLE=1)"
    assert lines[3].startswith("traced  compiled  jit  ")
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("service:Crash", "no weights"),
        ("service:Exiting", "service:Exiting could not be made: it ended the process, with 0"),
        ("exits_on_import:Service", "exits_on_import:Service could not be made: it ended the process, with None"),
        ("service:Refused", "torch._dynamo.graph_break()"),
        ("service:Calling", "service:Calling could not be made"),
        ("service:Demanding", "needs the environment variable NOT_SET_ANYWHERE"),
        ("service:Failing", "service:Failing: service 'Failing': it could not be made; its error is above"),
        ("service:Leaving", "service:Leaving: service 'Leaving': it ended the process, with 3"),
        ("service:Killed", "service:Killed: service 'Killed': its process was ended by signal 9"),
        ("service:Missing", "Missing"),
        ("nowhere:Service", "nowhere"),
    ],
)
def test_a_service_that_cannot_be_made_is_status_2(project: Project, target: str, words: str) -> None:
    (project.folder / "exits_on_import.py").write_text("import sys; sys.exit()")
    done = project.run("warm", target)
    assert done.returncode == 2
    assert done.stdout == ""
    assert words in done.stderr


def test_a_worker_in_a_process_of_its_own_ends_with_the_command_however_that_is_ended(project: Project) -> None:
    command, file = project.start("warm", "service:Endless"), project.folder / "pid"
    wait_until(file.exists)
    worker = psutil.Process(int(file.read_text()))
    os.kill(command.pid, signal.SIGKILL)
    assert project.forked.wait(command) == -signal.SIGKILL
    wait_until(lambda: is_over(worker))


def is_over(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_a_deployments_config_counts(project: Project) -> None:
    done = project.run("warm", "service:Entry", BENTOML_CONFIG_OPTIONS="services.Entry.torch_compile.enabled=false")
    assert done.returncode == 1, done.stderr
    assert "tiny  eager  eager" in done.stdout


@pytest.mark.parametrize("service", ["Nothing", "legacy"])
def test_a_service_without_models_says_so(project: Project, service: str) -> None:
    done = project.run("warm", f"service:{service}", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    assert f"service:{service} compiles no model" in done.stderr


@pytest.mark.parametrize("command", ["warm", "pack", "artifacts why"])
def test_a_service_that_only_depends_on_others_is_status_1_and_says_what_to_name(
    project: Project, command: str
) -> None:
    done = project.run(*command.split(), "service:Front")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    words = "service:Front has no model of its own; name what it depends on: service:Front.first, service:Front.second"
    assert done.stderr.splitlines()[-1] == words
    assert "compile_model(...)" not in done.stderr


def test_a_services_environment_is_there_before_torch_counts_its_threads(project: Project) -> None:
    done = project.run("warm", "service:Placed")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("placed  compiled  jit")
    [threads] = [each.axes["threads"] for each in Store(project.store).artifacts() if each.model == "placed"]
    assert threads == "1"


def test_a_dependency_sees_the_entrys_environment_then_its_own_then_the_processs(project: Project) -> None:
    done = project.run("warm", "service:Outer.inner", BOTH="process", OWN="process", OUTER="process")
    assert done.returncode == 0, done.stderr
    assert "sees process inner process" in done.stderr
    done = project.run("warm", "service:Outer.inner")
    assert "sees outer inner outer" in done.stderr


def test_what_could_not_be_uploaded_is_told_with_status_1(project: Project) -> None:
    (project.folder / "remote").write_text("no folder")
    key = PrivateKey.new()
    remote = f"file://{project.folder}/remote"
    artifacts = {"remote": remote, "remote_timeout": 120, "public_keys": [str(key.public)]}
    overrides = {"services": {"Entry": {"torch_compile": {"artifacts": artifacts}}}}
    env = {"BENTOML_CONFIG_OVERRIDES": json.dumps(overrides), KEY: key.to_pem().decode()}

    refused = project.run("warm", "service:Entry", **env)
    (project.folder / "remote").unlink()
    done = project.run("warm", "service:Entry", **env)

    assert (refused.returncode, done.returncode) == (1, 0), refused.stderr + done.stderr
    assert "not everything was uploaded" in refused.stderr
    assert list((project.folder / "remote").glob("tiny/*/*.json"))
