"""May calls be padded up to a prepared shape? Which output dimensions follow the inputs, and do real rows stay?

Both are found by running the model, at start-up: eager at several sizes, and eager against compiled code on a padded
input. A model whose rows mix (batch norm in training mode, a softmax over the batch, a mean over the sequence without a
mask) is found out by its values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bentoml_compile.config import VerifyConfig
from bentoml_compile.engines.bounds import in_bounds
from bentoml_compile.engines.eager import call
from bentoml_compile.engines.failures import Failure
from bentoml_compile.engines.verify import compare, in_higher_precision, varied
from bentoml_compile.padding import Cuts, Group, Padded, Padding, Sizes
from bentoml_compile.prepared import PreparedShape, Target
from bentoml_compile.ranges import size_at
from bentoml_compile.shapes import ExampleInput, by_name, describe
from bentoml_compile.words import first_line

MAX_COMBINATIONS = 16

_PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device)


def verify_padding(target: Target, shape: PreparedShape, padding: Padding, config: VerifyConfig) -> Failure | None:
    """Switches padding up to this shape on, or says why not.

    Runs the model some twenty times for each group of dimensions that grows, within `engines.eager.unchanged`. What
    serves the shape, compiled code or eager, must give for padded inputs what eager gives for the real ones.

    Returns:
        The failure, also in `padding.refused`; None if calls may be padded up to the shape, or none could be.
    """
    groups = padding.groups.get(shape, ())
    if not any(group.grows and group.size.low > 1 for group in groups):
        return None
    trial = _Trial(target, shape, padding, groups, config)
    try:
        if shape.writes_inputs:
            raise _Refused("the model writes into its inputs, and would write into a padded copy of them instead")
        cuts = trial.learn()
        trial.verify(cuts)
    except Exception as error:  # not every dtype has every operation, and memory may be short
        reason = str(error) if isinstance(error, _Refused) else f"{type(error).__name__}: {_first_line(error)}"
        padding.refuse(shape, reason)
        return Failure("padding", f"inputs are not padded up to ({shape.label}): {reason}")
    padding.allow(shape, cuts)
    return None


class _Refused(Exception):
    """Padding up to the shape would change results, or could not be undone; the message says how."""


@dataclass(frozen=True, slots=True)
class _Output:
    """What an output is made of: its structure, and the sizes of each leaf (None: no tensor)."""

    structure: pytree.TreeSpec
    sizes: tuple[torch.Size | None, ...]


@dataclass(frozen=True, slots=True)
class _Trial:
    target: Target
    shape: PreparedShape
    padding: Padding
    groups: Sequence[Group]
    config: VerifyConfig

    # which output dimensions follow

    def learn(self) -> Cuts:
        """Varies one group at a time, so that equal sizes of two groups are told apart."""
        lows = tuple(group.size.low for group in self.groups)
        whole = self._output(lows)
        slopes: dict[tuple[int, int], list[int]] = {}
        for index, group in enumerate(self.groups):
            seen = {group.size.low: whole}
            for size in _smaller(group):
                seen[size] = self._output(_replaced(lows, index, size))
            for (leaf, dim), slope in self._slopes(group, seen):
                slopes.setdefault((leaf, dim), [0] * len(self.groups))[index] = slope
        return Cuts(len(whole.sizes), tuple((leaf, dim, tuple(by)) for (leaf, dim), by in slopes.items()))

    def _output(self, sizes: Sizes) -> _Output:
        example = self._example(sizes)
        flat, structure = pytree.tree_flatten(self._eager(example))
        for leaf in flat:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise _Refused(f"its output holds a {type(leaf).__name__}, which cannot be cut back")
            if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
                raise _Refused(f"its output holds a {leaf.layout} tensor, which cannot be cut back")
        return _Output(structure, tuple(leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in flat))

    def _slopes(self, group: Group, seen: dict[int, _Output]) -> Iterator[tuple[tuple[int, int], int]]:
        """By how much each output dimension grows with the group: (leaf, dimension), slope; none where it does not."""
        low, whole = group.size.low, seen[group.size.low]
        for size, output in seen.items():
            if output.structure != whole.structure:
                raise _Refused(f"its output has another structure where {_place(group)} is {size} instead of {low}")
            for leaf, (there, here) in enumerate(zip(output.sizes, whole.sizes, strict=True)):
                if (there is None) != (here is None) or len(there or ()) != len(here or ()):
                    kinds = f"{_words(there)} where {_place(group)} is {size} and {_words(here)} where it is {low}"
                    raise _Refused(f"its output {leaf} is {kinds}")
        for leaf, here in enumerate(whole.sizes):
            for dim in range(len(here or ())):
                sizes = {size: output.sizes[leaf][dim] for size, output in seen.items()}  # type: ignore[index]
                if slope := _slope(sizes, low):
                    yield (leaf, dim), slope
                elif slope is None:
                    raise _Refused(
                        f"dimension {dim} of its output {leaf} has the sizes {list(sizes.values())} where "
                        f"{_place(group)} is {list(sizes)}: no multiple of it with an offset"
                    )

    # do real rows stay the same

    def verify(self, cuts: Cuts) -> None:
        for sizes in _points(self.groups, self._tried_elsewhere()):
            real = self._example(sizes)
            expected = self._eager(real)
            self._compare(real, expected, cuts)
            other = varied(real, self.shape.bounds or (), self.shape.names)
            for inputs in (other, _below_zero(real, self.shape)):
                try:
                    expected = call(self.target.trial, inputs.clone())
                except Exception:  # not every value of an input need make sense to a model
                    continue
                self._compare(inputs, expected, cuts)

    def _tried_elsewhere(self) -> list[set[int]]:
        """For each group the sizes that other shapes of this kind are tried at: a call of these may be padded to this
        one where it is not padded to those.
        """
        alike = [groups for groups in self.padding.groups.values() if _places(groups) == _places(self.groups)]
        return [
            {size for groups in alike for size in (groups[index].size.low, *_smaller(groups[index]))}
            for index in range(len(self.groups))
        ]

    def _compare(self, real: ExampleInput, expected: Any, cuts: Cuts) -> None:
        padded = self.padding.plan(self.shape, cuts, by_name(real.args, real.kwargs, self.shape.names))
        if padded is None:
            return
        at = f"at ({describe(real, self.shape.names)})"
        inputs = real.clone()
        filled = ExampleInput(*padded.fill(inputs.args, inputs.kwargs))
        if not in_bounds(self.shape.bounds or (), filled.args, filled.kwargs):
            raise _Refused(f"a fill value is out of the range of a table that it indexes {at}")
        if problem := self._problem(expected, self._run, filled, padded, real):
            self._judge(problem, real, expected, filled, padded, at)

    def _judge(
        self, problem: str, real: ExampleInput, expected: Any, filled: ExampleInput, padded: Padded, at: str
    ) -> None:
        """Raises, unless the difference is one of rounding, which is another for each size of a matrix product."""
        if again := compare(expected, self._eager(real), config=self.config).problem:
            words = f"eager gives another result each time ({again}); does it draw random numbers or keep state?"
            raise _Refused(words)
        if not (own := self._problem(expected, self.target.trial, filled, padded, real)):
            raise _Refused(f"compiled code differs {at}: {problem}")
        if not self._is_rounding(real, filled, padded):
            raise _Refused(f"padding changes the model's result {at}: {own}")
        if wrong := self._problem(padded.cut(self._eager(filled)), self._run, filled, padded, None):
            raise _Refused(f"compiled code differs {at}: {wrong}")

    def _is_rounding(self, real: ExampleInput, filled: ExampleInput, padded: Padded) -> bool:
        """Whether nothing differs in higher precision."""
        expected, actual = self._exact(real), self._exact(filled)
        if expected is None or actual is None:
            return False
        return not compare(expected, padded.cut(actual), config=self.config).problem

    @property
    def _run(self) -> Callable[..., Any]:
        return self.shape.run if self.shape.run is not None else self.target.trial

    def _problem(
        self, expected: Any, run: Callable[..., Any], filled: ExampleInput, padded: Padded, real: ExampleInput | None
    ) -> str:
        """What differs; `real`: what `expected` is the result of; None: the padded inputs, cut."""

        def exact() -> Any:
            result = self._exact(filled if real is None else real)
            return padded.cut(result) if real is None and result is not None else result

        try:
            return compare(expected, padded.cut(call(run, filled.clone())), config=self.config, reference=exact).problem
        except Exception as error:
            return f"{type(error).__name__}: {_first_line(error)}"

    def _exact(self, inputs: ExampleInput) -> Any:
        with torch.inference_mode():
            return in_higher_precision(self.target.model, self.target.method, inputs.clone())

    def _example(self, sizes: Sizes) -> ExampleInput:
        example = self.padding.example(self.shape, sizes)
        arguments = by_name(example.args, example.kwargs, self.shape.names)
        for group, size in zip(self.groups, sizes, strict=True):
            for place in group.size.places:
                if size_at(place, arguments) != size:
                    raise _Refused(f"{place.argument} holds tensors in a container other than dict, list or tuple")
        return example

    def _eager(self, example: ExampleInput) -> Any:
        try:
            return call(self.target.trial, example.clone())
        except Exception as error:
            given = describe(example, self.shape.names)
            raise _Refused(f"eager fails at ({given}): {type(error).__name__}: {_first_line(error)}") from error


def _smaller(group: Group) -> list[int]:
    """Sizes that are padded: one less (where a rounded half shows), a middle one, and one."""
    low = group.size.low
    return list(dict.fromkeys(size for size in (low - 1, low // 2, 1) if 1 <= size < low)) if group.grows else []


def _slope(sizes: dict[int, int], low: int) -> int | None:
    """By how much a size grows with the group's; None unless it is a line that does not fall."""
    if len(sizes) < 2:
        return 0
    slope = sizes[low] - sizes[low - 1]
    straight = all(found == sizes[low] - slope * (low - size) for size, found in sizes.items())
    return slope if straight and slope >= 0 else None


