"""The weights that a compiled library reads in place: checked here, because the library checks only their device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from bentoml_compile.engines.aot.capi import Constant, LibraryError

_SHOWN = 3  # wrong weights in an error message


@dataclass(frozen=True, slots=True)
class Layout:
    """What compiled code assumes of a tensor in memory; sizes and strides in elements."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def fits(self, other: Layout) -> bool:
        """The same elements at the same places: the stride of a dimension of one element says nothing."""
        if (self.dtype, self.sizes) != (other.dtype, other.sizes):
            return False
        pairs = zip(self.sizes, self.strides, other.strides, strict=True)
        return 0 in self.sizes or all(mine == theirs for size, mine, theirs in pairs if size > 1)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.sizes)} with strides {list(self.strides)}"


def in_place(
    constants: Sequence[Constant],
    weights: Mapping[str, torch.Tensor],
    expected: Mapping[str, Layout] | None,
    device: torch.device,
) -> list[torch.Tensor]:
    """The weight of each constant, as an alias: it shares the memory, so that changes in place are seen.

    An alias and not the weight itself, because `model.half()` and the like give a Parameter other memory, and compiled
    code would go on to read what was freed.

    Raises:
        LibraryError: names every weight (up to three) that is missing or not as the library was compiled for.
    """
    wrong = [
        f"{constant.original} {problem}"
        for constant in constants
        for problem in _problems(
            constant, weights.get(constant.original), (expected or {}).get(constant.original), device
        )
    ]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise LibraryError(f"these weights do not fit the compiled library: {'; '.join(wrong[:_SHOWN])}{more}")
    return [weights[constant.original].detach() for constant in constants]


def _problems(
    constant: Constant, weight: torch.Tensor | None, expected: Layout | None, device: torch.device
) -> Iterator[str]:
    if weight is None:
        yield "is missing"
    elif weight.layout is not torch.strided or weight.is_conj() or weight.is_neg():
        yield "is not a plain strided tensor"
    elif weight.device not in (device, torch.device("cpu")):  # a CUDA library may keep constants on the CPU
        yield f"is on {weight.device}, not on {device}"
    elif constant.dtype is not None and weight.dtype != constant.dtype:
        yield f"is {weight.dtype}, not {constant.dtype}"
    elif expected is not None and not expected.fits(layout := Layout.of(weight)):
        yield f"is {layout}, not {expected}"
