"""A service of the new SDK for each kind of input and output, and one with everything around it."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Annotated, Any

import bentoml
import numpy as np
import PIL.Image
import pydantic
import torch
from bentoml.validators import DType
from PIL.Image import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bentoml_compile import compile_model
from tests.e2e.cors import CORS
from tests.e2e.networks import AHEAD, CAPTURED, COLUMNS, blank, blend, letters, table
from tests.models import classifier

MODELS = {
    "classifier": {"dynamic": {"ids": {"0": [1, 16]}}},
    "blend": CAPTURED,
    "table": {**CAPTURED, "dynamic": {"input": {"0": [1, 64]}}},
}
COMPILED = {**AHEAD, "models": MODELS}
ENGINES = {"classifier": "aot", "table": "jit", "blend": "jit"}  # as the reports have them

Logits = list[float]
Rows = Annotated[np.ndarray, DType("float32")]
Tensor = Annotated[torch.Tensor, DType("float32")]


class Document(pydantic.BaseModel):
    title: str
    paragraphs: list[str] = pydantic.Field(min_length=1)


class Verdict(pydantic.BaseModel):
    title: str
    logits: list[Logits]
    best: list[int]


class Compiled:
    """The models, and a method for each kind of input and output."""

    def __init__(self) -> None:
        examples = [{"ids": letters(["a text", "a second"])}]
        self.classifier = compile_model(classifier(), example_inputs=examples, name="classifier")
        self.table = compile_model(table(), example_inputs=[(torch.zeros(2, COLUMNS),)], name="table")
        self.blender = compile_model(blend(), example_inputs=[(blank(), blank())], name="blend")

    def logits(self, texts: list[str]) -> list[Logits]:
        found: torch.Tensor = self.classifier(ids=letters(texts))["logits"]
        return found.tolist()

    @bentoml.api
    def classify(self, text: str) -> Logits:
        return self.logits([text])[0]

    @bentoml.api
    def judge(self, document: Document) -> Verdict:
        found = self.logits(document.paragraphs)
        return Verdict(title=document.title, logits=found, best=[row.index(max(row)) for row in found])

    @bentoml.api
    def score(self, rows: Rows) -> Rows:
        return self.table(torch.from_numpy(rows)).numpy()

    @bentoml.api
    def score_tensor(self, rows: Tensor) -> Tensor:
        return self.table(rows)

    @bentoml.api
    def mirror(self, image: Image) -> Image:
        """Blended with its own mirror image."""
        return self._blend(image, image.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT))

    @bentoml.api
    def blend(self, original: Image, compared: Image) -> Image:
        return self._blend(original, compared)

    @bentoml.api
    def classify_file(self, file: Path, ctx: bentoml.Context) -> Path:
        """The logits of each line, in a file again."""
        answer = Path(ctx.temp_dir) / "logits.json"
        answer.write_text(json.dumps(self.logits(file.read_text().splitlines())))
        return answer

    @bentoml.api
    def root_text(self, text: str, /) -> Logits:
        return self.logits([text])[0]

    @bentoml.api
    def root_texts(self, texts: list[str], /) -> list[Logits]:
        return self.logits(texts)

    @bentoml.api
    def root_document(self, document: Document, /) -> list[Logits]:
        return self.logits(document.paragraphs)

    @bentoml.api
    def root_file(self, file: Path, /) -> list[Logits]:
        return self.logits(file.read_text().splitlines())

    @bentoml.api
    def reports(self) -> dict[str, Any]:
        return {model.report.model: model.report.to_dict() for model in (self.classifier, self.table, self.blender)}

    def _blend(self, *images: Image) -> Image:
        pixels = [torch.from_numpy(np.array(image.convert("RGB"))) for image in images]
        return PIL.Image.fromarray(self.blender(*pixels).numpy())


@bentoml.service(torch_compile=COMPILED, metrics={"enabled": False})
class Features(Compiled):
    """Nothing around it: for BentoML's app in a process of one's own."""


@bentoml.service(metrics={"enabled": False})
class Front:
    """Composed: its model is another service's."""

    features = bentoml.depends(Features)

    @bentoml.api
    def classify(self, text: str) -> dict[str, Logits]:
        return {"logits": self.features.classify(text)}

    @bentoml.api
    async def classify_async(self, text: str) -> dict[str, Logits]:
        return {"logits": await self.features.to_async.classify(text)}


@bentoml.service(torch_compile=COMPILED, http={"cors": CORS}, threads=4)
class Served(Compiled):
    """With batches, tasks, hooks and the request's context, and apps mounted beside it."""

    at_startup: Logits | None = None

    @bentoml.on_startup
    def use_the_model(self) -> None:
        self.at_startup = self.logits(["startup"])[0]

    @bentoml.on_shutdown
    async def use_the_model_again(self) -> None:
        if "WRITE_AT_SHUTDOWN" in os.environ:
            Path(os.environ["WRITE_AT_SHUTDOWN"]).write_text(json.dumps(self.logits(["shutdown"])[0]))

    @bentoml.api
    def what_startup_saw(self) -> Logits | None:
        return self.at_startup

    @bentoml.api(batchable=True, max_batch_size=16)
    def classify_batch(self, texts: list[str]) -> list[Logits]:
        return self.logits(texts) if texts else []

    @bentoml.task
    def classify_later(self, text: str) -> Logits:
        return self.logits([text])[0]

    @bentoml.task
    def classify_file_later(self, file: Path) -> list[Logits]:
        return self.logits(file.read_text().splitlines())

    @bentoml.api
    def classify_header(self, ctx: bentoml.Context) -> Logits:
        """The text is in a header; the answer's status and one of its headers are set, too."""
        ctx.response.status_code = 203
        ctx.response.headers["x-letters"] = str(len(ctx.request.headers["x-text"]))
        return self.logits([ctx.request.headers["x-text"]])[0]


class Stamped:
    """ASGI middleware that says in a header who answered."""

    def __init__(self, app: ASGIApp, stamp: str) -> None:
        self.app, self.stamp = app, stamp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", self.stamp.encode())]
            await send(message)

        await self.app(scope, receive, stamped)


def classify_in_page(request: Request) -> Response:
    return JSONResponse(bentoml.get_current_service().logits([request.query_params["text"]])[0])


def classify_in_wsgi(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(bentoml.get_current_service().logits([environ["QUERY_STRING"]])[0]).encode()]


served: Any = Served  # mypy sees the class, without the service's methods
served.add_asgi_middleware(Stamped, stamp="compiled")
served.mount_asgi_app(Starlette(routes=[Route("/classify", classify_in_page)]), path="/page")
served.mount_wsgi_app(classify_in_wsgi, path="/wsgi")


entered = threading.Semaphore(0)
go_on = threading.Event()


@bentoml.service(torch_compile=CAPTURED, metrics={"enabled": False})
class Held:
    """Answers when `go_on` is set in its process, and says by `entered` that it was asked."""

    def __init__(self) -> None:
        self.model = compile_model(table(), example_inputs=[(torch.zeros(1, COLUMNS),)], name="held")

    @bentoml.api
    async def score(self, rows: Rows) -> Rows:
        entered.release()
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        return self.model(torch.from_numpy(rows)).numpy()
