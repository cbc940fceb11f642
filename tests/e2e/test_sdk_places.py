"""Services of the new SDK as a Bento, without a server, and as BentoML's app in this process, with compiled models."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bentoml
import numpy as np
import PIL.Image
import psutil
import pytest
from starlette.testclient import TestClient

from bentoml_compile.compiled_model import open_models
from tests.conftest import CHECKOUT
from tests.e2e import sdk_service
from tests.e2e.cors import ORIGIN
from tests.e2e.eager import eager_image, eager_logits, eager_rows, near, near_image, pixels_of
from tests.e2e.sdk_service import ENGINES
from tests.servers import Server, reserved_port
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

SERVICE = "tests.e2e.sdk_service:Served"

BUILD = """
import sys, bentoml
files = ["__init__", "models", "e2e/__init__", "e2e/cors", "e2e/networks", "e2e/sdk_service"]
include = [f"/tests/{name}.py" for name in files]
python = {"packages": ["torch"], "lock_packages": False}
print(bentoml.build(sys.argv[2], build_ctx=sys.argv[1], include=include, python=python).tag)
"""

LOAD = """
import json, sys, bentoml
answers = []
for _ in range(2):  # the names are free again once the models are closed
    service = bentoml.load(sys.argv[1])()
    answers.append(service.classify("local"))
    reports, file = service.reports(), sys.modules[type(service).__module__].__file__
    for model in (service.classifier, service.table, service.blender):
        model.close()
try:
    service.classify("local")
except RuntimeError as error:
    print(json.dumps({"answers": answers, "reports": reports, "file": file, "closed": str(error)}))
"""

SERVE = """
import asyncio, json, pathlib, sys, time, bentoml, httpx
tag, port, answers = sys.argv[1:]

def is_ready(url):  # BentoML's client would ask without a pause
    try:
        return httpx.get(url + "/readyz", timeout=120).status_code == 200
    except httpx.TransportError:
        return False

async def ask(url):
    async with bentoml.AsyncHTTPClient(url, timeout=120) as client:
        return await client.classify("async")

with bentoml.serve(tag, host="127.0.0.1", port=int(port)) as server:
    while not is_ready(server.url):
        time.sleep(0.1)
    with bentoml.SyncHTTPClient(server.url, timeout=120) as client:
        found = {"sync": client.classify("sync"), "reports": client.reports()}
    found["async"] = asyncio.run(ask(server.url))
pathlib.Path(answers).write_text(json.dumps(found))
"""


def run(script: str, *arguments: object, directory: Path, home: Path, **env: str) -> str:
    """What the script wrote last; a home of its own, and no process of it is left."""
    home.mkdir(exist_ok=True)
    clean = {key: text for key, text in os.environ.items() if not key.startswith("BENTOML_")}
    clean |= {"BENTOML_HOME": str(home), "BENTOML_DO_NOT_TRACK": "True", **env}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    try:
        done = subprocess.run(command, cwd=directory, env=clean, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        _, left = psutil.wait_procs(Server(directory, home).processes(), timeout=PATIENCE)
        for process in left:
            process.kill()
    assert left == []
    return (done.stdout.splitlines() or [""])[-1]


# as a Bento


@pytest.fixture(scope="module")
def bento(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The tag, and the BENTOML_HOME that has it."""
    home = tmp_path_factory.mktemp("bentos")
    return run(BUILD, CHECKOUT, SERVICE, directory=tmp_path_factory.mktemp("elsewhere"), home=home), home


def test_a_bento_is_served_by_its_tag_from_python(
    config: Callable[..., str], bento: tuple[str, Path], tmp_path: Path
) -> None:
    tag, home = bento
    env = {"BENTOML_CONFIG_OVERRIDES": config(Served={}), "WRITE_AT_SHUTDOWN": str(tmp_path / "shutdown")}
    with reserved_port() as port:
        run(SERVE, tag, port, tmp_path / "answers", directory=tmp_path, home=home, **env)
    found = json.loads((tmp_path / "answers").read_text())
    assert found["sync"] == near(eager_logits("sync")[0])
    assert found["async"] == near(eager_logits("async")[0])
    assert {name: report["engine"] for name, report in found["reports"].items()} == ENGINES
    assert json.loads((tmp_path / "shutdown").read_text()) == near(eager_logits("shutdown")[0])


