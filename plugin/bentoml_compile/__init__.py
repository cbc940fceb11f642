"""Compiled PyTorch models in BentoML: compiled and checked when the worker starts, kept for the next one, traced.

from bentoml_compile import compile_model

@bentoml.service(torch_compile={"mode": "default", "fullgraph": "prefer"})
class Embedder:
    def __init__(self) -> None:
        self.encoder = compile_model(load_encoder(), example_inputs=[{"input_ids": ids}], name="encoder")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bentoml_compile.bento.compile import compile_model
    from bentoml_compile.bento.runnable import CompiledRunnable
    from bentoml_compile.bento.runner_service import runner_service
    from bentoml_compile.bento.saved import compiled
    from bentoml_compile.config import CompileConfig
    from bentoml_compile.model import CompiledModel
    from bentoml_compile.report import CompileReport

__all__ = [
    "CompileConfig",
    "CompileReport",
    "CompiledModel",
    "CompiledRunnable",
    "compile_model",
    "compiled",
    "runner_service",
]

_HOMES = {
    "compile_model": "bentoml_compile.bento.compile",
    "CompiledRunnable": "bentoml_compile.bento.runnable",
    "compiled": "bentoml_compile.bento.saved",
    "runner_service": "bentoml_compile.bento.runner_service",
    "CompileConfig": "bentoml_compile.config",
    "CompiledModel": "bentoml_compile.model",
    "CompileReport": "bentoml_compile.report",
}


def __getattr__(name: str) -> Any:
    # lazily: the command line lists artifacts without importing torch
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
