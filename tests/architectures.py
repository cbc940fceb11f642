"""Small models of public architectures with random weights, and hand-written ones with everything that is awkward.

`make(name)` gives a model and the keyword arguments of one call; the same ones in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

WORDS = 99
LENGTH = 128  # of the odd model's ids: enough for Inductor to make a parallel region, were it allowed to
_SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 37}

Made = tuple[nn.Module, dict[str, Any]]


def make(name: str) -> Made:
    torch.manual_seed(0)
    model, inputs = MAKERS[name]()
    return model.eval(), inputs


def tokens(batch: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, WORDS, (batch, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _bert() -> Made:
    return transformers.BertModel(transformers.BertConfig(vocab_size=WORDS, **_SIZES)), tokens()


def _vit() -> Made:
    config = transformers.ViTConfig(**_SIZES, image_size=32, patch_size=16)
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def _resnet() -> Made:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    return transformers.ResNetForImageClassification(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def _t5_encoder() -> Made:
    config = transformers.T5Config(vocab_size=WORDS, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4)
    return transformers.T5EncoderModel(config), tokens()


def _gpt2() -> Made:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0, n_positions=64
    )
    return transformers.GPT2LMHeadModel(config), {**tokens(), "use_cache": False}


def _gpt2_with_cache() -> Made:
    model, inputs = _gpt2()
    return model, {**inputs, "use_cache": True}


class Odd(nn.Module):
    """Everything at once: nested inputs and outputs, constants in both, aliases, tied and tiny weights, literals."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(8))
        self.register_buffer("offsets", torch.arange(5.0), persistent=False)
        self.table = [torch.tensor([2.0, 3.0, 5.0])]
        self.name = "odd"

    def forward(self, batch: dict[str, Any], flag: bool, power: int = 1, extra: torch.Tensor | None = None) -> Any:
        ids, image = batch["ids"], batch["images"][0]
        hidden = self.embedding(ids) * self.scale**power + self.shift
        if flag:
            hidden = hidden + torch.tensor([0.5, -0.5]).repeat(4)
        if extra is not None:
            hidden = hidden + extra
        logits = self.head(hidden)
        return {
            "logits": logits,
            "nothing": None,
            "facts": (ids.shape[1], 0.25, self.name, True, [hidden.mean(1), None]),
            "aliases": (image, image.transpose(0, 1), logits),
            "image": (image + self.offsets) * self.table[0][1],
        }

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.embedding(ids) * self.scale)


def _odd() -> Made:
    batch = {"ids": torch.randint(0, WORDS, (2, LENGTH)), "images": [torch.randn(3, 5)]}
    return Odd(), {"batch": batch, "flag": True, "power": 2, "extra": None}


MAKERS: dict[str, Callable[[], Made]] = {
    "bert": _bert,
    "vit": _vit,
    "resnet": _resnet,
    "t5_encoder": _t5_encoder,
    "gpt2": _gpt2,
    "gpt2_with_cache": _gpt2_with_cache,
    "odd": _odd,
}
