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
_SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 37}
_WIDE = 0.2  # of initial weights, where the default's outputs are so small that any answer would be close
_DETR_SIZES: dict[str, Any] = {
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")},
    "d_model": 32,
    "num_queries": 5,
    "use_timm_backbone": False,
    "backbone": None,
}

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
    return transformers.ViTForImageClassification(config), images(size=32)


def images(batch: int = 2, size: int = 64) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size)}


def _resnet() -> Made:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    return transformers.ResNetForImageClassification(config), images(size=32)


def _beit() -> Made:
    return transformers.BeitForImageClassification(transformers.BeitConfig(**_SIZES, image_size=64)), images()


def _convnext() -> Made:
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1])
    return transformers.ConvNextForImageClassification(config), images()


def _mobilenet_v2() -> Made:
    config = transformers.MobileNetV2Config(depth_multiplier=0.35, image_size=64, initializer_range=_WIDE)
    return transformers.MobileNetV2ForImageClassification(config), images()


def _segformer() -> Made:
    config = transformers.SegformerConfig(
        hidden_sizes=[16, 16, 32, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        initializer_range=_WIDE,
    )
    return transformers.SegformerForSemanticSegmentation(config), images()


def _small_resnet() -> Any:
    stages: dict[str, Any] = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "out_features": ["stage4"]}
    return transformers.ResNetConfig(embedding_size=8, **stages)


def _small_swin() -> Any:
    heads: dict[str, Any] = {"depths": [1, 1, 1, 1], "num_heads": [2, 2, 4, 4], "window_size": 4}
    features: dict[str, Any] = {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
    return transformers.SwinConfig(image_size=64, embed_dim=16, **heads, **features)


def _detr() -> Made:
    config = transformers.DetrConfig(**_DETR_SIZES, backbone_config=_small_resnet())
    return transformers.DetrForObjectDetection(config), images()


def _conditional_detr() -> Made:
    config = transformers.ConditionalDetrConfig(**_DETR_SIZES, backbone_config=_small_resnet())
    return transformers.ConditionalDetrForObjectDetection(config), images()


def _owlvit() -> Made:
    text = {**_SIZES, "vocab_size": WORDS, "max_position_embeddings": 16}
    vision = {**_SIZES, "image_size": 64, "patch_size": 16}
    config = transformers.OwlViTConfig(text_config=text, vision_config=vision, projection_dim=32)
    return transformers.OwlViTForObjectDetection(config), {**images(1), **tokens(2, 8)}  # two texts for one image


def _maskformer() -> Made:
    config = transformers.MaskFormerConfig(
        backbone_config=_small_swin(),
        decoder_config=transformers.DetrConfig(**_DETR_SIZES, backbone_config=None),
        fpn_feature_size=32,
        mask_feature_size=32,
    )
    return transformers.MaskFormerForInstanceSegmentation(config), images()


def _mask2former() -> Made:
    config = transformers.Mask2FormerConfig(
        backbone_config=_small_swin(),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=32,
        num_queries=5,
    )
    return transformers.Mask2FormerForUniversalSegmentation(config), images()


def _distilbert() -> Made:
    config = transformers.DistilBertConfig(
        vocab_size=WORDS, dim=32, n_layers=1, n_heads=4, hidden_dim=37, initializer_range=_WIDE
    )
    return transformers.DistilBertForSequenceClassification(config), tokens()


def _longformer() -> Made:
    config = transformers.LongformerConfig(vocab_size=WORDS, **_SIZES, attention_window=4)
    return transformers.LongformerModel(config), tokens()


def _gemma() -> Made:
    config = transformers.GemmaConfig(vocab_size=WORDS, **_SIZES, num_key_value_heads=1, head_dim=8)
    return transformers.GemmaForCausalLM(config), {**tokens(), "use_cache": False}


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
    "vit": _vit,
    "beit": _beit,
    "convnext": _convnext,
    "resnet": _resnet,
    "mobilenet_v2": _mobilenet_v2,
    "segformer": _segformer,
    "detr": _detr,
    "conditional_detr": _conditional_detr,
    "owlvit": _owlvit,
    "maskformer": _maskformer,
    "mask2former": _mask2former,
    "bert": _bert,
    "distilbert": _distilbert,
    "t5_encoder": _t5_encoder,
    "longformer": _longformer,
    "gpt2": _gpt2,
    "gpt2_with_cache": _gpt2_with_cache,
    "gemma": _gemma,
    "odd": _odd,
}
