"""Small services that the tests of this folder run under the real `bentoml serve`."""

from __future__ import annotations

import os
from typing import Any

import bentoml
import torch

from bentoml_compile import compile_model
from tests.models import Broken, classifier, ids

# the model is so small that compiled code may be slower than eager, and then nothing compiled would be served
COMPILED = {"keep_eager_if_slower": False, "on_unprepared": "reject", "fullgraph": "require"}


def wait_forever(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """A compiler that hangs, with a child process as a real one has."""
    import subprocess

    subprocess.run(["sleep", "3600"], check=True)


if wait_forever.__name__ in os.environ.get("BENTOML_CONFIG_OVERRIDES", ""):  # else nobody here needs Dynamo so early
    torch._dynamo.register_backend(wait_forever, name="wait_forever")


@bentoml.service(torch_compile=COMPILED)
class Tiny:
    def __init__(self) -> None:
        self.model = compile_model(classifier(), example_inputs=[{"ids": ids(2, 5)}], name="tiny")

    @bentoml.api
    def classify(self, rows: list[list[int]]) -> list[list[float]]:
        logits: torch.Tensor = self.model(ids=torch.tensor(rows))["logits"]
        return logits.tolist()

    @bentoml.api
    def process(self) -> int:
        return os.getpid()


@bentoml.service(torch_compile=COMPILED)
class InParts:
    def __init__(self) -> None:
        self.model = compile_model(Broken().eval(), example_inputs=[(torch.ones(2, 4),)], name="broken")

    @bentoml.api
    def run(self) -> float:
        return float(self.model(torch.ones(2, 4)).sum())
