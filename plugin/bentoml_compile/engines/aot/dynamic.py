"""Dynamic dimensions: from the config's ranges to `torch.export.Dim`, and back from what export made of them."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from bentoml_compile.engines.aot.errors import NotExportable

SMALLEST_TRACED = 2  # export takes a size of 0 or 1 for a constant


@dataclass(frozen=True, slots=True)
class DynamicDim:
    """Dimension `dim` of the tensor at `leaf` (counted over the tensors of the example) takes low to high."""

    leaf: int
    dim: int
    low: int
    high: int


def read_ranges(
    ranges: Mapping[str, Mapping[int, tuple[int, int]]], arguments: Sequence[str], tensors: Sequence[torch.Tensor]
) -> list[DynamicDim]:
    """The config's ranges, for each tensor of the argument that they name.

    Raises:
        NotExportable: a dimension that the tensor does not have.
    """
    found = []
    for leaf, (argument, tensor) in enumerate(zip(arguments, tensors, strict=True)):
        for dim, (low, high) in ranges.get(argument, {}).items():
            if dim >= tensor.dim():
                raise NotExportable(
                    f"dynamic.{argument}.{dim}: the example has only {tensor.dim()} dimensions; correct the config"
                )
            found.append(DynamicDim(leaf, dim, low, high))
    return found


@dataclass(frozen=True, slots=True)
class Tracing:
    """What to give to torch.export: tensors of sizes that can stand for a range, and the Dims of each tensor."""

    tensors: tuple[torch.Tensor, ...]
    dims: tuple[dict[int, Any] | None, ...]


def tracing_of(dynamic: Sequence[DynamicDim], tensors: Sequence[torch.Tensor], *, shared: bool) -> Tracing:
    """Chooses the sizes to trace with.

    `shared`: dimensions of equal range and size are one. Others get sizes of their own: export would take two equal
    sizes for a relation where the model compares them.
    """
    traced = list(tensors)
    dims: list[dict[int, Any] | None] = [None] * len(traced)
    chosen: dict[Hashable, tuple[int, Any]] = {}
    for item in dynamic:
        size = int(tensors[item.leaf].shape[item.dim])
        group: Hashable = (item.low, item.high, size) if shared else item
        if group not in chosen:
            traced_size = _traced_size(item, size, {used for used, _ in chosen.values()})
            chosen[group] = (traced_size, _dim(len(chosen), item))
        size, dim = chosen[group]
        traced[item.leaf] = resized(traced[item.leaf], item.dim, size)
        if dim is not None:
            dims[item.leaf] = {**(dims[item.leaf] or {}), item.dim: dim}
    return Tracing(tuple(traced), tuple(dims))


def _dim(number: int, item: DynamicDim) -> Any:
    return Dim(f"d{number}", min=item.low, max=item.high) if item.high > max(item.low, 1) else None


def _traced_size(item: DynamicDim, size: int, used: set[int]) -> int:
    low = min(max(item.low, SMALLEST_TRACED), item.high)
    nearest = min(max(size, low), item.high)
    free = [candidate for candidate in range(low, min(item.high, low + 64) + 1) if candidate not in used]
    return nearest if nearest not in used or not free else min(free, key=lambda other: abs(other - nearest))


def resized(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """The tensor cut or repeated along `dim`: its values stay valid ones, its dimensions keep their order in memory."""
    if tensor.shape[dim] == size:
        return tensor
    if tensor.shape[dim] == 0:
        raise NotExportable(f"an example of size 0 in dimension {dim} cannot be made larger; give one of size 2")
    outermost_first = sorted(range(tensor.dim()), key=lambda d: tensor.stride(d), reverse=True)
    index = torch.arange(size, device=tensor.device) % tensor.shape[dim]
    dense = tensor.index_select(dim, index).permute(outermost_first).contiguous()
    return dense.permute([outermost_first.index(d) for d in range(tensor.dim())])


def read_expression(size: int | torch.SymInt) -> int | str:
    """A size or stride as export has it: a number, a symbol, or a product of these, e.g. "64*s0".

    Raises:
        NotExportable: anything else, e.g. a size that must be twice another.
    """
    if isinstance(size, int):
        return size
    text = str(size.node.expr)
    if not re.fullmatch(r"\w+(\*\w+)*", text):
        raise NotExportable(f"a size or stride must be {text}; leave its dimension out of `dynamic`")
    return text


def read_symbol_ranges(program: ExportedProgram, symbols: set[str]) -> dict[str, tuple[int, int]]:
    """The smallest and largest size of each symbol."""
    return {
        str(symbol): (int(values.lower), int(values.upper))
        for symbol, values in program.range_constraints.items()
        if str(symbol) in symbols
    }


_EQUAL_SIZES = re.compile(r"L\['tensors'\]\[\d+\]\.size\(\)\[\d+\] == L\['tensors'\]\[\d+\]\.size\(\)\[\d+\]")


def other_relation(program: ExportedProgram) -> str | None:
    """A condition on sizes that tracing took for granted and that equal symbols and ranges do not say; None if none.

    E.g. `x.shape[0] != x.shape[1]`, where the model asks. Export keeps these in the private `_guards_code` (checked
    with torch 2.13.0), and AOTInductor checks none of them. Where that is missing, no dynamic program is trusted.
    """
    guards = getattr(program, "_guards_code", None)
    if guards is None:
        return "conditions that this version of torch does not tell"
    return next((str(guard) for guard in guards if not _EQUAL_SIZES.fullmatch(str(guard))), None)
