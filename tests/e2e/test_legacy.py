"""A legacy service behind `bentoml serve`, with compiled models in its runners: its answers are eager's.

They refuse an input that would not run compiled code. Hence compiled code gave every answer.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path
from typing import Any

import bentoml
import bentoml.client
import httpx
import numpy as np
import PIL.Image
import psutil
import pytest

from tests.conftest import CHECKOUT
from tests.e2e.cors import CORS, ORIGIN
from tests.e2e.eager import eager_image, eager_logits, eager_rows, near, near_image, pixels_of
from tests.servers import Server, reserved_port, value
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.slow

TIMEOUT = 60  # seconds until BentoML gives a request up: long for every request but the one that is held
TARGET = "tests.e2e.legacy_service:svc"
ROWS = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


@dataclass
class Legacy:
    """A server; `held` is its folder of requests that are held, by name."""

    server: Server
    held: Path

    def post(self, path: str, **request: Any) -> httpx.Response:
        return httpx.post(f"{self.server.base_url}/{path}", timeout=PATIENCE, **request)

    def hold(self, name: str) -> httpx.Response:
        return self.post("classify_held", json=["held"], headers={"x-name": name})


def serve(folder: Path, config: Callable[..., str], *arguments: str, **api_server: Any) -> Iterator[Legacy]:
    merged = json.loads(config(classify={}, score={}, blend={})) | {"api_server": {"workers": 1, **api_server}}
    merged["runners"] = {"resources": {"cpu": 1}}
    held = folder / "held"
    held.mkdir()
    env = {"BENTOML_CONFIG_OVERRIDES": json.dumps(merged), "HELD": str(held)}
    env["OMP_NUM_THREADS"] = "1"  # as BentoML gives a runner of one CPU: an artifact fits one number of threads
    server = Server(CHECKOUT, folder / "home", target=TARGET, env=env, arguments=arguments)
    with server.start(wait=False):
        server.wait_ready(300)
        yield Legacy(server, held)


@pytest.fixture(scope="module")
def production(config: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Legacy]:
    """Each runner in a process of its own."""
    yield from serve(tmp_path_factory.mktemp("production"), config, traffic={"timeout": TIMEOUT})


@pytest.fixture(scope="module")
def late(production: Legacy) -> Iterator[Future[httpx.Response]]:
    """A request that is held for longer than the timeout, while others are answered."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(production.hold, "late")


@pytest.fixture(scope="module")
def development(config: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Legacy]:
    """Everything in one process."""
    traffic, http = {"max_concurrency": 2}, {"cors": CORS}
    yield from serve(tmp_path_factory.mktemp("dev"), config, "--development", traffic=traffic, http=http)


def image_part(path: Path) -> tuple[str, bytes, str]:
    return (path.name, path.read_bytes(), "image/png")


# what goes in and comes out


@pytest.fixture(params=["production", "development"])
def either(request: pytest.FixtureRequest) -> Legacy:
    return request.getfixturevalue(request.param)


def test_the_model_is_compiled_ahead_of_time(either: Legacy) -> None:
    report = either.post("report", json={}).json()
    assert (report["model"], report["engine"]) == ("classify", "aot")
    assert report["outcome"] in ("compiled", "loaded")
    assert {shape["engine"] for shape in report["shapes"]} == {"aot"}


@pytest.mark.parametrize("route", ["classify_json", "classify_json_sync"])
def test_json_goes_in_and_out(either: Legacy, late: Future[httpx.Response], route: str) -> None:
    answer = either.post(route, json=["one", "two", "three"])
    assert answer.status_code == 200, answer.text + either.server.log
    assert answer.json() == near(eager_logits("one", "two", "three"))


def test_json_is_validated_by_pydantic(production: Legacy) -> None:
    answer = production.post("classify_text", json={"title": "A title", "lines": ["first", "second"]})
    assert answer.json() == {"title": "A title", "logits": near(eager_logits("first", "second"))}
    for wrong in ({"title": "no lines"}, {"title": "too few", "lines": []}):
        assert production.post("classify_text", json=wrong).status_code == 400


