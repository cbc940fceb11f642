"""Input signatures: what makes two calls the same to a compiled model.

A prepared shape is the signature of one example input. A signature covers everything that compiled code depends on:
argument names and structure, and for each tensor its class, dtype, sizes, strides, device, requires_grad and whether
it is an inference tensor; for anything else its type and value. It is built on every call, so this is plain code on
tuples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from bentoml_compile.errors import ConfigError

Signature = frozenset[tuple[str, Hashable]]

_CONSTANTS = (int, bool, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class ExampleInput:
    """One entry of `example_inputs`, as it is passed to the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def clone(self) -> ExampleInput:
        """A deep copy of the tensors, so that a model that writes into its inputs cannot change the example."""
        return ExampleInput(_clone(self.args), _clone(self.kwargs))

    def equals(self, other: ExampleInput) -> bool:
        """Whether all tensors of the other, of the same structure, have the same values (NaN equals NaN)."""
        mine, theirs = leaves((self.args, self.kwargs)), leaves((other.args, other.kwargs))
        return all(
            torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
            for (_, left), (_, right) in zip(mine, theirs, strict=True)
            if isinstance(left, torch.Tensor)
        )


def read_example_inputs(example_inputs: Any, *, model: str) -> list[ExampleInput]:
    """Checks what the user gave: a non-empty list of dicts (keyword arguments) or tuples (positional ones).

    Raises:
        ConfigError: names the model, the entry and what is allowed.
    """
    if not isinstance(example_inputs, Sequence) or isinstance(example_inputs, (str, bytes)) or not example_inputs:
        raise ConfigError(
            f"compile_model(name={model!r}): example_inputs must be a list with at least one entry (a dict of keyword "
            f"arguments or a tuple of positional ones), not {type(example_inputs).__name__}"
        )
    return [_read_example(entry, index, model) for index, entry in enumerate(example_inputs)]


def _read_example(entry: Any, index: int, model: str) -> ExampleInput:
    if isinstance(entry, tuple):
        example = ExampleInput(entry, {})
    elif isinstance(entry, Mapping):  # transformers' BatchEncoding is a Mapping, but not a dict
        example = ExampleInput((), dict(entry))
    else:
        raise ConfigError(
            f"compile_model(name={model!r}): example_inputs[{index}] must be a dict of keyword arguments or a tuple of "
            f"positional ones, not {type(entry).__name__}"
        )
    if not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves((example.args, example.kwargs))):
        raise ConfigError(f"compile_model(name={model!r}): example_inputs[{index}] holds no tensor")
    return example


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional parameters, so that f(x) and f(input=x) have one signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in positional)


def signature_of(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature | None:
    """The call's signature, or None where it has none (an argument that cannot be compared by value)."""
    try:
        items = [(name, _leaf(value)) for name, value in kwargs.items()]
        if args:
            items += [(_name(names, index), _leaf(value)) for index, value in enumerate(args)]
        signature = frozenset(items)
        # an argument that comes twice, by position and by name, is a TypeError for the model to raise
        return signature if len(signature) == len(items) else None
    except (_NoSignature, RecursionError):  # a container may hold itself
        return None


def relaxed(signature: Signature) -> Signature:
    """The signature without what `fitted` can put right: strides, requires_grad, inference tensors and Parameters."""
    return frozenset((name, _relaxed(leaf)) for name, leaf in signature)


def _relaxed(leaf: Any) -> Hashable:
    if not isinstance(leaf, tuple):
        return leaf  # type: ignore[no-any-return]
    if leaf and isinstance(leaf[0], type) and issubclass(leaf[0], torch.Tensor):
        kind, dtype, sizes, _, device, _ = leaf
        return (torch.Tensor if kind is torch.nn.Parameter else kind, dtype, sizes, device)
    return tuple(map(_relaxed, leaf))


def fitted(
    example: ExampleInput, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same values as ordinary tensors with the example's strides; a copy only where the strides need it.

    Both must have one relaxed signature, and the example no inference tensors.
    """
    wanted = _by_name(example.args, example.kwargs, names)
    return (
        tuple(_fit(value, wanted[_name(names, index)]) for index, value in enumerate(args)),
        {name: _fit(value, wanted[name]) for name, value in kwargs.items()},
    )


def _fit(value: Any, wanted: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.is_inference():
            with torch.inference_mode(False):
                value = from_dlpack(value)  # the same memory as an ordinary tensor
        if value.stride() == wanted.stride():
            return value
        return torch.empty_strided(wanted.shape, wanted.stride(), dtype=value.dtype, device=value.device).copy_(value)
    if isinstance(value, dict):
        return {key: _fit(item, wanted[key]) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_fit, value, wanted))
    return value


def _by_name(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {**kwargs, **{_name(names, index): value for index, value in enumerate(args)}}


def _name(names: tuple[str, ...], index: int) -> str:
    return names[index] if index < len(names) else f"*{index}"


class _NoSignature(Exception):
    """An argument is neither a strided tensor nor a plain value nor a container of them."""


def _leaf(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_neg() or value.is_conj():  # lazy: the memory differs
            raise _NoSignature
        # Dynamo's guards tell inference tensors from others, by their dispatch keys
        state = (value.requires_grad, value.is_inference())
        return (type(value), value.dtype, value.shape, value.stride(), value.device, state)
    kind = type(value)
    if kind is float:
        return (kind, value.hex())  # 0.0 equals -0.0 and NaN not itself
    if kind in _CONSTANTS:
        return (kind, value)
    if kind is dict or isinstance(value, Mapping):
        return (kind, tuple((key, _leaf(value[key])) for key in value))
    if kind is list or kind is tuple:
        return (kind, tuple(map(_leaf, value)))
    raise _NoSignature


def describe(example: ExampleInput, names: tuple[str, ...]) -> str:
    """The signature for people: "attention_mask: int64[2, 12], input_ids: int64[2, 12]"; strides only if unusual."""
    named = _by_name(example.args, example.kwargs, names)
    return ", ".join(f"{name}: {_describe(named[name])}" for name in sorted(named))


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if value.layout is torch.strided and not value.is_contiguous():
            text += f" strides {list(value.stride())}"
        return text if value.device.type == "cpu" else f"{text} on {value.device}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(_describe, value)) + ")"
    return repr(value)


def batch_size_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Size of the first dimension of the first tensor; 1 for a call without one."""
    for _, leaf in leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return int(leaf.shape[0])
    return 1


Path = tuple[Any, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each leaf of nested dicts, lists and tuples, with the keys and indices that lead to it."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        with torch.inference_mode(False):
            return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _clone(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_clone, value))
    return value
