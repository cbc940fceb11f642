"""A service with BentoML's adaptive batching, whose batches of any size run on a few prepared ones."""

from __future__ import annotations

import bentoml
import torch

from bentoml_compile import compile_model
from tests.models import classifier, ids

BATCHES = (1, 8, 64)


@bentoml.service(
    threads=8,
    torch_compile={
        "backend": "eager",
        "keep_eager_if_slower": False,
        "on_unprepared": "reject",
        "pad": {"ids": {"0": "repeat"}},
    },
)
class Batched:
    def __init__(self) -> None:
        examples = [{"ids": ids(batch, 5)} for batch in BATCHES]
        self.model = compile_model(classifier(), example_inputs=examples, name="batched")

    @bentoml.api(batchable=True, max_batch_size=64, max_latency_ms=60_000)
    def classify(self, rows: list[list[int]]) -> list[list[float]]:
        logits: torch.Tensor = self.model(ids=torch.tensor(rows))["logits"]
        return logits.tolist()
