"""Is the compiled result the eager one? Same structure, dtypes, shapes and devices, and values within tolerance.

In float32 and up the tolerance is `torch.testing.assert_close`'s for the dtype. Below float32 those defaults reject
correct models (half-precision BERT), while the compiled result is often nearer the truth than eager's; there the
compiled error against a float64 (else float32) run may be at most twice eager's, plus tolerance.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.utils import _pytree as pytree

from bentoml_compile.config import VerifyConfig
from bentoml_compile.engines.bounds import Bound
from bentoml_compile.engines.eager import device_of, eager_callable
from bentoml_compile.shapes import ExampleInput
from bentoml_compile.words import one_line

logger = logging.getLogger("bentoml_compile")

_LOW_PRECISION = frozenset(
    dtype
    for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if (dtype := getattr(torch, name, None)) is not None
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`max_error` is the largest absolute difference of compiled to eager over all floating outputs."""

    max_error: float
    problem: str = ""  # what differs, empty if nothing does


def compare(
    eager: Any, compiled: Any, *, config: VerifyConfig, reference: Callable[[], Any] | None = None
) -> Comparison:
    """Compares two outputs of the model's method.

    `reference` computes the same output in higher precision; it is called only if an output is below float32.
    """
    expected, structure = pytree.tree_flatten(_opened(eager))
    actual, actual_structure = pytree.tree_flatten(_opened(compiled))
    if type(eager) is not type(compiled) or structure != actual_structure:
        return Comparison(float("inf"), f"output structure {actual_structure} instead of {structure}")
    truth = _truth(expected, reference)
    largest = 0.0
    for index, (want, got, exact) in enumerate(zip(expected, actual, truth, strict=True)):
        error, problem = _compare_leaf(want, got, exact, config)
        largest = max(largest, error)
        if problem:
            return Comparison(largest, f"output {index}: {problem}")
    return Comparison(largest)


def _opened(output: Any, around: tuple[int, ...] = ()) -> Any:
    """Objects that pytree does not know and that do not compare by value, as dicts of their attributes.

    Such as dataclasses (whose == asks a tensor for its truth) and transformers' caches.
    """

    def open_leaf(leaf: Any) -> Any:
        if not _is_opaque(leaf):
            return leaf
        if id(leaf) in around:
            return f"the {type(leaf).__name__} around it"
        return {name: _opened(value, (*around, id(leaf))) for name, value in vars(leaf).items()}

    return pytree.tree_map(open_leaf, output)


def _is_opaque(leaf: Any) -> bool:
    if isinstance(leaf, (torch.Tensor, type)) or callable(leaf) or not hasattr(leaf, "__dict__"):
        return False
    return dataclasses.is_dataclass(leaf) or _compares_by_identity(leaf)


def _compares_by_identity(value: Any) -> bool:
    return getattr(type(value), "__eq__", None) is getattr(object, "__eq__")  # noqa: B009


def _truth(expected: list[Any], reference: Callable[[], Any] | None) -> list[Any]:
    nothing = [None] * len(expected)
    if reference is None or not any(isinstance(x, torch.Tensor) and x.dtype in _LOW_PRECISION for x in expected):
        return nothing
    exact = reference()
    flat = pytree.tree_leaves(exact) if exact is not None else []
    return flat if len(flat) == len(expected) else nothing


def _compare_leaf(want: Any, got: Any, exact: Any, config: VerifyConfig) -> tuple[float, str]:
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        if want is got:
            return 0.0, ""
        if type(want) is not type(got):
            return float("inf"), f"a {type(got).__name__} instead of a {type(want).__name__}"
        if _compares_by_identity(want):
            return float("inf"), f"a {type(want).__name__} cannot be compared; set verify to false to serve it compiled"
        return (0.0, "") if want == got or want != want else (float("inf"), f"{got!r} instead of {want!r}")
    for what in ("dtype", "shape", "device", "layout"):
        if getattr(want, what) != getattr(got, what):
            return float("inf"), f"{what} {getattr(got, what)} instead of {getattr(want, what)}"
    if not (want.is_floating_point() or want.is_complex()):
        differ = int((want != got).sum())
        return (0.0, "") if not differ else (float("inf"), f"{differ} of {want.numel()} {want.dtype} values differ")
    error = _max_difference(got, want)
    if want.dtype in _LOW_PRECISION and isinstance(exact, torch.Tensor):
        return error, _worse_than_eager(want, got, exact, config)
    return error, _not_close(want, got, config)


