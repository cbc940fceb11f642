"""Where a model's config comes from: BentoML's merged config of the service that is being constructed.

BentoML keeps its config in the process, so each case runs in a process of its own: most in one that is forked where
BentoML is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forked import Forked
from tests.servers import Server, free_port

SERVICES = """
import bentoml
from bentoml_compile.bento import settings

settings.install()

@bentoml.service(torch_compile={"mode": "max-autotune", "models": {"head": {"mode": "default"}}})
class Dependency:
    def __init__(self):
        self.config = settings.settings_for("encoder")
        self.head = settings.settings_for("head")

@bentoml.service(
    name="my-embedder",
    torch_compile={
        "mode": "reduce-overhead",
        "options": {"triton.cudagraphs": False},
        "models": {"encoder": {"time_limit": 60}},
    },
)
class Embedder:
    dependency = bentoml.depends(Dependency)

    def __init__(self):
        self.before = settings.settings_for("encoder")
        self.dependencys = self.dependency.config  # constructed here, inside of this construction
        self.after = settings.settings_for("other")
        self.service = settings.current_service().name

    @bentoml.api
    def mode(self) -> str:
        return self.before.mode

@bentoml.service
class Plain:
    def __init__(self):
        self.config = settings.settings_for("encoder")
"""


@pytest.fixture(scope="module", autouse=True)
def _imported() -> Iterator[None]:
    global _forked
    with Forked(
        "bentoml", "_bentoml_sdk.service", "_bentoml_sdk.decorators", "bentoml_compile.bento.settings"
    ) as _forked:
        yield


_forked: Forked


def run(directory: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`script` in a process of its own, after all of service.py."""
    return _forked.run(f"from service import *\n{script}", directory, env=prepared(directory, **env))


def python(directory: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python in `directory`."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=prepared(directory, **env),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def prepared(directory: Path, **env: str) -> dict[str, str]:
    """The environment for `directory`, where service.py holds SERVICES unless it exists already."""
    if not (directory / "service.py").exists():
        (directory / "service.py").write_text(SERVICES)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("BENTOML_", "TORCH"))}
    clean |= {"BENTOML_HOME": str(directory / "home"), "BENTOML_DO_NOT_TRACK": "True", "HF_HUB_OFFLINE": "1"}
    return clean | env


