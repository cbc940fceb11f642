"""An API service and the two model services that it depends on, each in processes of its own.

    bentoml serve tests.serving.depends_service:Front

Every method of Front passes its call on to Model in another way.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import bentoml
import torch
from starlette.concurrency import run_in_threadpool

from bentoml_compile import compile_model
from bentoml_compile.compiled_model import open_models
from tests.models import classifier, ids

Rows = list[list[int]]
COMPILED = {"keep_eager_if_slower": False, "dynamic": {"ids": {"0": [1, 8]}}}


def gated(graph: torch.fx.GraphModule, inputs: object) -> Any:
    """A compiler that waits for a file."""
    while not Path(os.environ["GATE"]).exists():
        time.sleep(0.01)
    return graph.forward


if "GATE" in os.environ:
    torch._dynamo.register_backend(gated, name="gated")


def process() -> dict[str, Any]:
    """What a worker is, sees and has compiled."""
    return {
        "pid": os.getpid(),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "worker": bentoml.server_context.worker_index,
        "models": {name: model.report.to_dict() for name, model in open_models.items()},
    }


@bentoml.service(torch_compile={**COMPILED, "mode": "max-autotune"}, resources={"gpu": 2}, workers=2)
class Ranker:
    """Compiled with what the deployment says in place of `mode`; asked for its process only."""

    def __init__(self) -> None:
        self.model = compile_model(classifier(), example_inputs=[{"ids": ids(2, 5)}], name="ranker")

    @bentoml.api
    def process(self) -> dict[str, Any]:
        return process()


@bentoml.service(torch_compile=COMPILED, resources={"gpu": 1})
class Model:
    """One thread: whatever holds it, holds up all other calls."""

    def __init__(self) -> None:
        self.model = compile_model(classifier(), example_inputs=[{"ids": ids(2, 5)}], name="tiny")
        self.closed: list[str] = []

    @bentoml.api
    def process(self) -> dict[str, Any]:
        return process()

    @bentoml.api
    def classify(self, rows: Rows) -> list[list[float]]:
        return self._logits(rows)

    @bentoml.api(batchable=True, max_batch_size=4, max_latency_ms=30_000)
    def classify_batch(self, rows: Rows) -> list[list[float]]:
        time.sleep(0.01)  # as a larger model would: so that requests queue up behind a batch
        if rows and rows[0][0] < 0:
            self._logits([[0] * 5])
            raise RuntimeError("this batch fails")
        return self._logits(rows) if rows else []

    @bentoml.api
    def stream(self, rows: Rows, steps: int) -> Iterator[str]:
        try:
            for _ in range(steps):
                yield json.dumps(self._logits(rows)) + "\n"
        finally:
            self.closed.append("stream")

    @bentoml.api
    async def stream_async(self, rows: Rows, steps: int) -> AsyncIterator[str]:
        try:
            for _ in range(steps):
                yield json.dumps(self._logits(rows)) + "\n"
                await asyncio.sleep(0)
        finally:
            self.closed.append("stream_async")

    @bentoml.api
    def streams_closed(self) -> list[str]:
        return self.closed

    @bentoml.task
    def classify_later(self, rows: Rows) -> list[list[float]]:
        return self._logits(rows)

    def _logits(self, rows: Rows) -> list[list[float]]:
        logits: torch.Tensor = self.model(ids=torch.tensor(rows))["logits"]
        return logits.tolist()


@bentoml.service(workers=2, threads=8)
class Front:
    model = bentoml.depends(Model)
    ranker = bentoml.depends(Ranker)

    @bentoml.api
    def processes(self) -> dict[str, Any]:
        return {"front": process(), "model": self.model.process(), "ranker": self.ranker.process()}

    @bentoml.api
    def classify(self, rows: Rows) -> list[list[float]]:
        return self.model.classify(rows=rows)

    @bentoml.api
    async def classify_async(self, rows: Rows) -> list[list[float]]:
        return await self.model.to_async.classify(rows=rows)

    @bentoml.api
    async def classify_in_thread(self, rows: Rows) -> list[list[float]]:
        # AnyIO's threads only: BentoML's client finds no event loop in one of asyncio.to_thread or of a pool
        return await run_in_threadpool(self.model.classify, rows=rows)

    @bentoml.api
    async def classify_batch(self, rows: Rows) -> dict[str, Any]:
        """Also says which of the API's processes asked."""
        return {"logits": await self.model.to_async.classify_batch(rows), "pid": os.getpid()}

    @bentoml.api
    def stream(self, rows: Rows, steps: int) -> Iterator[str]:
        yield from self.model.stream(rows=rows, steps=steps)

    @bentoml.api
    async def stream_async(self, rows: Rows, steps: int) -> AsyncIterator[str]:
        async for chunk in self.model.to_async.stream_async(rows=rows, steps=steps):
            yield chunk

    @bentoml.api
    def streams_closed(self) -> list[str]:
        return self.model.streams_closed()

    @bentoml.task
    def classify_later(self, rows: Rows) -> list[list[float]]:
        return self.model.classify(rows=rows)
