"""Dynamic dimensions: from a shape's sizes to `torch.export.Dim`, and back from what export made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from bentoml_compile.engines.aot.errors import NotExportable
from bentoml_compile.engines.aot.package import Package
from bentoml_compile.ranges import FreeSize, Place, resized, sizes_to_trace
from bentoml_compile.shapes import ExampleInput


@dataclass(frozen=True, slots=True)
class Tracing:
    """What to give to torch.export: an example of sizes that can stand for a range, and what varies in its tensors."""

    example: ExampleInput
    dims: tuple[dict[int, Any] | None, ...]


def tracing_of(
    example: ExampleInput, names: tuple[str, ...], sizes: Sequence[FreeSize], tensors: Sequence[Place]
) -> Tracing:
    """Chooses the sizes to trace with, and a Dim for each size that varies.

    Args:
        tensors: of the example, in order; their `dim` does not matter.
    """
    traced = sizes_to_trace(example, names, sizes)
    order = {(tensor.argument, tensor.path): number for number, tensor in enumerate(tensors)}
    dims: list[dict[int, Any] | None] = [None] * len(tensors)
    for number, size in enumerate(sizes):
        if size.is_fixed:
            continue
        dim = Dim(f"d{number}", min=size.low, max=size.high)
        for place in size.places:
            leaf = order[place.argument, place.path]
            dims[leaf] = {**(dims[leaf] or {}), place.dim: dim}
    return Tracing(resized(example, names, zip(sizes, traced, strict=True)), tuple(dims))


def each_of_its_own(sizes: Sequence[FreeSize]) -> list[FreeSize]:
    """The same dimensions, none of them bound to another."""
    return [FreeSize(size.low, size.high, (place,)) for size in sizes for place in size.places]


def sizes_of(package: Package, sizes: Sequence[FreeSize], tensors: Sequence[Place]) -> tuple[FreeSize, ...]:
    """What varies in the package, which may bind more dimensions to each other than was asked for."""
    order = {(tensor.argument, tensor.path): number for number, tensor in enumerate(tensors)}
    found: dict[int | str, FreeSize] = {}
    for size in sizes:
        for place in size.places:
            exported = package.inputs[order[place.argument, place.path]].sizes[place.dim]
            low, high = (exported, exported) if isinstance(exported, int) else _range(package, exported, place)
            known = found.get(exported, FreeSize(low, high, ()))
            low, high = max(known.low, size.low), min(known.high, size.high)
            found[exported] = FreeSize(low, high, (*known.places, place))
    return tuple(found.values())


def _range(package: Package, symbol: str, place: Place) -> tuple[int, int]:
    if symbol not in package.ranges:
        raise NotExportable(f"{place.argument}.shape[{place.dim}] must be {symbol}; leave it out of `dynamic`")
    return package.ranges[symbol]


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
