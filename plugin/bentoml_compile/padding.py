"""Padding: a call of sizes that were not prepared runs at the next prepared ones, and its outputs are cut back.

The config says `pad: {argument: {dim: rule}}`. The rule is "repeat" (the last row again: for batches) or a number (a
fill value: for sequences; 0 for their masks). Dimensions that are equal in every prepared shape grow together. Which
prepared shapes may be padded up to is found out at start-up, by `padding_trial.verify_padding`.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bentoml_compile.errors import ConfigError
from bentoml_compile.prepared import PreparedShape
from bentoml_compile.ranges import FreeSize, Place, check_dims, dense, open_signature, resized, size_at, tensor_at
from bentoml_compile.shapes import ExampleInput, Signature, by_name, fitted, tensor_leaves, with_tensors

Rule = str | int | float  # "repeat" or a fill value
Pad = Mapping[str, Mapping[int, Rule]]  # of the config: argument, dimension, rule
Sizes = tuple[int, ...]  # one for each group of a shape

_REMEMBERED = 1024  # signatures


@dataclass(frozen=True, slots=True)
class Group:
    """Dimensions that have one size in every call: what the shape takes there, and whether a smaller one is padded."""

    size: FreeSize
    grows: bool


@dataclass(frozen=True, slots=True)
class Cuts:
    """How a shape's outputs follow its inputs.

    Attributes:
        leaves: how many leaves the output has, as torch.utils._pytree counts them.
        slopes: (leaf, dimension, by how much it grows with each group of the shape growing by one).
    """

    leaves: int
    slopes: tuple[tuple[int, int, Sizes], ...]

    def at(self, growth: Sizes) -> tuple[tuple[int, int, int], ...]:
        """(leaf, dimension, by how much it is too long) where the groups have grown by `growth`."""
        long = ((leaf, dim, sum(map(int.__mul__, slopes, growth))) for leaf, dim, slopes in self.slopes)
        return tuple(cut for cut in long if cut[2])

    def to_json(self) -> list[Any]:
        return [self.leaves, [[leaf, dim, list(slopes)] for leaf, dim, slopes in self.slopes]]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Cuts:
        count, slopes = value
        return cls(count, tuple((leaf, dim, tuple(by_group)) for leaf, dim, by_group in slopes))


@dataclass(frozen=True, slots=True)
class Padded:
    """How calls of one signature run at a larger prepared shape; keeps no tensor of a call.

    Attributes:
        shape: the prepared shape whose code runs.
        added: elements that are no data, over all tensors that `pad` names.
        waste: their share of these tensors' elements, 0 to 1.
    """

    shape: PreparedShape
    added: int
    waste: float
    _steps: Mapping[tuple[str, tuple[Any, ...]], tuple[Callable[[torch.Tensor], torch.Tensor], ...]]
    _leaves: int
    _cuts: tuple[tuple[int, int, int], ...]

    def fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments at the shape's sizes, as ordinary tensors in the example's order in memory.

        One torch operation for each tensor and rule that it grows by. The given tensors are not changed.
        """
        names = self.shape.names
        with torch.no_grad():  # what is an inference tensor, `fitted` makes an ordinary one
            filled_args, filled_kwargs = with_tensors(args, kwargs, names, self._fill)
        return fitted(self.shape.example, names, filled_args, filled_kwargs)

    def _fill(self, argument: str, path: tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor:
        for step in self._steps.get((argument, path), ()):
            tensor = step(tensor)
        return tensor

    def run(self, code: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call's result by the shape's code."""
        filled_args, filled_kwargs = self.fill(args, kwargs)
        return self.cut(code(*filled_args, **filled_kwargs))

    def cut(self, output: Any) -> Any:
        """The output as the real sizes give it.

        A batch cut short is a view, since it lies in memory as eager's result would: no time and no memory is spent on
        it. A tensor cut along an inner dimension would have gaps, which eager's has not and `view()` refuses: it is a
        dense copy.

        Raises:
            RuntimeError: the output has other leaves than at start-up.
        """
        if not self._cuts:
            return output
        flat, structure = pytree.tree_flatten(output)
        if len(flat) != self._leaves:
            raise RuntimeError(f"{len(flat)} output leaves instead of {self._leaves}, so padding cannot be cut off")
        for leaf, dim, long in self._cuts:
            flat[leaf] = flat[leaf].narrow(dim, 0, flat[leaf].shape[dim] - long)
        for leaf in {leaf for leaf, _, _ in self._cuts}:
            flat[leaf] = dense(flat[leaf])
        return pytree.tree_unflatten(flat, structure)


class Padding:
    """Finds the prepared shape that a call can be padded up to; only those that `allow` named.

    Attributes:
        groups: of each shape, what grows together.
        refused: why a shape is not padded up to.
    """

    def __init__(self, pad: Pad, shapes: Sequence[PreparedShape], names: tuple[str, ...]) -> None:
        self._pad = pad
        self._names = names
        self._opened = _opened(pad, shapes)
        self._alike: dict[Signature, list[PreparedShape]] = {}
        self._allowed: dict[PreparedShape, Cuts] = {}
        self._found: dict[Signature, tuple[Padded | None]] = {}
        self.groups: dict[PreparedShape, tuple[Group, ...]] = {}
        self.refused: dict[PreparedShape, str] = {}
        for shape in shapes:
            if (signature := shape.signature) is not None:
                self._alike.setdefault(open_signature(signature, self._opened), []).append(shape)
        for alike in self._alike.values():
            self.groups.update(_groups(alike, pad, self._opened))

    def allow(self, shape: PreparedShape, cuts: Cuts) -> None:
        """Calls may be padded up to this shape from here on."""
        self.refused.pop(shape, None)
        self._allowed[shape] = cuts
        self._found.clear()

    def refuse(self, shape: PreparedShape, reason: str) -> None:
        self._allowed.pop(shape, None)
        self.refused[shape] = reason
        self._found.clear()

    def of_shapes(self, replaced: Mapping[PreparedShape, PreparedShape]) -> Padding:
        """The same for shapes that stand in the place of these."""
        made = copy.copy(self)
        made._found = {}
        made._alike = {key: [replaced.get(shape, shape) for shape in alike] for key, alike in self._alike.items()}
        made._allowed = {replaced.get(shape, shape): cuts for shape, cuts in self._allowed.items()}
        made.groups = {replaced.get(shape, shape): groups for shape, groups in self.groups.items()}
        made.refused = {replaced.get(shape, shape): reason for shape, reason in self.refused.items()}
        return made

    def find(self, signature: Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Padded | None:
        """For a call of a signature that was not prepared: the shape that adds the fewest elements, or None."""
        if signature is None:
            return None
        found = self._found.get(signature)
        if found is None:
            found = (self._search(signature, by_name(args, kwargs, self._names)),)
            if len(self._found) >= _REMEMBERED:
                self._found.clear()
            self._found[signature] = found
        return found[0]

    def _search(self, signature: Signature, arguments: Mapping[str, Any]) -> Padded | None:
        alike = self._alike.get(open_signature(signature, self._opened), ())
        plans = (self.plan(shape, self._allowed[shape], arguments) for shape in alike if shape in self._allowed)
        return min((plan for plan in plans if plan is not None), key=lambda plan: plan.added, default=None)

    def plan(self, shape: PreparedShape, cuts: Cuts, arguments: Mapping[str, Any]) -> Padded | None:
        """How arguments of the shape's open signature are padded up to it; None if they cannot be, or need not."""
        growth = _growth(shape, self.groups[shape], arguments)
        if growth is None or not any(growth):
            return None
        by_tensor = self._by_tensor(self.groups[shape], growth)
        steps, real, padded = {}, 0, 0
        for (argument, path), grown in by_tensor.items():
            tensor = tensor_at(Place(argument, path, 0), arguments)
            steps[argument, path] = _steps(tensor, {dim: (by, self._pad[argument][dim]) for dim, by in grown.items()})
            real += tensor.numel()
            padded += math.prod(size + grown.get(dim, 0) for dim, size in enumerate(tensor.shape))
        added = padded - real
        return Padded(shape, added, added / padded if padded else 0.0, steps, cuts.leaves, cuts.at(growth))

    def _by_tensor(self, groups: Sequence[Group], growth: Sizes) -> dict[tuple[str, tuple[Any, ...]], dict[int, int]]:
        grown: dict[tuple[str, tuple[Any, ...]], dict[int, int]] = {}
        for group, by in zip(groups, growth, strict=True):
            for place in group.size.places if group.grows else ():
                grown.setdefault((place.argument, place.path), {})[place.dim] = by
        return grown

    def example(self, shape: PreparedShape, sizes: Sizes) -> ExampleInput:
        """The shape's example at other sizes of its groups."""
        to = [(group.size, size) for group, size in zip(self.groups[shape], sizes, strict=True)]
        return resized(shape.example, shape.names, to)

    # what an artifact keeps, so that a warm boot need not find it out again

    def decision(self, shape: PreparedShape) -> dict[str, Any]:
        """What was found out about the shape, in plain JSON types; `pad` tells a later boot that it still holds."""
        cuts = self._allowed.get(shape)
        return {
            "pad": self._pad_as_json(),
            "cuts": cuts.to_json() if cuts is not None else None,
            "refused": self.refused.get(shape),
        }

    def decide_as(self, shape: PreparedShape, decision: Mapping[str, Any]) -> bool:
        """Takes over what an earlier boot found out; False if it was about another `pad`."""
        if decision["pad"] != self._pad_as_json():
            return False
        if decision["cuts"] is not None:
            self.allow(shape, Cuts.from_json(decision["cuts"]))
        elif decision["refused"] is not None:
            self.refuse(shape, decision["refused"])
        return True

    def _pad_as_json(self) -> dict[str, dict[str, Rule]]:
        return {name: {str(dim): rule for dim, rule in dims.items()} for name, dims in self._pad.items()}


def check_pad(pad: Pad, examples: Sequence[ExampleInput], names: tuple[str, ...], *, where: str) -> None:
    """Refuses a `pad` that the examples have nothing to do with; before anything is compiled.

    Raises:
        ConfigError: an argument or a dimension that no example has, or a rule that a tensor's dtype cannot hold.
    """
    for argument, dim, tensors in check_dims("pad", pad, examples, names, where=where):
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            _check_rule(pad[argument][dim], dtype, f"{where}: torch_compile.pad.{argument}.{dim}")


def _check_rule(rule: Rule, dtype: torch.dtype, path: str) -> None:
    if rule == "repeat":
        return
    if isinstance(rule, str):
        raise ConfigError(f'{path}: {rule!r} is not allowed; allowed: "repeat", a number to fill with')
    if not _can_hold(dtype, rule):
        raise ConfigError(f"{path}: {rule!r} is not a value of {dtype}; give one that this dtype can hold")


def _can_hold(dtype: torch.dtype, value: float) -> bool:
    """Whether a tensor can be filled with it: exactly, but for the rounding of a fraction to a floating dtype."""
    if dtype is torch.bool:
        return value in (0, 1)
    if not (dtype.is_floating_point or dtype.is_complex):
        info = torch.iinfo(dtype)
        return math.isfinite(value) and value == int(value) and info.min <= value <= info.max
    cast = torch.tensor(float(value), dtype=torch.float64).to(dtype.to_real()).double().item()
    if isinstance(value, int):
        return cast == value
    return math.isnan(cast) == math.isnan(value) and math.isinf(cast) == math.isinf(value) and (not cast) == (not value)


def _opened(pad: Pad, shapes: Sequence[PreparedShape]) -> dict[str, dict[int, tuple[int, int]]]:
    """Every dimension of which the size is not part of the look-up: it is padded, or it varies in some shape."""
    anything = (0, 0)  # the look-up reads the dimensions only
    opened = {argument: dict.fromkeys(dims, anything) for argument, dims in pad.items()}
    for shape in shapes:
        for size in shape.sizes:
            for place in size.places:
                opened.setdefault(place.argument, {})[place.dim] = anything
    return opened


def _groups(
    alike: Sequence[PreparedShape], pad: Pad, opened: Mapping[str, Mapping[int, Any]]
) -> dict[PreparedShape, tuple[Group, ...]]:
    """Of each shape; places are one group if all of these shapes have one size, or one range, in them."""
    sizes = [_sizes(shape, opened) for shape in alike]
    together: dict[Hashable, list[Place]] = {}
    for place in sizes[0]:
        rule = pad.get(place.argument, {}).get(place.dim)
        key = (type(rule) is str, rule is not None, tuple(of_shape[place] for of_shape in sizes))
        together.setdefault(key, []).append(place)
    return {
        shape: tuple(
            Group(FreeSize(of_shape[places[0]][1], of_shape[places[0]][2], tuple(places)), places[0].dim in grows)
            for places in together.values()
            for grows in [pad.get(places[0].argument, {})]
        )
        for shape, of_shape in zip(alike, sizes, strict=True)
    }


def _sizes(shape: PreparedShape, opened: Mapping[str, Mapping[int, Any]]) -> dict[Place, tuple[int, int, int]]:
    """(which range of the shape, or -1; smallest; largest) at each opened dimension."""
    varying = {place: (index, size.low, size.high) for index, size in enumerate(shape.sizes) for place in size.places}
    arguments = by_name(shape.example.args, shape.example.kwargs, shape.names)
    found: dict[Place, tuple[int, int, int]] = {}
    for argument in sorted(opened.keys() & arguments.keys()):
        for path, tensor in tensor_leaves(arguments[argument]):
            for dim in sorted(dim for dim in opened[argument] if dim < tensor.dim()):
                place, size = Place(argument, path, dim), tensor.shape[dim]
                found[place] = varying.get(place, (-1, size, size))
    return found


def _growth(shape: PreparedShape, groups: Sequence[Group], arguments: Mapping[str, Any]) -> Sizes | None:
    """By how much each group must grow for the call to be one of the shape's; None if growing does not make it one."""
    growth: list[int] = []
    targets: dict[Place, int] = {}
    for group in groups:
        given = {size_at(place, arguments) for place in group.size.places}
        size = given.pop()
        if given or size < 1 or size > group.size.high or (size < group.size.low and not group.grows):
            return None
        growth.append(max(group.size.low - size, 0))
        targets |= dict.fromkeys(group.size.places, size + growth[-1])
    # a range may hold dimensions that `pad` does not name, which then are a group of their own
    apart = any(len({targets[place] for place in size.places}) > 1 for size in shape.sizes)
    return None if apart else tuple(growth)


def _steps(
    tensor: torch.Tensor, grown: Mapping[int, tuple[int, Rule]]
) -> tuple[Callable[[torch.Tensor], torch.Tensor], ...]:
    """The operations that make a tensor of these sizes grow; `grown` says by how much and how, for each dimension."""
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
    ends: dict[int | float, list[int]] = {}  # of each fill value: as constant_pad_nd has them, from the last dimension
    for dim, (by, rule) in grown.items():
        size = tensor.shape[dim]
        if by and isinstance(rule, str):
            index = torch.arange(size + by, device=tensor.device).clamp_(max=size - 1)
            steps.append(functools.partial(torch.index_select, dim=dim, index=index))
        elif by and not isinstance(rule, str):
            ends.setdefault(rule, [0] * (2 * tensor.dim()))[2 * (tensor.dim() - 1 - dim) + 1] = by
    return (*steps, *(functools.partial(torch.constant_pad_nd, pad=pad, value=value) for value, pad in ends.items()))
