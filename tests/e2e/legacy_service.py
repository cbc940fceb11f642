"""A service as BentoML 1.0 and 1.1 had them, with its models in runners, for each of BentoML's descriptors."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import bentoml
import numpy as np
import PIL.Image
import pydantic
import torch
from bentoml.io import JSON, File, Image, Multipart, NumpyNdarray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from bentoml_compile import CompiledRunnable
from tests.e2e.networks import AHEAD, CAPTURED, COLUMNS, blank, blend, letters, table
from tests.models import classifier


class Classify(CompiledRunnable):
    torch_compile: ClassVar = {**AHEAD, "dynamic": {"ids": {"0": [1, 16]}}}

    def load_model(self) -> torch.nn.Module:
        return classifier()

    def example_inputs(self) -> list[dict[str, torch.Tensor]]:
        return [{"ids": letters(["a text", "a second"])}]

    @bentoml.legacy.Runnable.method(batchable=True, batch_dim=0)
    def classify(self, ids: Any) -> torch.Tensor:
        return self.model(ids=torch.as_tensor(ids))["logits"]

    @bentoml.legacy.Runnable.method
    def report(self) -> dict[str, Any]:
        return self.model.report.to_dict()


class Score(CompiledRunnable):
    torch_compile: ClassVar = {**CAPTURED, "dynamic": {"input": {"0": [1, 64]}}}

    def load_model(self) -> torch.nn.Module:
        return table()

    def example_inputs(self) -> list[tuple[torch.Tensor]]:
        return [(torch.zeros(2, COLUMNS),)]

    @bentoml.legacy.Runnable.method(batchable=True, batch_dim=0)
    def score(self, rows: np.ndarray) -> np.ndarray:
        return self.model(torch.as_tensor(rows, dtype=torch.float32)).numpy()

    @bentoml.legacy.Runnable.method
    def score_both(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the rows, and of their opposites."""
        return self.score(rows), self.score(-rows)


class Blend(CompiledRunnable):
    torch_compile: ClassVar = CAPTURED

    def load_model(self) -> torch.nn.Module:
        return blend()

    def example_inputs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(blank(), blank())]

    @bentoml.legacy.Runnable.method
    def blend(self, original: np.ndarray, compared: np.ndarray) -> np.ndarray:
        return self.model(torch.tensor(original), torch.tensor(compared)).numpy()


classify: Any = bentoml.legacy.Runner(Classify, name="classify", max_batch_size=16)
score: Any = bentoml.legacy.Runner(Score, name="score", max_batch_size=64)
blending: Any = bentoml.legacy.Runner(Blend, name="blend")

svc: Any = bentoml.legacy.Service("everything-legacy", runners=[classify, score, blending])


class Text(pydantic.BaseModel):
    title: str
    lines: list[str] = pydantic.Field(min_length=1)


@svc.api(input=JSON(), output=JSON())
async def classify_json(texts: list[str]) -> list[list[float]]:
    return (await classify.classify.async_run(letters(texts))).tolist()


@svc.api(input=JSON(), output=JSON())
def classify_json_sync(texts: list[str]) -> list[list[float]]:
    return classify.classify.run(letters(texts)).tolist()


@svc.api(input=JSON(pydantic_model=Text), output=JSON())
async def classify_text(text: Text) -> dict[str, Any]:
    logits = await classify.classify.async_run(letters(text.lines))
    return {"title": text.title, "logits": logits.tolist()}


@svc.api(input=JSON(), output=JSON())
def report(_: Any) -> dict[str, Any]:
    return classify.report.run()


@svc.api(input=NumpyNdarray(shape=(2, COLUMNS), enforce_shape=True), output=NumpyNdarray(shape=(2, 3)))
async def score_shape(rows: np.ndarray) -> np.ndarray:
    return await score.score.async_run(rows)


@svc.api(input=NumpyNdarray(dtype="float32", enforce_dtype=True), output=NumpyNdarray(dtype="str"))
async def score_dtype(rows: np.ndarray) -> np.ndarray:
    """The column of each row's largest number, as text."""
    return (await score.score.async_run(rows)).argmax(axis=1).astype(str)


@svc.api(input=NumpyNdarray(), output=NumpyNdarray())
async def score_both(rows: np.ndarray) -> np.ndarray:
    one, other = await score.score_both.async_run(rows)
    return np.concatenate([one, other], axis=1)


@svc.api(input=File(), output=File(mime_type="application/json"))
async def classify_file(file: Any) -> bytes:
    logits = await classify.classify.async_run(letters(file.read().decode().splitlines()))
    return json.dumps(logits.tolist()).encode()


@svc.api(input=Image(), output=Image(mime_type="image/png"))
async def mirror(image: PIL.Image.Image) -> PIL.Image.Image:
    """Blended with its own mirror image."""
    pixels = np.array(image.convert("RGB"))
    return PIL.Image.fromarray(await blending.blend.async_run(pixels, pixels[:, ::-1].copy()))


async def blended(original: PIL.Image.Image, compared: PIL.Image.Image) -> dict[str, PIL.Image.Image]:
    first, second = np.array(original), np.array(compared)
    found = await asyncio.gather(blending.blend.async_run(first, second), blending.blend.async_run(second, first))
    return dict(zip(("one", "other"), map(PIL.Image.fromarray, found), strict=True))


TWO = Multipart(original=Image(), compared=Image())
PAIR = Multipart(one=Image(mime_type="image/png"), other=Image(mime_type="image/png"))


@svc.api(input=TWO, output=PAIR)
async def blend_images(original: PIL.Image.Image, compared: PIL.Image.Image) -> dict[str, PIL.Image.Image]:
    """Blended in either order."""
    return await blended(original, compared)


@svc.api(input=TWO, output=PAIR)
async def blend_in_other_order(compared: PIL.Image.Image, original: PIL.Image.Image) -> dict[str, PIL.Image.Image]:
    return await blended(original, compared)


@svc.api(input=JSON(), output=JSON())
async def classify_held(texts: list[str], ctx: bentoml.Context) -> list[list[float]]:
    """Says in a file that it was asked, and answers when another is there."""
    folder = Path(os.environ["HELD"])
    (folder / ctx.request.headers["x-name"]).touch()
    while not (folder / "go-on").exists():
        await asyncio.sleep(0.01)
    return (await classify.classify.async_run(letters(texts))).tolist()


@svc.api(input=JSON(), output=JSON())
async def classify_header(_: Any, ctx: bentoml.Context) -> Any:
    """The text is in a header; the answer's status and one of its headers are set, too."""
    ctx.response.status_code = 203
    ctx.response.headers["x-letters"] = str(len(ctx.request.headers["x-text"]))
    return (await classify.classify.async_run(letters([ctx.request.headers["x-text"]]))).tolist()


class Renamed:
    """ASGI middleware: another path for one of BentoML's own."""

    def __init__(self, app: ASGIApp, path: str, of: str) -> None:
        self.app, self.path, self.of = app, path, of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == self.path:
            scope = {**scope, "path": self.of}
        await self.app(scope, receive, send)


async def classify_in_page(request: Request) -> Response:
    logits = await classify.classify.async_run(letters([request.query_params["text"]]))
    return JSONResponse(logits.tolist())


svc.add_asgi_middleware(Renamed, path="/ping", of="/livez")
svc.mount_asgi_app(Starlette(routes=[Route("/classify", classify_in_page)]), path="/page")
