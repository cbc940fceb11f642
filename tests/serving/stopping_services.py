"""A service of each kind for tests of its end; with $HOLD, a directory, a request waits for a file in it.

bentoml serve tests.serving.stopping_services:Plain     its own model
bentoml serve tests.serving.stopping_services:Front     a runner's model, in a worker of another service
bentoml serve tests.serving.stopping_services:legacy    the runner of a legacy service
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import bentoml
import torch

from bentoml_compile import CompiledRunnable, compile_model, runner_service
from bentoml_compile.bento import boot
from tests.models import classifier, ids

Rows = list[list[int]]
boot.INTERRUPT_SECONDS = 30.0  # as long as a compile takes to end on a busy machine
LONG = {"timeout": 600}  # seconds that a request may be kept
CONFIG = {"keep_eager_if_slower": False, **json.loads(os.environ.get("TORCH_COMPILE", "{}"))}


def wait_forever(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """A compiler that hangs, with a child process as a real one has."""
    import subprocess

    subprocess.run(["sleep", "3600"], check=True)


if CONFIG.get("backend") == wait_forever.__name__:  # else nobody here needs Dynamo so early
    torch._dynamo.register_backend(wait_forever, name="wait_forever")


def hold() -> None:
    """Says that a request has come, and keeps it until it may go on."""
    hold = Path(os.environ["HOLD"])
    (hold / "came").touch()
    while not (hold / "go").exists():
        time.sleep(0.02)


def logits(model: Any, rows: Any) -> Any:
    """By a call of the model after the hold."""
    if "HOLD" in os.environ:
        hold()
    return model(ids=torch.as_tensor(rows))["logits"]


@bentoml.service(torch_compile=CONFIG, traffic=LONG)
class Plain:
    def __init__(self) -> None:
        self.model = compile_model(classifier(), example_inputs=[{"ids": ids(2, 5)}], name="tiny")

    @bentoml.api
    def classify(self, rows: Rows) -> list[list[float]]:
        return logits(self.model, rows).tolist()


class Classify(CompiledRunnable):
    torch_compile: ClassVar = CONFIG

    def load_model(self) -> torch.nn.Module:
        return classifier()

    def example_inputs(self) -> list[dict[str, torch.Tensor]]:
        return [{"ids": ids(2, 5)}]

    @bentoml.legacy.Runnable.method(batchable=True, batch_dim=0)
    def classify(self, rows: torch.Tensor) -> torch.Tensor:
        return logits(self.model, rows)


runner: Any = bentoml.legacy.Runner(Classify, name="tiny", max_batch_size=2, max_latency_ms=300_000)
legacy: Any = bentoml.legacy.Service("legacy", runners=[runner])


@legacy.api(input=bentoml.io.JSON(), output=bentoml.io.JSON(), route="/classify")
async def classify(body: dict[str, Rows]) -> Any:
    answer = await runner.classify.async_run(torch.tensor(body["rows"]))
    return answer.tolist()


RunnerService = runner_service(runner, traffic=LONG)


@bentoml.service(traffic=LONG)
class Front:
    runner = bentoml.depends(RunnerService)

    @bentoml.api
    async def classify(self, rows: Rows) -> list[list[float]]:
        answer: torch.Tensor = await self.runner.to_async.classify(torch.tensor(rows))
        return answer.tolist()
