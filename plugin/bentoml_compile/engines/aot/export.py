"""From a live model to a compiled package: torch.export, the hazards, AOTInductor.

    package = export_package(model, "forward", example, directory, mode="default", options={})
    executable = open_package(directory, model, "forward")      # package.py; here or in any later process

The program that is exported takes the tensors of the call and returns the tensors of the result, nothing else: what
else the method takes or returns is a constant of the prepared shape, and AOTInductor gives ints and bools back as
tensors, and refuses floats and strings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from bentoml_compile.engines.aot import dynamic as dims
from bentoml_compile.engines.aot.errors import NotExportable
from bentoml_compile.engines.aot.hazards import find_foreign_constant, find_hazard
from bentoml_compile.engines.aot.inductor import compile_program
from bentoml_compile.engines.aot.leftovers import FakesLeft, refuse_leftovers
from bentoml_compile.engines.aot.package import PACKAGE_FILE, Leaf, Package, Weight, save_constants, tensors_of
from bentoml_compile.engines.aot.shadow import shadow
from bentoml_compile.engines.aot.trace import Call, TracedResult
from bentoml_compile.engines.eager import call_as_traced, device_of_call, eager_callable
from bentoml_compile.engines.failures import out_of_memory
from bentoml_compile.ranges import FreeSize, Place
from bentoml_compile.shapes import ExampleInput, argument_name, describe, parameter_names, tensor_leaves

logger = logging.getLogger("bentoml_compile")

_PREFIX = "model."  # of the model's names in the exported program


def export_package(
    model: nn.Module,
    method: str,
    example: ExampleInput,
    directory: Path,
    *,
    mode: str,
    options: Mapping[str, Any],
    sizes: Sequence[FreeSize] = (),
    compiler: Callable[..., str] | None = None,
    eager: Callable[..., Any] | None = None,
) -> Package:
    """Compiles one method of a model ahead of time, for one example or a range of sizes around it.

    Traces a copy; `eager` runs at the sizes that are traced, before where some vary and after. Autocast and torch's
    settings are those of the caller; gradients are off. Everything that makes a model NotExportable is found before
    anything is compiled.

    Args:
        directory: made if it is missing; the package is written into it, and nothing else.
        mode, options: as for torch.compile; options go on top of the mode's, inductor.SETTINGS on top of both.
        sizes: what may vary; `exported_sizes` tells what then does. Traced at sizes of at least 2: whether the package
            is right at 1 is for the caller to verify, since a branch on a size of 1 is baked in.
        compiler: None stands for `compile_program`; another of its kind compiles in another process.
        eager: None stands for the live model's method; another runs a copy of the model.

    Raises:
        NotExportable: compiled code would not do what eager does, or torch.export refuses the model; FakesLeft where
            tracing has done harm to what the model keeps outside of its modules.
        Exception: whatever the compiler raises.
    """
    call = _read_call(model, method, example, eager)
    directory.mkdir(parents=True, exist_ok=True)
    with _without_gradients(model):
        program, result = _export(call, sizes)
        _refuse_hazards(program, call, is_dynamic=any(not size.is_fixed for size in sizes))
        constants = _constants_to_buffers(program)
        package = _describe(program, result, call, constants)
        device = torch.device(package.device)
        library = (compiler or compile_program)(program, directory, device=device, mode=mode, options=options)
    package = dataclasses.replace(package, library=library)
    if constants:
        save_constants(directory, constants)
    (directory / PACKAGE_FILE).write_text(package.to_json())
    return package


def exported_sizes(
    package: Package, model: nn.Module, method: str, example: ExampleInput, sizes: Sequence[FreeSize]
) -> tuple[FreeSize, ...]:
    """What varies in a package that was exported with `sizes`: export may have bound dimensions to each other."""
    return dims.sizes_of(package, sizes, _read_call(model, method, example).places)


@contextlib.contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """torch.export can trace ordinary weights only outside of inference mode, and inference tensors only inside."""
    inference = any(tensor.is_inference() for tensor in tensors_of(model).values())
    with torch.inference_mode(inference), torch.no_grad():
        yield


@dataclass(frozen=True, slots=True)
class _ExampleCall:
    """The call to compile, and for each tensor in it the path to it and where a reader finds it."""

    model: nn.Module
    method: str
    eager: Callable[..., Any]
    names: tuple[str, ...]
    example: ExampleInput
    tensors: list[torch.Tensor]
    paths: list[tuple[Any, ...]]
    places: list[Place]

    def label(self, tensor: int) -> str:
        """What a reader calls a tensor of the call: "input_ids", "batch['ids']"."""
        place = self.places[tensor]
        return place.argument + "".join(f"[{key!r}]" for key in place.path)


def _read_call(
    model: nn.Module, method: str, example: ExampleInput, eager: Callable[..., Any] | None = None
) -> _ExampleCall:
    names = parameter_names(getattr(model, method))
    found = list(tensor_leaves((example.args, example.kwargs)))
    places = [
        Place(str(path[1]) if path[0] == 1 else argument_name(names, path[1]), path[2:], dim=0) for path, _ in found
    ]
    tensors, paths = [leaf.detach() for _, leaf in found], [path for path, _ in found]
    return _ExampleCall(model, method, eager or eager_callable(model, method), names, example, tensors, paths, places)


# export


def _export(call: _ExampleCall, sizes: Sequence[FreeSize]) -> tuple[ExportedProgram, TracedResult]:
    """Shares the dimensions that may be one; if export refuses that, each gets a symbol of its own."""
    try:
        return _export_once(call, sizes)
    except FakesLeft:
        raise
    except NotExportable as error:
        apart = dims.each_of_its_own(sizes)
        if len(apart) == len(sizes):
            raise
        try:
            return _export_once(call, apart)
        except NotExportable:
            raise error from None


def _export_once(call: _ExampleCall, sizes: Sequence[FreeSize]) -> tuple[ExportedProgram, TracedResult]:
    tracing = dims.tracing_of(call.example, call.names, sizes, call.places)
    if any(tracing.dims):  # else eager has just run with this example
        _fill_caches(call, tracing.example)
    try:
        program, result = _traced(call, tracing, TracedResult())
        if result.in_doubt:
            program, result = _traced(call, tracing, TracedResult(watched=True))
    except NotExportable:
        refuse_leftovers(call.eager, tracing.example, call.names)
        raise
    refuse_leftovers(call.eager, tracing.example, call.names)
    return program, result


def _fill_caches(call: _ExampleCall, example: ExampleInput) -> None:
    try:
        call_as_traced(call.eager, example.clone())
    except Exception as error:
        if out_of_memory(error):
            raise
        given = describe(example, call.names)
        raise NotExportable(
            f"the model itself raises at the sizes to trace ({given}): {_reason(error, call)}"
        ) from error


def _traced(call: _ExampleCall, tracing: dims.Tracing, result: TracedResult) -> tuple[ExportedProgram, TracedResult]:
    """Fills `result`."""
    try:
        copied = shadow(call.model)
    except Exception as error:
        raise NotExportable(f"the model cannot be copied for tracing: {_reason(error, call)}") from error
    module = Call(copied, call.method, tracing.example, result)
    shapes = {"tensors": tracing.dims} if any(tracing.dims) else None
    try:
        with _graphs_to_debug_log():
            inputs = tuple(tensor.clone() for tensor in _read_call(call.model, call.method, tracing.example).tensors)
            program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        if out_of_memory(error):
            raise
        raise NotExportable(result.problem or f"torch.export: {_reason(error, call)}") from error
    if result.problem:
        raise NotExportable(result.problem)
    return program, result


@contextlib.contextmanager
def _graphs_to_debug_log() -> Iterator[None]:
    """torch.export prints the graph so far, of hundreds of lines, when it refuses a model (2.13.0)."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    finally:
        if printed.getvalue():
            logger.debug("torch.export printed: %s", printed.getvalue())


