"""docs/deploying.md and docs/kubernetes say what BentoML, Kubernetes, the config and the command line take."""

from __future__ import annotations

import ast
import copy
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bentoml
import click
import kubernetes_validate
import prometheus_client
import pytest
import yaml

from bentoml_compile.artifacts.signing import PublicKey
from bentoml_compile.cli import main
from bentoml_compile.config import CompileConfig, parse_service_section
from bentoml_compile.telemetry.metrics import MetricsListener
from tests.conftest import CHECKOUT

PAGE = CHECKOUT / "docs" / "deploying.md"
MANIFESTS = sorted((CHECKOUT / "docs" / "kubernetes").glob("*.yaml"))
VERSIONS = ("1.31", "1.37")  # of Kubernetes: the oldest with podFailurePolicy as it is now, and a new one

# Asked in a process of its own: to make an app sets BentoML's config for the whole process.
_ASK_BENTOML = """
import bentoml, json
from _bentoml_impl.server.app import ServiceAppFactory
from bentoml._internal.configuration.containers import BentoMLContainer
from bentoml._internal.container.generate import BENTO_PATH, BENTO_UID_GID

@bentoml.service
class Empty:
    pass

Empty.inject_config()
paths = [route.path for route in ServiceAppFactory(Empty).routes]
port = BentoMLContainer.http.port.get()
print(json.dumps({"paths": paths, "port": port, "bento": BENTO_PATH, "user": BENTO_UID_GID}))
"""