def test_an_array_s_shape_is_enforced(production: Legacy) -> None:
    assert production.post("score_shape", json=ROWS.tolist()).json() == near(eager_rows(ROWS))
    assert production.post("score_shape", json=ROWS.reshape(-1).tolist()).status_code == 400


def test_an_array_s_dtype_is_enforced(production: Legacy) -> None:
    best = [str(row.index(max(row))) for row in eager_rows(ROWS)]
    assert production.post("score_dtype", json=ROWS.tolist()).json() == best
    assert production.post("score_dtype", json=[["2f", 1, 2, 3]]).status_code == 400


def test_a_runner_gives_several_arrays(production: Legacy) -> None:
    answer = production.post("score_both", json=ROWS.tolist()).json()
    both = [one + other for one, other in zip(eager_rows(ROWS), eager_rows(-ROWS), strict=True)]
    assert answer == near(both)


def test_files_go_in_and_out(production: Legacy) -> None:
    content, expected = b"a line\nanother", near(eager_logits("a line", "another"))
    for request in (
        {"content": content, "headers": {"content-type": "application/octet-stream"}},
        {"content": content, "headers": {"content-type": "application/pdf"}},
        {"files": {"file": ("texts.txt", content, "application/octet-stream")}},
    ):
        answer = production.post("classify_file", **request)
        assert answer.headers["content-type"] == "application/json"
        assert answer.json() == expected


def test_images_go_in_and_out(production: Legacy, images: list[Path]) -> None:
    body, pixels = images[0].read_bytes(), pixels_of(images[0])
    answer = production.post("mirror", content=body, headers={"content-type": "image/png"})
    assert answer.headers["content-type"] == "image/png"
    mirrored = pixels_of(PIL.Image.open(io.BytesIO(answer.content)))
    assert near_image(mirrored, eager_image(pixels, pixels[:, ::-1].copy()))
    for kind in ("application/json", "application/pdf"):
        assert production.post("mirror", content=body, headers={"content-type": kind}).status_code == 400


@pytest.mark.parametrize("route", ["blend_images", "blend_in_other_order"])
def test_two_images_are_told_apart_by_name(production: Legacy, images: list[Path], route: str) -> None:
    parts = [("compared", image_part(images[1])), ("original", image_part(images[0]))]
    original, compared = map(pixels_of, images)
    expected = {"one": eager_image(original, compared), "other": eager_image(compared, original)}
    assert not near_image(expected["one"], expected["other"])
    for files in (parts, parts[::-1]):
        found = images_of(production.post(route, files=files))
        assert found.keys() == expected.keys()
        for name, pixels in found.items():
            assert near_image(pixels, expected[name]), name


def images_of(answer: httpx.Response) -> dict[str, np.ndarray]:
    """The parts of a multipart answer by name."""
    assert answer.status_code == 200, answer.text
    message = BytesParser().parsebytes(
        b"content-type: " + answer.headers["content-type"].encode() + b"\n\n" + answer.content
    )
    parts: Any = message.get_payload()
    return {
        part.get_param("name", header="content-disposition"): pixels_of(
            PIL.Image.open(io.BytesIO(part.get_payload(decode=True)))
        )
        for part in parts
    }


# what is around the methods


def test_the_context_has_the_request_s_and_the_response_s_headers(production: Legacy) -> None:
    answer = production.post("classify_header", json={}, headers={"x-text": "header"})
    assert (answer.status_code, answer.headers["x-letters"]) == (203, "6")
    assert answer.json() == near(eager_logits("header"))


def test_a_mounted_app_asks_the_runners(either: Legacy) -> None:
    answer = httpx.get(f"{either.server.base_url}/page/classify", params={"text": "mounted"}, timeout=PATIENCE)
    assert answer.raise_for_status().json() == near(eager_logits("mounted"))


def test_bentoml_s_own_pages_answer_and_middleware_is_around_them(production: Legacy) -> None:
    for path in ("/", "/livez", "/healthz", "/readyz", "/ping", "/docs.json", "/metrics"):
        assert httpx.get(f"{production.server.base_url}{path}", timeout=PATIENCE).status_code == 200, path
    assert production.post("/api/v1/with_prefix", json={}).status_code == 404