def _reason(error: BaseException, call: _ExampleCall) -> str:
    """The line of torch's error that says what is wrong, in the words of the model's signature."""
    lines = str(error).strip().splitlines() or [""]
    if "Constraints violated" in lines[0]:
        lines = [line.strip(" -") for line in lines if line.startswith("  - ")] or lines
    return f"{type(error).__name__}: {_in_words(lines[0], call)}"[:300]


def _in_words(condition: str, call: _ExampleCall) -> str:
    """ "input_ids.shape[1]" for "L['tensors'][0].size()[1]"."""
    size = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)")
    return size.sub(lambda match: f"{call.label(int(match[1]))}.shape", condition)


def _refuse_hazards(program: ExportedProgram, call: _ExampleCall, *, is_dynamic: bool) -> None:
    labels = [call.label(tensor) for tensor in range(len(call.tensors))]
    try:
        hazard = find_foreign_constant(program, call.model) or find_hazard(program, labels, _PREFIX)
    except Exception as error:  # to decompose is to trace once more
        if out_of_memory(error):
            raise
        raise NotExportable(f"torch.export: {_reason(error, call)}") from error
    if hazard is not None:
        raise NotExportable(hazard)
    if is_dynamic and (relation := dims.other_relation(program)) is not None:
        condition = _in_words(relation, call)
        raise NotExportable(f"holds only where {condition}; leave one of these dimensions out of `dynamic`")