def load(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


DOCUMENTS = list(chain.from_iterable(load(path) for path in MANIFESTS))
WORKLOADS = [document for document in DOCUMENTS if document["kind"] in ("Deployment", "Job")]


def label(document: dict[str, Any]) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


def blocks(*languages: str) -> list[str]:
    """The page's fenced blocks in these languages."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in fences if language in languages]


def found(value: object, key: str) -> Iterator[Any]:
    """Every value of `key`, however deep, also within text that is JSON."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = json.loads(value)
    if isinstance(value, dict):
        yield from (inner for name, inner in value.items() if name == key)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from found(inner, key)


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def container(workload: dict[str, Any]) -> dict[str, Any]:
    [only] = pod(workload)["containers"]
    return only


def named(kind: str, name: str) -> dict[str, Any]:
    [document] = [one for one in DOCUMENTS if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return document


def environment(workload: dict[str, Any]) -> dict[str, str]:
    """The container's variables, Secrets left out."""
    maps = [source["configMapRef"]["name"] for source in container(workload)["envFrom"] if "configMapRef" in source]
    own = {one["name"]: one["value"] for one in container(workload).get("env", [])}
    return {key: text for name in maps for key, text in named("ConfigMap", name)["data"].items()} | own


workloads = pytest.mark.parametrize("workload", WORKLOADS, ids=label)


@pytest.fixture(scope="module")
def bento() -> dict[str, Any]:
    """BentoML's own paths, port, folder and user."""
    done = subprocess.run([sys.executable, "-c", _ASK_BENTOML], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# Kubernetes


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", DOCUMENTS, ids=label)
def test_each_manifest_is_what_kubernetes_takes(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


@workloads
def test_a_key_that_kubernetes_does_not_know_is_found(workload: dict[str, Any]) -> None:
    broken = copy.deepcopy(workload)
    container(broken)["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_there_is_a_manifest_of_each_kind_and_the_page_links_to_each_file() -> None:
    kinds = {document["kind"] for document in DOCUMENTS}
    assert kinds == {"ConfigMap", "Deployment", "Job", "Secret", "Service", "ServiceAccount"}
    links = set(re.findall(r"\]\(kubernetes/([^)]+)\)", PAGE.read_text()))
    assert links == {path.name for path in MANIFESTS}


@workloads
def test_every_name_that_a_pod_refers_to_exists(workload: dict[str, Any]) -> None:
    assert named("ServiceAccount", pod(workload)["serviceAccountName"])
    sources = container(workload)["envFrom"]
    assert all(named("ConfigMap", one["configMapRef"]["name"]) for one in sources if "configMapRef" in one)
    assert all(named("Secret", one["secretRef"]["name"]) for one in sources if "secretRef" in one)
    secrets = [volume["secret"] for volume in pod(workload)["volumes"] if "secret" in volume]
    assert all(named("Secret", secret["secretName"]) for secret in secrets)
    mounted = [mount["name"] for mount in container(workload)["volumeMounts"]]
    assert sorted(mounted) == sorted(volume["name"] for volume in pod(workload)["volumes"])


def test_the_service_finds_the_replicas_and_their_port() -> None:
    [deployment] = [one for one in WORKLOADS if one["kind"] == "Deployment"]
    [service] = [one for one in DOCUMENTS if one["kind"] == "Service"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["ports"][0]["targetPort"] == container(deployment)["ports"][0]["name"]


def test_the_signing_key_is_only_where_artifacts_are_made_and_lies_where_its_variable_says() -> None:
    for workload in WORKLOADS:
        file = environment(workload).get("BENTOML_COMPILE_SIGNING_KEY_FILE")
        volumes = [volume for volume in pod(workload)["volumes"] if "secret" in volume]
        assert (file is not None) == bool(volumes) == (workload["kind"] == "Job")
        for volume in volumes:
            [mount] = [one for one in container(workload)["volumeMounts"] if one["name"] == volume["name"]]
            keys = named("Secret", volume["secret"]["secretName"])["stringData"]
            assert file in [f"{mount['mountPath']}/{key}" for key in keys]


@workloads
def test_a_pod_runs_as_bentomls_user_and_writes_only_to_what_is_mounted(
    workload: dict[str, Any], bento: dict[str, Any]
) -> None:
    assert pod(workload)["securityContext"]["runAsUser"] == bento["user"]
    assert container(workload)["securityContext"]["readOnlyRootFilesystem"] is True
    empty = {volume["name"] for volume in pod(workload)["volumes"] if "emptyDir" in volume}
    writable = {mount["mountPath"] for mount in container(workload)["volumeMounts"] if mount["name"] in empty}
    assert writable == {environment(workload)["BENTOML_HOME"], "/tmp"}
    assert not any(Path(bento["bento"]).is_relative_to(path) for path in writable)
    assert container(workload).get("workingDir", f"{bento['bento']}/src") == f"{bento['bento']}/src"


def test_both_workloads_see_the_same_kind_of_machine_and_config() -> None:
    """Else the replicas would look for other artifacts than the Job makes."""
    first, second = ({**environment(one), "BENTOML_COMPILE_SIGNING_KEY_FILE": ""} for one in WORKLOADS)
    assert first == second
    for key in ("image", "resources"):
        assert container(WORKLOADS[0])[key] == container(WORKLOADS[1])[key]
    assert pod(WORKLOADS[0])["nodeSelector"] == pod(WORKLOADS[1])["nodeSelector"]
    assert first["OMP_NUM_THREADS"] == container(WORKLOADS[0])["resources"]["limits"]["cpu"]


# Probes


def probes() -> list[dict[str, Any]]:
    texts = [yaml.safe_load(text) for text in blocks("yaml")]
    names = ("startupProbe", "readinessProbe", "livenessProbe")
    return [probe for name in names for probe in found([*DOCUMENTS, *texts], name)]


def test_probes_ask_bentomls_own_paths_and_port(bento: dict[str, Any]) -> None:
    assert {probe["httpGet"]["path"] for probe in probes()} == {"/livez", "/readyz"}
    assert {"/livez", "/readyz", "/metrics"} <= set(bento["paths"])
    [deployment] = [one for one in WORKLOADS if one["kind"] == "Deployment"]
    [port] = container(deployment)["ports"]
    assert port == {"name": "http", "containerPort": bento["port"]}
    assert {probe["httpGet"]["port"] for probe in probes()} == {"http"}
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(bento["port"])
    assert annotations["prometheus.io/path"] in bento["paths"]


def test_nothing_restarts_or_gives_up_on_a_replica_that_compiles() -> None:
    limit = CompileConfig().time_limit
    [blocking] = [probe for text in blocks("yaml") for probe in found(yaml.safe_load(text), "startupProbe")]
    assert blocking["periodSeconds"] * blocking["failureThreshold"] > limit
    [deployment] = [one for one in WORKLOADS if one["kind"] == "Deployment"]
    [section] = found(environment(deployment), "torch_compile")
    assert section["startup"] == "background"  # the manifest's own startup probe is shorter
    assert container(deployment)["startupProbe"]["httpGet"]["path"] == "/livez"
    assert container(deployment)["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert deployment["spec"]["progressDeadlineSeconds"] > limit
    [job] = [one for one in WORKLOADS if one["kind"] == "Job"]
    assert job["spec"]["activeDeadlineSeconds"] > limit


# The config


def sections() -> list[dict[str, Any]]:
    """Every torch_compile in the manifests and in the page's YAML, JSON and Python."""
    texts = [yaml.safe_load(text) for text in blocks("yaml", "json")]
    nodes = chain.from_iterable(ast.walk(ast.parse(text)) for text in blocks("python"))
    keywords = [node for node in nodes if isinstance(node, ast.keyword) and node.arg == "torch_compile"]
    return [*found([*DOCUMENTS, *texts], "torch_compile"), *(ast.literal_eval(node.value) for node in keywords)]


def test_every_torch_compile_section_is_accepted() -> None:
    artifacts = []
    for section in sections():
        config = parse_service_section(section, service="SentenceEmbedder").for_model("encoder")
        artifacts.append(config.artifacts)
    shared = [one for one in artifacts if one.remote is not None]
    assert len(artifacts) >= 3
    assert len(shared) >= 2
    for one in shared:
        assert one.remote_timeout == CompileConfig().artifacts.remote_timeout  # the page says that it is the default
        assert one.max_bytes
        assert [str(PublicKey.parse(key)) for key in one.public_keys] == one.public_keys != []


def test_the_store_has_room_for_more_than_it_keeps() -> None:
    sizes = {volume["emptyDir"]["sizeLimit"] for one in WORKLOADS for volume in pod(one)["volumes"][:1]}
    [limit] = sizes
    assert limit.endswith("Gi")
    assert all(kept < int(limit.removesuffix("Gi")) << 30 for kept in found(DOCUMENTS, "max_bytes"))


# The command line


def commands() -> list[str]:
    """Every `bentoml-compile ...` of the page and of the manifests."""
    texts = [path.read_text() for path in (PAGE, *MANIFESTS)]
    in_text = re.findall(r"`(bentoml-compile [a-z][^`]*)`", "\n".join(texts))
    in_blocks = re.findall(r"^(bentoml-compile .*)$", "\n".join(blocks("console")), re.MULTILINE)
    in_pods = [shlex.join(args) for one in WORKLOADS if (args := container(one).get("args"))]
    return sorted({*in_text, *in_blocks, *in_pods})


@pytest.mark.parametrize("line", commands())
def test_every_command_is_one_that_there_is(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "signing-key.pem").touch()
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(line)
    assert program == "bentoml-compile"
    parse(main, program, arguments)


def test_a_command_that_there_is_not_is_found() -> None:
    with pytest.raises(click.UsageError, match="No such command 'shwo'"):
        parse(main, "bentoml-compile", ["artifacts", "shwo"])
    with pytest.raises(click.NoSuchOption, match="--older"):
        parse(main, "bentoml-compile", ["artifacts", "prune", "--older", "7d"])
    with pytest.raises(click.MissingParameter):
        parse(main, "bentoml-compile", ["explain"])


def test_the_page_names_the_commands_that_deploying_needs() -> None:
    assert {"warm", "pack", "keys", "artifacts", "doctor"} <= {shlex.split(line)[1] for line in commands()}


def parse(command: click.Command, name: str, arguments: list[str], parent: click.Context | None = None) -> None:
    """Reads a command line as click does, without running anything."""
    context = command.make_context(name, arguments, parent=parent)
    rest = [*getattr(context, "_protected_args", ()), *context.args]  # of a group: the command (click 8), and its own
    if isinstance(command, click.Group) and rest:
        with context:
            found_name, inner, left = command.resolve_command(context, rest)
        assert inner is not None
        parse(inner, found_name or "", left, context)


# Images and metrics


def test_the_image_in_the_page_is_one_that_bentoml_makes() -> None:
    [text] = [text for text in blocks("python") if "images.Image" in text]
    scope: dict[str, Any] = {"bentoml": bentoml, "__name__": __name__}
    exec(text, scope)  # the page's own
    assert isinstance(scope["SentenceEmbedder"], bentoml.Service)
    image = scope["image"]
    assert image.base_image.startswith("nvidia/cuda:")
    assert any("python3-pip" in command for command in image.commands)
    required = image.python_requirements.split()
    assert {".", "cryptography", "s3fs"} <= set(required)  # BentoML writes ".[s3]" as ". [s3]", which is no requirement


def test_bentomls_default_image_has_a_compiler() -> None:
    assert any("build-essential" in command for command in bentoml.images.Image().commands)


def test_alerts_ask_for_metrics_that_there_are() -> None:
    registry = prometheus_client.CollectorRegistry()
    kinds = ("Counter", "Gauge", "Histogram")
    MetricsListener(
        SimpleNamespace(**{kind: partial(getattr(prometheus_client, kind), registry=registry) for kind in kinds})
    )
    known = {f"{metric.name}{'_total' * (metric.type == 'counter')}" for metric in registry.collect()}
    asked = set(re.findall(r"torch_compile_\w+", PAGE.read_text()))
    assert {name.removesuffix("_bucket") for name in asked} <= known
    assert len(asked) >= 8