def test_metrics_have_the_compiled_calls(production: Legacy) -> None:
    production.post("classify_json", json=["counted"]).raise_for_status()
    samples = production.server.metrics()
    calls = "torch_compile_inference_seconds_count"
    assert value(samples, calls, model="classify", engine="aot") > 0
    assert value(samples, calls, engine="eager") == 0
    assert value(samples, "torch_compile_startup_seconds", model="classify", engine="aot") > 0


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "Content-Type"}


@pytest.mark.parametrize(
    ("mode", "origin", "status", "allowed"),
    [
        ("production", ORIGIN, 405, None),
        ("development", ORIGIN, 200, ORIGIN),
        ("development", "http://other.example", 400, None),
    ],
    ids=["off", "on", "other"],
)
def test_cors_lets_in_who_is_allowed(
    request: pytest.FixtureRequest, mode: str, origin: str, status: int, allowed: str | None
) -> None:
    legacy: Legacy = request.getfixturevalue(mode)
    url = f"{legacy.server.base_url}/classify_json"
    before = httpx.options(url, headers={"Origin": origin, **PREFLIGHT}, timeout=PATIENCE)
    assert (before.status_code, before.headers.get("access-control-allow-origin")) == (status, allowed)
    answer = legacy.post("classify_json", json=["cors"], headers={"Origin": origin})
    assert answer.json() == near(eager_logits("cors"))
    assert answer.headers.get("access-control-allow-origin") == allowed
    if allowed:
        assert answer.headers["access-control-expose-headers"] == "Content-Length"


def test_one_request_more_than_max_concurrency_is_answered_with_429(development: Legacy) -> None:
    names = ["first", "second"]
    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(development.hold, name) for name in names]
        try:
            wait_for(lambda: all((development.held / name).exists() for name in names))
            refused = development.hold("third")
        finally:
            (development.held / "go-on").touch()
        answers = [one.result() for one in held]
    assert (refused.status_code, refused.json()) == (429, {"error": "Too many requests"})
    assert [answer.json() for answer in answers] == [near(eager_logits("held"))] * 2


# BentoML's own server and client


def test_the_client_asks_the_server_by_its_methods_names(production: Legacy) -> None:
    url = production.server.base_url

    async def ask() -> Any:
        async with await bentoml.client.AsyncHTTPClient.from_url(url) as client:
            assert (await client.health()).status_code == 200
            return await client.classify_json(["async"])

    with bentoml.client.HTTPClient.from_url(url) as client:
        assert client.health().status_code == 200
        assert client.classify_json_sync(["sync"]) == near(eager_logits("sync"))
        assert client.score_shape(ROWS).tolist() == near(eager_rows(ROWS))
    assert asyncio.run(ask()) == near(eager_logits("async"))


def test_a_server_that_python_starts_answers_and_ends(
    config: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = json.loads(config(classify={}, score={}, blend={})) | {"runners": {"resources": {"cpu": 1}}}
    for key, text in {"BENTOML_HOME": str(tmp_path), "BENTOML_CONFIG_OVERRIDES": json.dumps(merged)}.items():
        monkeypatch.setenv(key, text)
    with reserved_port() as port, (tmp_path / "log").open("wb") as log:
        server: Any = bentoml.legacy.HTTPServer(
            TARGET, host="127.0.0.1", port=port, working_dir=str(CHECKOUT), api_workers=1, timeout=300
        )
        try:
            with server.start(stdout=log, stderr=log, text=False) as client:
                assert client.health().status_code == 200
                assert client.classify_json_sync(["started"]) == near(eager_logits("started"))
        finally:
            _, left = psutil.wait_procs(Server(CHECKOUT, tmp_path).processes(), timeout=PATIENCE)
            for process in left:
                process.kill()
    assert left == []


def test_a_request_that_takes_too_long_is_answered_with_504(late: Future[httpx.Response]) -> None:
    answer = late.result(PATIENCE)
    assert answer.status_code == 504
    assert answer.json() == {"error": f"Not able to process the request in {TIMEOUT} seconds"}
