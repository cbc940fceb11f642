"""Services whose models are compiled in the background, by a compiler that waits until the file $GO exists."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bentoml
import torch

from bentoml_compile import compile_model
from tests.models import classifier, ids


def wait_for_file(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    while not Path(os.environ["GO"]).exists():
        time.sleep(0.02)
    return graph.forward


torch._dynamo.register_backend(wait_for_file, name="wait_for_file")

WAITING = {"backend": "wait_for_file", "startup": "background", "keep_eager_if_slower": False}


@bentoml.service(torch_compile=WAITING)
class Waiting:
    def __init__(self) -> None:
        self.model = compile_model(classifier(), example_inputs=[{"ids": ids(2, 5)}], name="waiting")

    @bentoml.api
    def classify(self, rows: list[list[int]]) -> list[list[float]]:
        logits: torch.Tensor = self.model(ids=torch.tensor(rows))["logits"]
        return logits.tolist()


@bentoml.service
class Front:
    waiting = bentoml.depends(Waiting)

    @bentoml.api
    def classify(self, rows: list[list[int]]) -> list[list[float]]:
        return self.waiting.classify(rows=rows)
