"""The ahead-of-time engine in a boot: one package for each prepared shape, made once and opened in milliseconds."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from bentoml_compile.config import VerifyConfig
from bentoml_compile.engines.aot.child import HandoverError, compile_in_child
from bentoml_compile.engines.aot.cuda_graph import CaptureFailed
from bentoml_compile.engines.aot.errors import NotExportable
from bentoml_compile.engines.aot.export import export_package, exported_sizes
from bentoml_compile.engines.aot.inductor import compile_program
from bentoml_compile.engines.aot.package import open_package
from bentoml_compile.engines.aot.shadow import perturbed
from bentoml_compile.engines.build import Record, examine
from bentoml_compile.engines.eager import call, device_of_call, eager_callable
from bentoml_compile.engines.failures import out_of_memory
from bentoml_compile.engines.jit import uses_cuda_graphs
from bentoml_compile.engines.phases import phase, recorded_phases
from bentoml_compile.engines.verify import compare, varied
from bentoml_compile.prepared import PreparedShape, Target
from bentoml_compile.ranges import FreeSize, corners

logger = logging.getLogger("bentoml_compile")

__all__ = ["NotExportable", "build", "load"]


def build(target: Target, *, directory: Path, record: Record) -> str:
    """Exports, compiles and opens each shape; adds shapes where a range does not hold for a size of 1.

    Returns:
        Why some shapes are left without code, which torch.compile is to make; empty if none is.

    Raises:
        NotExportable: the reason; the engine cannot serve this model.
        ConfigError: the model cannot run an example.
        Exception: whatever the compiler raises.
    """
    left = ""
    graphs = uses_cuda_graphs(target.model, target.config)
    for index, shape in _growing(target.shapes):
        examine(target, shape, record)
        shape.by_cuda_graph = graphs
        if graphs and any(not size.is_fixed for size in shape.sizes):
            left = left or f"{shape.label}: a CUDA graph has one size"
            continue
        _compile(target, shape, _place(directory, index), record)
        try:
            _open(target, shape, _place(directory, index))
        except CaptureFailed as error:
            left = left or f"{shape.label}: no CUDA graph: {error}"
            continue
        target.shapes.extend(_split_ones_off(target, shape))
    if target.config.verify is not False:
        _verify_with_other_weights(target, directory, target.config.verify)
    return left


def _growing(shapes: list[PreparedShape]) -> Iterator[tuple[int, PreparedShape]]:
    """Also those that are added on the way."""
    index = 0
    while index < len(shapes):
        yield index, shapes[index]
        index += 1


def _compile(target: Target, shape: PreparedShape, place: Path, record: Record) -> None:
    model, method, config = target.model, target.method, target.config
    compiler = functools.partial(_in_child, target) if target.rehearsal is not None else None
    try:
        with recorded_phases() as phases, phase("export"):  # what is compiled inside counts as the compiler's phases
            package = export_package(
                model,
                method,
                shape.example.clone(),
                place,
                mode=config.mode,
                options=config.options,
                sizes=shape.sizes,
                compiler=compiler,
                eager=target.trial,
            )
    finally:
        record.took(phases, shape.label)
    if shape.sizes:
        shape.limit_to(exported_sizes(package, model, method, shape.example, shape.sizes))


def _in_child(target: Target, program: ExportedProgram, directory: Path, **how: Any) -> str:
    """While the model serves, the compiler runs in a process of its own."""
    try:
        return compile_in_child(program, directory, time_limit=target.config.time_limit, **how)
    except HandoverError as error:
        logger.info("model %r: compiled in the worker's process: %s", target.name, error)
        return compile_program(program, directory, **how)


def _open(target: Target, shape: PreparedShape, place: Path) -> None:
    """Raises CaptureFailed where the shape wants a CUDA graph and has none."""
    device = device_of_call(target.model, shape.example)
    graphed = shape.example if shape.by_cuda_graph else None
    shape.serve_by("aot", open_package(place, target.model, target.method, device=device, graphed=graphed))


# a size of 1


def _split_ones_off(target: Target, shape: PreparedShape) -> list[PreparedShape]:
    """A branch on a size of 1 is baked in the other way: where that shows, the size has a package of its own.

    First each range alone at 1, then all of them together.
    """
    split = []
    for size in _with_one(shape):
        if not _is_right(target, shape, at_one=[size]):
            split.append(shape.split_one_off(size))
    ones = _with_one(shape)
    if len(ones) > 1 and not _is_right(target, shape, at_one=ones):
        split.append(shape.split_one_off(ones[0]))
    return split


def _with_one(shape: PreparedShape) -> list[FreeSize]:
    return [size for size in shape.sizes if size.begins_at_one]


def _is_right(target: Target, shape: PreparedShape, at_one: list[FreeSize]) -> bool:
    """Whether compiled is eager's result with these sizes at 1 and the others at the ends of their ranges above 1."""
    if target.config.verify is False or shape.run is None:
        return False
    ones = _with_one(shape)
    sizes = [s.fixed_at(1) if s in at_one else s.from_two() if s in ones else s for s in shape.sizes]
    for example in corners(shape.example, shape.names, sizes):
        inputs = varied(example, shape.bounds or (), shape.names)
        try:
            expected, actual = call(target.trial, inputs.clone()), call(shape.run, inputs.clone())
        except Exception as error:
            logger.debug("model %r: %s fails at a size of 1: %s", target.name, shape.label, error)
            return False
        if compare(expected, actual, config=_loose(target.config.verify)).problem:
            return False
    return True


# other weights


def _verify_with_other_weights(target: Target, directory: Path, config: VerifyConfig) -> None:
    """A weight that the compiler has baked in shows when all of them change."""
    try:
        other = perturbed(target.model)
    except Exception as error:
        if not out_of_memory(error):
            raise
        logger.warning("no memory for a second set of weights: compiled code is verified with the model's own alone")
        return
    eager = eager_callable(other, target.method)
    for index, shape in enumerate(target.shapes):
        if shape.run is None:
            continue
        if shape.sizes:  # what the model's code keeps by size outside of its modules comes from its own weights
            call(target.trial, shape.example.clone())
        run = open_package(_place(directory, index), other, target.method)
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


def load(target: Target, *, directory: Path, leave_out: Collection[PreparedShape] = ()) -> None:
    """Opens the packages, with the live model's own tensors. Needs no compiler, Dynamo or Inductor.

    Raises:
        LibraryError, OSError, ValueError, KeyError, TypeError: a package is not what `build` wrote, or not for this
            model.
    """
    for index, shape in enumerate(target.shapes):
        if shape.compiled_by == "aot" and shape not in leave_out:
            _open(target, shape, _place(directory, index))


def _place(directory: Path, index: int) -> Path:
    return directory / f"package-{index}"