def output(directory: Path, script: str, **env: str) -> list[str]:
    done = run(directory, script, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def refusal(directory: Path, script: str, **env: str) -> str:
    """The message of the ConfigError that ends the script."""
    done = run(
        directory, f"try:\n    {script}\nexcept bentoml.exceptions.BentoMLConfigException as e:\n    print(e)", **env
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout, "nothing was refused"
    return done.stdout


def overrides(service: str, **section: object) -> dict[str, str]:
    return {"BENTOML_CONFIG_OVERRIDES": json.dumps({"services": {service: {"torch_compile": section}}})}


def test_each_service_has_its_own_config_also_when_constructed_inside_of_another(tmp_path: Path) -> None:
    script = """
one = Embedder()
print(one.before.mode, one.before.time_limit, one.dependencys.mode, one.after.mode, one.after.time_limit, one.service)
print(one.before.options["triton.cudagraphs"], Embedder().before.mode, Plain().config.mode, Embedder().after.mode)
print(settings.current_service(), settings.settings_for("encoder").mode)
"""
    assert output(tmp_path, script) == [
        *("reduce-overhead", "60.0", "max-autotune", "reduce-overhead", "1800.0", "my-embedder"),
        *("False", "reduce-overhead", "default", "reduce-overhead"),
        *("None", "default"),
    ]


def test_a_dependency_constructed_inside_leaves_bentomls_merged_config_as_its_entry_needs_it(tmp_path: Path) -> None:
    script = """
from bentoml._internal.configuration.containers import BentoMLContainer
Embedder()
print(BentoMLContainer.config.get()["services"]["my-embedder"]["torch_compile"]["mode"])
"""
    assert output(tmp_path, script) == ["reduce-overhead"]


def test_a_config_file_is_overridden_by_json_and_that_by_options(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(
        "services:\n  my-embedder:\n    torch_compile: {mode: default, fullgraph: true, time_limit: 7, engine: jit}\n"
    )
    env = {
        "BENTOML_CONFIG": str(file),
        **overrides("my-embedder", fullgraph="allow_breaks", time_limit=8),
        "BENTOML_CONFIG_OPTIONS": 'services."my-embedder".torch_compile.time_limit=9',
    }
    script = "c = Embedder().after\nprint(c.mode, c.fullgraph, c.time_limit, c.engine, c.options['triton.cudagraphs'])"
    assert output(tmp_path, script, **env) == ["default", "allow_breaks", "9.0", "jit", "False"]


def test_a_deployment_reaches_one_model_of_a_service(tmp_path: Path) -> None:
    env = {"BENTOML_CONFIG_OPTIONS": "services.Dependency.torch_compile.models.head.verify=false"}
    script = "d = Dependency()\nprint(d.head.mode, d.head.verify, d.config.mode, d.config.verify.strict)"
    assert output(tmp_path, script, **env) == ["default", "False", "max-autotune", "False"]


def test_a_deployment_gives_ranges_by_json_or_dotted_paths(tmp_path: Path) -> None:
    """Dimensions are text in both: an integer key would end BentoML's merge."""
    script = "print(Plain().config.dynamic)"
    dotted = {"BENTOML_CONFIG_OPTIONS": "services.Plain.torch_compile.dynamic.input_ids.0=[1,64]"}
    for env in (dotted, overrides("Plain", dynamic={"input_ids": {"0": [1, 64]}})):
        assert " ".join(output(tmp_path, script, **env)) == "{'input_ids': {0: (1, 64)}}"


def test_a_deployment_configures_a_service_that_says_nothing_itself(tmp_path: Path) -> None:
    script = "print(Plain().config.mode, Embedder().before.mode)"
    assert output(tmp_path, script, **overrides("Plain", mode="max-autotune")) == ["max-autotune", "reduce-overhead"]


def test_an_environment_changed_between_two_instances_counts_for_the_second(tmp_path: Path) -> None:
    script = f"""
import os
print(Plain().config.mode)
os.environ.update({overrides("Plain", mode="max-autotune")})
print(Plain().config.mode)
"""
    assert output(tmp_path, script) == ["default", "max-autotune"]


def test_a_service_that_bentoml_did_not_merge_still_has_its_decorators_config_under_overrides(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(
        SERVICES
        + """
@bentoml.service
class Outer:
    def __init__(self):
        self.config = Dependency().config  # no `depends`: BentoML knows nothing of it
        self.own = settings.settings_for("encoder")
"""
    )
    script = "one = Outer()\nprint(one.config.mode, one.config.time_limit, one.own.mode)"
    assert output(tmp_path, script, **overrides("Dependency", time_limit=5)) == ["max-autotune", "5.0", "default"]


def test_a_wrong_override_is_refused_before_the_services_own_code_runs(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(
        SERVICES.replace("self.config = settings", "print('constructed'); self.config = settings")
    )
    message = refusal(tmp_path, "Plain()", **overrides("Plain", mode="max_autotune"))
    assert "service 'Plain'" in message
    assert "torch_compile.mode: 'max_autotune' is not allowed (did you mean 'max-autotune'?)" in message
    assert "constructed" not in message


def test_a_wrong_section_of_a_dependency_is_refused_with_its_name(tmp_path: Path) -> None:
    message = refusal(tmp_path, "Embedder.inject_config()", **overrides("Dependency", models={"head": {"verify": 3}}))
    assert "service 'Dependency'" in message
    assert "torch_compile.models.head.verify: 3 is not allowed" in message


def test_a_decorators_section_must_be_a_mapping_with_text_as_keys(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(
        SERVICES
        + """
@bentoml.service(torch_compile=True)
class Flag: ...

@bentoml.service(torch_compile={"options": {3: 1}})
class Number: ...
"""
    )
    assert "service 'Flag'" in refusal(tmp_path, "Flag()")
    assert "torch_compile.options: the key 3 is not text; write '3'" in refusal(tmp_path, "Number()")


def test_a_section_that_no_model_used_is_warned_about_with_the_nearest_name(tmp_path: Path) -> None:
    done = run(tmp_path, "Plain()", **overrides("Plain", models={"encodr": {"mode": "default"}}))
    assert done.returncode == 0, done.stderr
    assert "'Plain': torch_compile.models.encodr is not used (did you mean 'encoder'?)" in done.stderr
    assert "is not used" not in run(tmp_path, "Embedder()").stderr


def test_threads_started_in_a_worker_have_the_workers_config(tmp_path: Path) -> None:
    script = """
from threading import Thread
bentoml.server_context.service_name = Dependency.name  # as BentoML's worker sets it, before to_asgi
Dependency.to_asgi()
thread = Thread(target=lambda: print(settings.settings_for("other").mode, settings.current_service().name))
thread.start()
thread.join()
"""
    assert output(tmp_path, script) == ["max-autotune", "Dependency"]


def test_a_legacy_runner_reads_the_section_of_its_own_name(tmp_path: Path) -> None:
    script = """
from service import *
bentoml.server_context.service_name = "my-runner"  # as BentoML's runner process sets it
print(settings.settings_for("model").mode)
"""
    # not forked: BentoML merges a config that is no service's when it is imported
    done = python(tmp_path, "-c", script, **overrides("my-runner", mode="max-autotune"))
    assert (done.returncode, done.stdout) == (0, "max-autotune\n"), done.stderr


@pytest.mark.parametrize("services", [None, {"my-runner": None}, {"my-runner": 7}], ids=["none", "empty", "a number"])
def test_a_legacy_runner_of_which_the_config_says_nothing_has_its_own_section(tmp_path: Path, services: Any) -> None:
    script = """
from service import *
bentoml.server_context.service_name = "my-runner"
print(settings.settings_for("model").mode)
"""
    done = python(tmp_path, "-c", script, BENTOML_CONFIG_OVERRIDES=json.dumps({"services": services}))
    assert (done.returncode, done.stdout) == (0, "default\n"), done.stderr[-2000:]


def test_bentomls_home_is_found_without_being_created(tmp_path: Path) -> None:
    home = tmp_path / "not" / "there"
    script = "print(settings.bentoml_home()); del os.environ['BENTOML_HOME']; print(settings.bentoml_home())"
    env = {"BENTOML_HOME": "$WHERE/not/there", "WHERE": str(tmp_path), "HOME": str(tmp_path / "me")}
    assert output(tmp_path, f"import os\n{script}", **env) == [str(home), str(tmp_path / "me" / "bentoml")]
    assert not home.exists()


def test_serving_with_a_wrong_value_ends_in_the_first_process_before_any_worker(tmp_path: Path) -> None:
    command = ("-m", "bentoml", "serve", "service:Embedder", "--host", "127.0.0.1", "--port", str(free_port()))
    done = python(tmp_path, *command, **overrides("Dependency", mode="max_autotune"))
    assert done.returncode == 1
    assert "service 'Dependency'" in done.stderr
    assert "torch_compile.mode: 'max_autotune' is not allowed (did you mean 'max-autotune'?)" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Starting production HTTP BentoServer" not in done.stdout + done.stderr


def test_a_development_worker_gives_each_service_in_it_its_own_config(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(
        SERVICES.replace("return self.before.mode", "return f'{self.before.mode} {self.dependencys.mode}'")
    )
    with Server(tmp_path, tmp_path / "home", target="service:Embedder", arguments=["--development"]) as server:
        answer = subprocess.run(
            [sys.executable, "-c", f"import httpx; print(httpx.post('{server.base_url}/mode', timeout=120).text)"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert answer.stdout.strip() == "reduce-overhead max-autotune"


def test_building_a_bento_with_a_wrong_value_fails(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(SERVICES.replace('"reduce-overhead"', '"reduce_overhead"'))
    (tmp_path / "bentofile.yaml").write_text("service: service:Embedder\n")
    done = python(tmp_path, "-m", "bentoml", "build")
    assert done.returncode == 1
    assert "torch_compile.mode: 'reduce_overhead' is not allowed (did you mean 'reduce-overhead'?)" in done.stderr