def _places(groups: Sequence[Group]) -> list[Any]:
    return [group.size.places for group in groups]


def _below_zero(example: ExampleInput, shape: PreparedShape) -> ExampleInput:
    """Integers that are neither masks nor indices, negated: below any fill value, where padding might win a maximum."""
    checked = {(bound.name, *bound.path) for bound in shape.bounds or ()}

    def other(argument: str, path: tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor:
        counts = tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.int8) and tensor.numel()
        is_mask = counts and bool(((tensor == 0) | (tensor == 1)).all())
        return -tensor.abs() - 1 if counts and not is_mask and (argument, *path) not in checked else tensor

    return example.with_tensors(shape.names, other)


def _points(groups: Sequence[Group], more: Sequence[set[int]]) -> list[Sizes]:
    """The sizes to verify at: each group alone at its smaller sizes, `more` ones too, and combinations of all."""
    lows = tuple(group.size.low for group in groups)
    highs = tuple(group.size.high for group in groups)
    points: dict[Sizes, None] = {}
    for index, group in enumerate(groups):
        smaller = {*_smaller(group), *(size for size in more[index] if size < group.size.low and group.grows)}
        for size in sorted(smaller, reverse=True):
            points[_replaced(lows, index, size)] = points[_replaced(highs, index, size)] = None
    choices = [sorted({*(_smaller(group)[:1]), *(_smaller(group)[-1:])}) or [group.size.low] for group in groups]
    if math.prod(map(len, choices)) <= MAX_COMBINATIONS:
        points.update(dict.fromkeys(itertools.product(*choices)))
    else:
        points.update(dict.fromkeys((tuple(map(min, choices)), tuple(map(max, choices)))))
    return [point for point in points if point != lows]


def _replaced(sizes: Sizes, index: int, size: int) -> Sizes:
    return (*sizes[:index], size, *sizes[index + 1 :])


def _place(group: Group) -> str:
    place = group.size.places[0]
    return f"{'.'.join(map(str, (place.argument, *place.path)))}'s dimension {place.dim}"


def _words(sizes: torch.Size | None) -> str:
    return "no tensor" if sizes is None else f"a tensor of {len(sizes)} dimensions"


def _first_line(error: BaseException) -> str:
    return first_line(error)