# description


def _constants_to_buffers(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Makes each lifted constant a buffer, and returns them by name.

    A library asks for a lifted constant under a name of its own, and crashes where it is not given one (mask2former,
    torch 2.13.0); for a buffer it asks under the buffer's name.
    """
    specs = program.graph_signature.input_specs
    constants = {}
    for position, spec in enumerate(specs):
        if spec.kind is InputKind.CONSTANT_TENSOR:
            assert spec.target is not None
            specs[position] = InputSpec(InputKind.BUFFER, spec.arg, spec.target, persistent=False)
            constants[spec.target] = program.constants[spec.target].detach()
    return constants


def _describe(
    program: ExportedProgram, result: TracedResult, call: _ExampleCall, constants: Mapping[str, torch.Tensor]
) -> Package:
    """The package but for its library."""
    traced = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    user_inputs = zip(call.paths, program.graph_signature.user_inputs, strict=True)
    inputs = tuple(_leaf(path, traced[name]) for path, name in user_inputs)
    symbols = {size for leaf in inputs for size in leaf.sizes if isinstance(size, str)}
    return Package(
        library="",
        device=str(device_of_call(call.model, call.example)),
        inputs=inputs,
        output_spec=result.spec,
        output_constants=result.constants,
        ranges=dims.read_symbol_ranges(program, symbols),
        weights=_weights(program, call.model, constants),
        constants={name: _weight(name, tensor) for name, tensor in constants.items()},
    )


def _leaf(path: tuple[Any, ...], value: torch.Tensor) -> Leaf:
    return Leaf(
        path=path,
        dtype=str(value.dtype),
        sizes=tuple(map(dims.read_expression, value.shape)),
        strides=tuple(map(dims.read_expression, value.stride())),
        device=value.device.type,
    )


def _weights(program: ExportedProgram, model: nn.Module, constants: Mapping[str, torch.Tensor]) -> dict[str, Weight]:
    own = tensors_of(model)
    weights = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target not in constants:
            assert spec.target is not None
            name = spec.target.removeprefix(_PREFIX)
            tensor = own[name]
            weights[spec.target] = _weight(name, tensor)
    return weights


def _weight(name: str, tensor: torch.Tensor) -> Weight:
    return Weight(name, str(tensor.dtype), tuple(tensor.shape), tensor.stride())
