"""Runners of each kind, in a legacy service and as services, that are tested under the real `bentoml serve`."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import bentoml
import torch

from bentoml_compile import CompiledRunnable, compiled, runner_service
from tests.models import classifier, ids

EAGER = {"engine": "jit", "backend": "eager", "keep_eager_if_slower": False}
AHEAD = {"engine": "aot", "keep_eager_if_slower": False}


class _Classifier(CompiledRunnable):
    def load_model(self) -> torch.nn.Module:
        return classifier()

    def example_inputs(self) -> list[dict[str, torch.Tensor]]:
        return [{"ids": ids(2, 5)}]

    def logits(self, rows: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids=torch.as_tensor(rows).to(self.device))["logits"]
        return logits


class Classify(_Classifier):
    torch_compile: ClassVar = {**EAGER, "dynamic": {"ids": {"0": [1, 32]}}}

    @bentoml.legacy.Runnable.method(batchable=True, batch_dim=0)
    def classify(self, rows: Any) -> torch.Tensor:
        return self.logits(rows)

    @bentoml.legacy.Runnable.method(batchable=True, batch_dim=0)
    def both(self, rows: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.logits(rows), scale * 2

    @bentoml.legacy.Runnable.method
    def process(self) -> int:
        return os.getpid()


class Double(_Classifier):
    torch_compile: ClassVar = EAGER

    @bentoml.legacy.Runnable.method
    def double(self, rows: torch.Tensor, factor: int = 2) -> dict[str, Any]:
        return {"logits": factor * self.logits(rows), "process": os.getpid()}

    @bentoml.legacy.Runnable.method
    def title(self) -> str:
        return "double"


Runner: Any = bentoml.legacy.Runner  # a runner's methods are those of its Runnable
FASTER = {"torch_compile": {"mode": "reduce-overhead"}}
classify = Runner(Classify, name="classify", max_batch_size=16)
double = Runner(Double, name="double", runnable_init_params=FASTER)
embedded = Runner(Double, name="embedded", embedded=True)
saved = compiled(bentoml.pytorch.get("saved").to_runner(), example_inputs=[(torch.zeros(2, 4),)], **AHEAD)

# Any: an api would have to take every kind of value that its descriptor can read
legacy: Any = bentoml.legacy.Service("legacy", runners=[classify, double, embedded, saved])


@legacy.api(input=bentoml.io.JSON(), output=bentoml.io.JSON(), route="/classify")
async def classify_rows(rows: list[list[int]]) -> list[list[float]]:
    logits: torch.Tensor = await classify.classify.async_run(torch.tensor(rows))
    return logits.tolist()


@legacy.api(input=bentoml.io.JSON(), output=bentoml.io.JSON(), route="/all")
def ask_all(rows: list[list[int]]) -> dict[str, Any]:
    tensor = torch.tensor(rows)
    return as_json(
        {
            "double": double.double.run(tensor),
            "embedded": embedded.double.run(tensor, factor=3),
            "saved": saved.run(tensor[:, :4].float().numpy()),
            "processes": [os.getpid(), classify.process.run()],
        }
    )


ClassifyService = runner_service(classify, traffic={"timeout": 50})
DoubleService = runner_service(double)
SavedService = runner_service(saved)


@bentoml.service
class Api:
    classify = bentoml.depends(ClassifyService)
    double = bentoml.depends(DoubleService)
    saved = bentoml.depends(SavedService)

    @bentoml.api(route="/classify")
    async def classify_rows(self, rows: list[list[int]]) -> list[list[float]]:
        logits: torch.Tensor = await self.classify.to_async.classify(torch.tensor(rows))
        return logits.tolist()

    @bentoml.api(route="/all")
    def ask_all(self, rows: list[list[int]]) -> dict[str, Any]:
        tensor = torch.tensor(rows)
        large = tensor.repeat(20, 1)  # of more rows than a batch has
        return as_json(
            {
                "large": self.classify.classify(large),
                "large array": self.classify.classify(rows=large.numpy()),
                "large both": self.classify.both(large, scale=torch.arange(len(large))),
                "double": self.double.double(tensor),
                "by name": self.double.double(factor=3, rows=tensor),
                "title": self.double.title(),
                "saved": self.saved(tensor[:, :4].float().numpy()),
                "tensor": self.classify.classify(tensor),
                "array": self.classify.classify(rows=tensor.numpy()),
                "list": self.classify.classify(rows),
                "both": self.classify.both(tensor, scale=torch.arange(len(rows))),
                "processes": [os.getpid(), self.classify.process()],
            }
        )


def as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value
