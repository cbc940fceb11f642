"""Dynamic ranges: which dimensions of a prepared shape may vary, between what sizes, and which of them together.

The config says `dynamic: {argument: {dim: [min, max]}}`; a range is then prepared instead of each size. What varies
together is one `FreeSize`. A call's sizes are checked here, once for each signature: compiled code checks none.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bentoml_compile.errors import ConfigError
from bentoml_compile.shapes import (
    ExampleInput,
    Signature,
    Words,
    by_name,
    dense_strides,
    describe,
    relaxed,
    tensor_leaves,
)

Ranges = Mapping[str, Mapping[int, tuple[int, int]]]  # of the config: argument, dimension, (smallest, largest)

MAX_CORNERS = 16
SMALLEST_TRACED = 2


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A dimension of one tensor: `path` leads to it inside of the argument."""

    argument: str
    path: tuple[Any, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class FreeSize:
    """Dimensions that have one size, from `low` to `high`; `low == high` where it is fixed."""

    low: int
    high: int
    places: tuple[Place, ...]

    @property
    def is_fixed(self) -> bool:
        return self.low == self.high

    @property
    def begins_at_one(self) -> bool:
        """A size of 1, which compilers take for a constant, is one of several."""
        return self.low == 1 < self.high

    def fixed_at(self, size: int) -> FreeSize:
        return dataclasses.replace(self, low=size, high=size)

    def from_two(self) -> FreeSize:
        return dataclasses.replace(self, low=2)

    def to_json(self) -> list[Any]:
        return [self.low, self.high, [[place.argument, list(place.path), place.dim] for place in self.places]]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> FreeSize:
        low, high, places = value
        return cls(low, high, tuple(Place(argument, tuple(path), dim) for argument, path, dim in places))


def check_dims(
    key: str,
    dims: Mapping[str, Iterable[int]],
    examples: Sequence[ExampleInput],
    names: tuple[str, ...],
    *,
    where: str,
) -> Iterator[tuple[str, int, list[torch.Tensor]]]:
    """Each argument and dimension that a key of the config names, with the examples' tensors that have it.

    Raises:
        ConfigError: an argument or a dimension that no example has.
    """
    arguments = {name for example in examples for name in by_name(example.args, example.kwargs, names)}
    for argument, numbers in dims.items():
        path = f"{where}: torch_compile.{key}.{argument}"
        if argument not in arguments:
            raise ConfigError(f"{path}: the examples have {sorted(arguments)} only")
        tensors = [tensor for example in examples for _, tensor in _tensors_of(example, argument, names)]
        for dim in numbers:
            having = [tensor for tensor in tensors if dim < tensor.dim()]
            if not having:
                most = max((tensor.dim() for tensor in tensors), default=0)
                raise ConfigError(f"{path}.{dim}: the examples' tensors have {most} dimensions")
            yield argument, dim, having


def check_ranges(ranges: Ranges, examples: Sequence[ExampleInput], names: tuple[str, ...], *, where: str) -> None:
    """Refuses ranges that no example has anything to do with.

    Raises:
        ConfigError: an argument or a dimension that no example has, or no example within the ranges.
    """
    for _ in check_dims("dynamic", ranges, examples, names, where=where):
        pass
    if ranges and not any(free_sizes(ranges, [example], names) for example in examples):
        raise ConfigError(f"{where}: torch_compile.dynamic: no example input lies within these ranges")


def free_sizes(ranges: Ranges, examples: Sequence[ExampleInput], names: tuple[str, ...]) -> tuple[FreeSize, ...]:
    """What varies in these examples of one `open_signature`; empty if nothing does or one lies outside of the ranges.

    Dimensions of one range that are equal in every example are one size.
    """
    groups: dict[tuple[tuple[int, int], tuple[int, ...]], list[Place]] = {}
    for place, (low, high) in _places(ranges, examples[0], names):
        sizes = tuple(size_at(place, by_name(example.args, example.kwargs, names)) for example in examples)
        if not all(low <= size <= high for size in sizes):
            return ()
        groups.setdefault(((low, high), sizes), []).append(place)
    return tuple(FreeSize(low, high, tuple(places)) for ((low, high), _), places in groups.items())


def _places(ranges: Ranges, example: ExampleInput, names: tuple[str, ...]) -> Iterator[tuple[Place, tuple[int, int]]]:
    for argument, dims in ranges.items():
        for path, tensor in _tensors_of(example, argument, names):
            for dim, bounds in sorted(dims.items()):
                if dim < tensor.dim():
                    yield Place(argument, path, dim), bounds


def _tensors_of(
    example: ExampleInput, argument: str, names: tuple[str, ...]
) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    return tensor_leaves(by_name(example.args, example.kwargs, names).get(argument))


def size_at(place: Place, arguments: Mapping[str, Any]) -> int:
    """The size that a call's arguments, by name, have there."""
    return int(tensor_at(place, arguments).shape[place.dim])


def tensor_at(place: Place, arguments: Mapping[str, Any]) -> torch.Tensor:
    value = arguments[place.argument]
    for key in place.path:
        value = value[key]
    return value  # type: ignore[no-any-return]


def label(example: ExampleInput, names: tuple[str, ...], sizes: Iterable[FreeSize]) -> str:
    """The same for workers of one machine, each with a GPU of its own: "input_ids: int64[1..64, 8..512] on cuda"."""
    words = {
        (place.argument, place.path, place.dim): str(size.low) if size.is_fixed else f"{size.low}..{size.high}"
        for size in sizes
        for place in size.places
    }
    return describe(example, names, Words(words, operator.attrgetter("type")))


# finding the range of a call


def open_signature(signature: Signature, ranges: Ranges) -> Signature:
    """The signature without the sizes that may vary, and without what `shapes.fitted` can put right."""
    return frozenset((name, _opened(leaf, ranges.get(name))) for name, leaf in relaxed(signature))


def _opened(leaf: Any, dims: Mapping[int, Any] | None) -> Any:
    if not dims or not isinstance(leaf, tuple):
        return leaf
    if leaf and isinstance(leaf[0], type) and issubclass(leaf[0], torch.Tensor):
        kind, dtype, sizes, device = leaf
        return (kind, dtype, tuple(None if dim in dims else size for dim, size in enumerate(sizes)), device)
    return tuple(_opened(item, dims) for item in leaf)


def holds(sizes: Iterable[FreeSize], arguments: Mapping[str, Any]) -> bool:
    """Whether arguments of the same `open_signature` have sizes of the range, equal where they must be."""
    for size in sizes:
        given = {size_at(place, arguments) for place in size.places}
        if len(given) > 1 or not size.low <= min(given) <= size.high:
            return False
    return True


def width(sizes: Iterable[FreeSize]) -> int:
    """How many combinations of sizes the range holds: the narrowest comes first."""
    return math.prod(size.high - size.low + 1 for size in sizes)


# examples of other sizes


def resized(example: ExampleInput, names: tuple[str, ...], to: Iterable[tuple[FreeSize, int]]) -> ExampleInput:
    """The example with these sizes: its values cut off or repeated, so that they stay valid ones.

    Tensors of which a dimension may vary become dense, with their dimensions in the same order in memory.
    """
    wanted: dict[tuple[str, tuple[Any, ...]], list[tuple[int, int]]] = {}
    for free, size in to:
        for place in free.places:
            wanted.setdefault((place.argument, place.path), []).append((place.dim, size))

    def other(argument: str, path: tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor:
        dims = wanted.get((argument, path), ())
        for dim, size in dims:
            tensor = with_size(tensor, dim, size)
        return dense(tensor) if dims else tensor

    return example.with_tensors(names, other)


def with_size(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """The tensor cut or repeated along `dim`, dense, with its dimensions in the same order in memory."""
    if tensor.shape[dim] == size:
        return tensor
    index = torch.arange(size, device=tensor.device) % tensor.shape[dim]
    return dense(tensor.detach().index_select(dim, index), like=tensor)


def dense(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """The same values without gaps or overlaps, in the memory order of `like`'s dimensions (its own)."""
    strides = dense_strides(tensor.shape, tensor if like is None else like)
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def sizes_to_trace(example: ExampleInput, names: tuple[str, ...], sizes: Sequence[FreeSize]) -> list[int]:
    """For each size one that stands for its range: near the example's, at least 2, and another than the others have.

    A compiler takes a size of 0 or 1 for a constant, and two equal sizes for a relation between dimensions.
    """
    arguments = by_name(example.args, example.kwargs, names)
    chosen: list[int] = []
    for size in sizes:
        low = min(max(size.low, SMALLEST_TRACED), size.high)
        nearest = min(max(size_at(size.places[0], arguments), low), size.high)
        free = [other for other in range(low, min(size.high, low + 64) + 1) if other not in chosen]
        if nearest in chosen and free:
            nearest = _nearest(free, nearest)
        chosen.append(nearest)
    return chosen


def _nearest(candidates: Iterable[int], size: int) -> int:
    return min(candidates, key=lambda other: abs(other - size))


def corners(example: ExampleInput, names: tuple[str, ...], sizes: Sequence[FreeSize]) -> list[ExampleInput]:
    """The example at the ends of its ranges: every combination, or the outermost ones where these would be too many."""
    ends = [dict.fromkeys((size.low, size.high)) for size in sizes]
    if math.prod(map(len, ends)) <= MAX_CORNERS:
        points: Iterable[tuple[int, ...]] = itertools.product(*ends)
    else:
        low, high = tuple(size.low for size in sizes), tuple(size.high for size in sizes)
        points = dict.fromkeys((low, high, *_one_changed(low, high), *_one_changed(high, low)))
    return [resized(example, names, zip(sizes, point, strict=True)) for point in points]


def _one_changed(point: tuple[int, ...], other: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for index, value in enumerate(other):
        yield (*point[:index], value, *point[index + 1 :])