def _not_close(want: torch.Tensor, got: torch.Tensor, config: VerifyConfig) -> str:
    rtol, atol = _tolerances(want.dtype, config)
    try:
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
    except AssertionError as error:
        return one_line(error)
    return ""


def _worse_than_eager(want: torch.Tensor, got: torch.Tensor, exact: torch.Tensor, config: VerifyConfig) -> str:
    rtol, atol = _tolerances(want.dtype, config)
    if not torch.equal(want.isfinite(), got.isfinite()):
        return "NaN or infinity where eager has none (or the other way round)"
    finite = exact.isfinite() & want.isfinite()
    scale = float(exact[finite].abs().max()) if bool(finite.any()) else 0.0
    eager_error, error = _max_difference(want[finite], exact[finite]), _max_difference(got[finite], exact[finite])
    allowed = 2 * eager_error + atol + rtol * scale
    if error <= allowed:
        return ""
    return f"error {error:.3g} against {exact.dtype}, allowed {allowed:.3g} (eager's own error is {eager_error:.3g})"


def _tolerances(dtype: torch.dtype, config: VerifyConfig) -> tuple[float, float]:
    rtol, atol = default_tolerances(dtype)
    return rtol if config.rtol is None else config.rtol, atol if config.atol is None else config.atol


def _max_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    if not left.numel():
        return 0.0
    wide = torch.complex128 if left.is_complex() else torch.float64
    difference = (left.to(wide) - right.to(wide)).abs()
    return float(torch.nan_to_num(difference, nan=0.0, posinf=float("inf")).max())


def varied(example: ExampleInput, bounds: Sequence[Bound], names: tuple[str, ...]) -> ExampleInput:
    """Another input of the example's signature: random values where any will do, else the example's in other places.

    Integers that index a table stay within it; other integers and booleans (masks, flags) are shuffled.
    """
    limits = {(bound.name, *bound.path): bound for bound in bounds}
    return example.with_tensors(
        names, lambda argument, path, tensor: _other_values(tensor, limits.get((argument, *path)))
    )


def _other_values(value: torch.Tensor, bound: Bound | None) -> torch.Tensor:
    try:
        return _random_values(value, bound)
    except NotImplementedError as error:  # of dtypes that torch can only hold, as float4 (2.13.0)
        logger.debug("verify: no other values of %s: %s", value.dtype, error)
        return value.detach().clone().requires_grad_(value.requires_grad)


def _random_values(value: torch.Tensor, bound: Bound | None) -> torch.Tensor:
    result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if value.is_floating_point() or value.is_complex():
        other = torch.randn(value.shape, device=value.device) * _scale(value)
        if value.dtype.itemsize == 1:  # where torch makes NaN of what is too large
            limits = torch.finfo(value.dtype)
            other = other.clamp(limits.min, limits.max)
        result.copy_(other)
    elif bound is not None:
        result.copy_(torch.randint(bound.low, bound.high + 1, value.shape, device=value.device))
    else:
        order = torch.randperm(value.numel(), device=value.device)
        result.copy_(value.reshape(-1)[order].reshape(value.shape))
    return result.requires_grad_(value.requires_grad)


def _scale(value: torch.Tensor) -> float:
    wide = value.detach().float() if value.dtype.itemsize == 1 else value.detach()  # float8 has no abs() and no max()
    largest = float(wide.abs().max()) if value.numel() else 1.0
    return largest if 0.0 < largest < float("inf") else 1.0


def in_higher_precision(model: torch.nn.Module, method: str, example: ExampleInput) -> Any:
    """The method's output from a float64 (else float32) copy of the model; None if neither fits or runs."""
    for dtype in (torch.float64, torch.float32):
        try:
            wide = copy.deepcopy(model).to(dtype)
            cast = _cast(example, dtype)
            with torch.autocast(device_type=device_of(model).type, enabled=False):
                return eager_callable(wide, method)(*cast.args, **cast.kwargs)
        except Exception as error:  # a cast that the model does not support, or no memory for the copy
            logger.debug("verify: no %s reference: %s", dtype, error)
    return None


def _cast(example: ExampleInput, dtype: torch.dtype) -> ExampleInput:
    return example.with_tensors((), lambda argument, path, x: x.to(dtype) if x.is_floating_point() else x)
