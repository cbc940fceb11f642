"""The ahead-of-time engine in a boot: one package for each prepared shape, made once and opened in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from bentoml_compile.config import CompileConfig
from bentoml_compile.engines.aot.errors import NotExportable
from bentoml_compile.engines.aot.export import export_package
from bentoml_compile.engines.aot.package import open_package
from bentoml_compile.engines.build import Record, examine
from bentoml_compile.engines.eager import eager_callable
from bentoml_compile.engines.phases import phase, recorded_phases
from bentoml_compile.prepared import PreparedShape

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
