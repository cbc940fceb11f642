"""A service of BentoML's new SDK behind `bentoml serve`, with every model compiled: its answers are eager's.

It refuses an input that would not run compiled code. Hence compiled code gave every answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bentoml
import httpx
import numpy as np
import pytest
import torch
from bentoml.exceptions import BentoMLException

from tests.conftest import CHECKOUT
from tests.e2e.cors import ORIGIN
from tests.e2e.eager import eager_image, eager_logits, eager_rows, near, near_image, pixels_of
from tests.e2e.sdk_service import ENGINES
from tests.servers import Server, value
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(config: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    env = {"BENTOML_CONFIG_OVERRIDES": config(Served={})}
    server = Server(CHECKOUT, tmp_path_factory.mktemp("home"), target="tests.e2e.sdk_service:Served", env=env)
    with server.start(wait=False):
        server.wait_ready(300)
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with bentoml.SyncHTTPClient(server.base_url, timeout=PATIENCE) as client:
        yield client


# served: what goes in and comes out


def test_every_model_is_compiled_and_what_is_not_prepared_is_refused(client: Any) -> None:
    reports = client.reports()
    assert {name: report["engine"] for name, report in reports.items()} == ENGINES
    for name, report in reports.items():
        assert report["outcome"] in ("compiled", "loaded")
        assert {shape["engine"] for shape in report["shapes"]} == {ENGINES[name]}
    with pytest.raises(BentoMLException) as refused:
        client.root_texts(["one more than the range has"] * 17)
    assert refused.value.error_code == 422


def test_both_clients_call_a_method_with_text(server: Server, client: Any) -> None:
    assert client.classify(text="by name") == near(eager_logits("by name")[0])
    assert client.classify("by position") == near(eager_logits("by position")[0])

    async def ask(*texts: str) -> list[Any]:
        async with bentoml.AsyncHTTPClient(server.base_url, timeout=PATIENCE) as asynchronous:
            return await asyncio.gather(*map(asynchronous.classify, texts))

    texts = ["one", "two", "three", "four"]
    assert asyncio.run(ask(*texts)) == near(eager_logits(*texts))


def test_pydantic_models_go_in_and_out_and_are_validated(client: Any) -> None:
    verdict = client.judge(document={"title": "A title", "paragraphs": ["first", "second"]})
    expected = eager_logits("first", "second")
    best = [row.index(max(row)) for row in expected]
    assert verdict == {"title": "A title", "logits": near(expected), "best": best}
    for wrong in ({"title": "no paragraphs"}, {"title": "too few", "paragraphs": []}):
        with pytest.raises(BentoMLException) as invalid:
            client.judge(document=wrong)
        assert invalid.value.error_code == 400


def test_arrays_and_tensors_go_in_and_out(client: Any) -> None:
    rows = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)
    array, tensor = client.score(rows=rows), client.score_tensor(rows=torch.from_numpy(rows))
    assert (array.dtype, tensor.dtype) == (np.float32, torch.float32)
    assert array.tolist() == near(eager_rows(rows))
    assert tensor.tolist() == near(eager_rows(rows))


def test_images_go_in_and_out(client: Any, images: list[Path]) -> None:
    original, compared = map(pixels_of, images)
    blended = client.blend(compared=images[1], original=images[0])
    assert blended.format == "PNG"
    assert near_image(pixels_of(blended), eager_image(original, compared))
    assert not near_image(eager_image(compared, original), eager_image(original, compared))
    mirrored = client.mirror(image=images[0])
    assert near_image(pixels_of(mirrored), eager_image(original, original[:, ::-1].copy()))


def test_files_go_in_and_out(client: Any, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("a line\nanother\nand a third")
    answer = client.classify_file(file=file)
    assert json.loads(answer.read_text()) == near(eager_logits(*file.read_text().splitlines()))


def test_requests_that_share_batches_have_their_own_answers(server: Server) -> None:
    asked = [[f"{number} first", f"{number} second"][: 1 + number % 2] for number in range(24)]

    def ask(texts: list[str]) -> Any:
        answer = httpx.post(f"{server.base_url}/classify_batch", json={"texts": texts}, timeout=PATIENCE)
        return answer.raise_for_status().json()

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, asked))
    assert answers == [near(eager_logits(*texts)) for texts in asked]


# served: tasks


async def finished(task: Any) -> str:
    ends = time.monotonic() + PATIENCE
    while (status := (await task.get_status()).value) == "in_progress":
        assert time.monotonic() < ends, "the task did not end"
        await asyncio.sleep(0.02)
    return str(status)


async def submit(server: Server, name: str, **inputs: Any) -> list[Any]:
    """What the task and its retry give."""
    async with bentoml.AsyncHTTPClient(server.base_url, timeout=PATIENCE) as client:
        task = await getattr(client, name).submit(**inputs)
        assert await finished(task) == "completed"
        again = await task.retry()
        assert again.id != task.id
        assert await finished(again) == "completed"
        return [await task.get(), await again.get()]


def test_a_task_is_submitted_awaited_and_retried(server: Server) -> None:
    assert asyncio.run(submit(server, "classify_later", text="later")) == [near(eager_logits("later")[0])] * 2


def test_a_task_takes_a_file(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("one\ntwo")
    answers = asyncio.run(submit(server, "classify_file_later", file=file))
    assert answers == [near(eager_logits("one", "two"))] * 2


def test_the_synchronous_client_follows_a_task(server: Server, client: Any) -> None:
    # BentoML 1.4.40's own `submit` of this client ends in an AttributeError once the task is submitted
    submitted = httpx.post(f"{server.base_url}/classify_later/submit", json={"text": "later"}, timeout=PATIENCE)
    task_id, later = submitted.json()["task_id"], client.classify_later
    wait_for(lambda: later.get_status(task_id).value == "completed")
    again = later.retry(task_id)
    wait_for(lambda: again.get_status().value == "completed")
    assert [later.get(task_id), again.get()] == [near(eager_logits("later")[0])] * 2


# served: what is around the methods


def test_the_startup_hook_can_use_the_model(client: Any) -> None:
    assert client.what_startup_saw() == near(eager_logits("startup")[0])


def test_the_context_has_the_request_s_and_the_response_s_headers(server: Server) -> None:
    answer = httpx.post(f"{server.base_url}/classify_header", headers={"x-text": "header"}, timeout=PATIENCE)
    assert (answer.status_code, answer.headers["x-letters"]) == (203, "6")
    assert answer.json() == near(eager_logits("header")[0])


@pytest.mark.parametrize("path", ["/page/classify?text=mounted", "/wsgi/?mounted"])
def test_mounted_apps_use_the_service_s_models(server: Server, path: str) -> None:
    answer = httpx.get(f"{server.base_url}{path}", timeout=PATIENCE)
    assert answer.raise_for_status().json() == near(eager_logits("mounted")[0])


def test_middleware_is_around_methods_and_mounted_apps(server: Server) -> None:
    method = httpx.post(f"{server.base_url}/classify", json={"text": "stamped"}, timeout=PATIENCE)
    page = httpx.get(f"{server.base_url}/page/classify", params={"text": "stamped"}, timeout=PATIENCE)
    assert [answer.headers["x-stamp"] for answer in (method, page)] == ["compiled"] * 2


def test_cors_lets_one_origin_in(server: Server) -> None:
    url, allow = f"{server.base_url}/classify", "access-control-allow-origin"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "Content-Type"}
    for origin, status, allowed in ((ORIGIN, 200, ORIGIN), ("http://other.example", 400, None)):
        before = httpx.options(url, headers={"Origin": origin, **asked}, timeout=PATIENCE)
        assert (before.status_code, before.headers.get(allow)) == (status, allowed)
        answer = httpx.post(url, json={"text": "cors"}, headers={"Origin": origin}, timeout=PATIENCE)
        assert answer.json() == near(eager_logits("cors")[0])
        assert answer.headers.get(allow) == allowed


def test_metrics_count_each_request_and_its_compiled_call(server: Server, client: Any) -> None:
    def counted() -> tuple[float, float, float]:
        samples = server.metrics()
        calls = "torch_compile_inference_seconds_count"
        compiled, eager = (value(samples, calls, model="classifier", engine=engine) for engine in ("aot", "eager"))
        requests = value(samples, "bentoml_service_request_total", endpoint="/classify", http_response_code="200")
        return compiled, eager, requests

    client.classify("one more, so that the counters are there")
    compiled, eager, requests = counted()
    for _ in range(3):
        client.classify("counted")
    wait_for(lambda: counted() == (compiled + 3, eager, requests + 3))