@pytest.mark.parametrize("place", ["Bento", "module"])
def test_a_service_is_loaded_and_called_without_a_server(
    config: Callable[..., str], bento: tuple[str, Path], tmp_path: Path, place: str
) -> None:
    tag, home = bento
    target, directory = (tag, tmp_path) if place == "Bento" else (SERVICE, CHECKOUT)
    env = {"BENTOML_CONFIG_OVERRIDES": config(Served={})}
    found = json.loads(run(LOAD, target, directory=directory, home=home, **env))
    assert found["answers"] == [near(eager_logits("local")[0])] * 2
    assert {name: report["engine"] for name, report in found["reports"].items()} == ENGINES
    assert Path(found["file"]).is_relative_to(home if place == "Bento" else CHECKOUT)
    assert "closed" in found["closed"]


# BentoML's app in this process


@pytest.fixture
def in_process(config: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A client of a service's app; the keywords are config of `Held`."""

    @contextlib.contextmanager
    def app(service: bentoml.Service[Any], **held: Any) -> Iterator[TestClient]:
        monkeypatch.setenv("BENTOML_CONFIG_OVERRIDES", config(Features={}, Held=held))
        with TestClient(service.to_asgi()) as client:
            yield client

    sdk_service.go_on.clear()
    yield app
    sdk_service.go_on.set()
    for model in list(open_models.values()):
        model.close()


def test_a_method_s_only_input_is_the_request_s_body(in_process: Callable[..., Any]) -> None:
    texts = ["one", "two", "three"]
    document = {"title": "A title", "paragraphs": texts}
    with in_process(sdk_service.Features) as client:
        assert client.post("/root_text", content="a body").json() == near(eager_logits("a body")[0])
        assert client.post("/root_texts", json=texts).json() == near(eager_logits(*texts))
        assert client.post("/root_document", json=document).json() == near(eager_logits(*texts))
        assert client.post("/root_file", content=b"one\ntwo\nthree").json() == near(eager_logits(*texts))
        assert client.post("/root_document", json={"title": "A title"}).status_code == 400
        assert open_models["classifier"].report.engine == "aot"


def test_without_cors_no_other_page_is_let_in(in_process: Callable[..., Any], images: list[Path]) -> None:
    headers = {"Origin": ORIGIN}
    with in_process(sdk_service.Features) as client:
        assert client.options("/classify", headers=headers).status_code == 405
        answer = client.post("/classify", json={"text": "cors"}, headers=headers)
        assert answer.json() == near(eager_logits("cors")[0])
        assert not [name for name in answer.headers if name.startswith("access-control")]
        image = client.post("/mirror", files={"image": ("original.png", images[0].read_bytes(), "image/png")})
    pixels = pixels_of(images[0])
    mirrored = np.array(PIL.Image.open(io.BytesIO(image.content)))
    assert near_image(mirrored, eager_image(pixels, pixels[:, ::-1].copy()))


def test_a_composed_service_calls_the_other_one_s_model_in_one_process(in_process: Callable[..., Any]) -> None:
    with in_process(sdk_service.Front) as client:
        for method in ("/classify", "/classify_async"):
            answer = client.post(method, json={"text": "composed"})
            assert answer.json() == {"logits": near(eager_logits("composed")[0])}
        assert open_models["classifier"].report.engine == "aot"


ROW = np.array([[0.5, -1.0, 2.0, 0.0]], dtype=np.float32)


def test_a_request_that_takes_too_long_is_answered_with_504(in_process: Callable[..., Any]) -> None:
    with in_process(sdk_service.Held, traffic={"timeout": 10}) as client:
        late = client.post("/score", json={"rows": ROW.tolist()})
        assert sdk_service.entered.acquire(timeout=PATIENCE)
    assert late.status_code == 504
    assert late.json() == {"error": "Not able to process the request in 10 seconds"}


def test_one_request_more_than_max_concurrency_is_answered_with_429(in_process: Callable[..., Any]) -> None:
    with in_process(sdk_service.Held, traffic={"max_concurrency": 2}) as client, ThreadPoolExecutor(2) as pool:
        held = [pool.submit(client.post, "/score", json={"rows": ROW.tolist()}) for _ in range(2)]
        try:
            for _ in held:
                assert sdk_service.entered.acquire(timeout=PATIENCE)
            refused = client.post("/score", json={"rows": ROW.tolist()})
            assert client.get("/livez").status_code == 200
        finally:
            sdk_service.go_on.set()
        answers = [one.result().json() for one in held]
    assert (refused.status_code, refused.json()) == (429, {"error": "Too many requests"})
    assert answers == [near(eager_rows(ROW))] * 2
