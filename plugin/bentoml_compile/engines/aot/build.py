"""The ahead-of-time engine in a boot: one package for each prepared shape, made once and opened in milliseconds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bentoml_compile.config import CompileConfig, VerifyConfig
from bentoml_compile.engines.aot.errors import NotExportable
from bentoml_compile.engines.aot.export import export_package
from bentoml_compile.engines.aot.package import open_package
from bentoml_compile.engines.aot.shadow import perturbed
from bentoml_compile.engines.build import Record, examine
from bentoml_compile.engines.eager import call, eager_callable
from bentoml_compile.engines.failures import out_of_memory
from bentoml_compile.engines.jit import uses_cuda_graphs
from bentoml_compile.engines.phases import phase, recorded_phases
from bentoml_compile.engines.verify import compare
from bentoml_compile.prepared import PreparedShape

logger = logging.getLogger("bentoml_compile")

__all__ = ["NotExportable", "build", "load"]


def build(
    model: torch.nn.Module,
    method: str,
    config: CompileConfig,
    names: tuple[str, ...],
    shapes: Sequence[PreparedShape],
    *,
    directory: Path,
    record: Record,
) -> None:
    """Exports, compiles and opens each shape. Either all of them have code to run afterwards, or it raises.

    Raises:
        NotExportable: the reason; the engine cannot serve this model.
        ConfigError: the model cannot run an example.
        Exception: whatever the compiler raises.
    """
    _refuse_cuda_graphs(model, config)
    eager = eager_callable(model, method)
    try:
        with recorded_phases() as phases:
            for index, shape in enumerate(shapes):
                examine(shape, eager, names, record)
                example, place = shape.example.clone(), _place(directory, index)
                with phase("export"):  # what is compiled inside counts as the compiler's own phases
                    export_package(model, method, example, place, mode=config.mode, options=config.options)
    finally:
        record.phases += phases
    load(model, method, shapes, directory=directory)
    if config.verify is not False:
        _verify_with_other_weights(model, method, shapes, directory, config.verify)


def _refuse_cuda_graphs(model: torch.nn.Module, config: CompileConfig) -> None:
    if uses_cuda_graphs(model, config):
        raise NotExportable(f"mode {config.mode!r} promises CUDA graphs, which torch.compile makes and AOTInductor not")


def _verify_with_other_weights(
    model: torch.nn.Module, method: str, shapes: Sequence[PreparedShape], directory: Path, config: VerifyConfig
) -> None:
    """A weight that the compiler has baked in shows when all of them change."""
    try:
        other = perturbed(model)
    except Exception as error:
        if not out_of_memory(error):
            raise
        logger.warning("no memory for a second set of weights: compiled code is verified with the model's own alone")
        return
    eager = eager_callable(other, method)
    for index, shape in enumerate(shapes):
        run = open_package(_place(directory, index), other, method)
        try:
            expected = call(eager, shape.example.clone())
            if _is_finite(expected):
                problem = compare(expected, call(run, shape.example.clone()), config=_loose(config)).problem
                if problem:
                    raise NotExportable(f"with other weights compiled differs from eager: {problem}")
        finally:
            run.close()


def _loose(config: VerifyConfig) -> VerifyConfig:
    """Perturbed weights amplify rounding; a baked-in weight differs by far more."""
    return config.model_copy(update={"rtol": max(config.rtol or 0.0, 1e-2), "atol": max(config.atol or 0.0, 1e-3)})


def _is_finite(output: Any) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


def load(model: torch.nn.Module, method: str, shapes: Sequence[PreparedShape], *, directory: Path) -> None:
    """Opens the package of each shape, with the live model's own tensors. Needs no compiler, Dynamo or Inductor.

    Raises:
        LibraryError, OSError, ValueError, KeyError, TypeError: a package is not what `build` wrote, or not for this
            model.
    """
    for index, shape in enumerate(shapes):
        shape.serve_by("aot", open_package(_place(directory, index), model, method))


def _place(directory: Path, index: int) -> Path:
    return directory / f"package-{index}"
