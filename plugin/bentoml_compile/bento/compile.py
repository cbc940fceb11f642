"""The public compile_model: the core's, with the service's config, telemetry and store."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bentoml_compile import model as core
from bentoml_compile.bento import batching, boot, readiness, runners, settings, streams
from bentoml_compile.config import CompileConfig
from bentoml_compile.model import CompiledModel

settings.install()
runners.install()
boot.install()
batching.install()
streams.install()

if (logger := logging.getLogger("bentoml_compile")).level == logging.NOTSET:
    logger.setLevel(logging.getLogger("bentoml").getEffectiveLevel())  # a boot's summary is info, as BentoML's own are


def compile_model(
    model: torch.nn.Module,
    *,
    example_inputs: Sequence[Mapping[str, Any] | tuple[Any, ...]],
    name: str = "model",
    method: str = "forward",
    config: CompileConfig | Mapping[str, Any] | None = None,
) -> CompiledModel:
    """Makes one method of a model ready for serving: compiled, checked against eager, and kept for the next boot.

    Call it in a service's `__init__`:

        @bentoml.service(torch_compile={"mode": "max-autotune"})
        class Embedder:
            def __init__(self) -> None:
                self.encoder = compile_model(load_encoder(), example_inputs=[{"input_ids": ids}], name="encoder")

    Args:
        model: the module as it will serve: on its device, in its dtype, in eval mode. It is not copied.
        example_inputs: one entry for each prepared shape: a dict of keyword arguments or a tuple of positional ones.
        name: unique in the process; artifacts, spans and metrics carry it, and `torch_compile.models.<name>` in the
            service's config is its section.
        method: the method to compile. `forward` means calling the module, with its hooks.
        config: None takes the merged `torch_compile` config of the service that is being constructed, else of the
            worker's own service, else the defaults. Given, it replaces that config whole, and deployment overrides
            do not apply.

    Returns:
        A CompiledModel that takes and returns exactly what the method does. Its `report` says what this boot did.

    Raises:
        ConfigError: a wrong setting, a wrong example input, or a second model of this name.
        GraphBreakError: `fullgraph: require` and the model is not one graph.
        VerificationError: `verify.strict` and the compiled result differs from eager.
    """
    compiled = core.compile_model(
        model,
        example_inputs=example_inputs,
        name=name,
        method=method,
        config=settings.config_of(name, config),
        listeners=boot.listeners(),
        default_store=settings.bentoml_home() / "compile",
        bundle=settings.bundle_root() or runners.bundle_root(),
    )
    readiness.follow(compiled)
    return compiled
