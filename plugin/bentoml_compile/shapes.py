"""Input signatures: what makes two calls the same to a compiled model.

A prepared shape is the signature of one example input. A signature covers everything that compiled code depends on:
argument names and structure, and for each tensor its class, dtype, sizes, strides, device, requires_grad and whether
it is an inference tensor; for anything else its type and value. It is built on every call, so this is plain code on
tuples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from bentoml_compile.containers import holds_more, items_of, rebuilt
from bentoml_compile.errors import ConfigError

Signature = frozenset[tuple[str, Hashable]]

Path = tuple[Any, ...]
Change = Callable[[str, Path, torch.Tensor], torch.Tensor]  # of (argument, path inside of it, tensor)

_CONSTANTS = (int, bool, float, str, type(None), torch.dtype, torch.device)
_INTEGERS = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
# those that tensors can be copied, filled and compared in; the others are quantized or parts of a byte
_DTYPES = frozenset(
    dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex or name in _INTEGERS)
)
_SUPPORTED = (
    "an argument may be a plain tensor, a number, a text, None, a torch.dtype or torch.device, or a list, tuple, "
    "NamedTuple, dict or other MutableMapping of these"
)


@dataclass(frozen=True, slots=True)
class ExampleInput:
    """One entry of `example_inputs`, as it is passed to the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def clone(self) -> ExampleInput:
        """A deep copy of the tensors, so that a model that writes into its inputs cannot change the example."""
        return self.with_tensors((), lambda argument, path, tensor: _clone(tensor))

    def without_values(self) -> ExampleInput:
        """Tensors of the same sizes and strides, of no values."""
        return self.with_tensors((), lambda argument, path, tensor: _emptied(tensor))

    def with_tensors(self, names: tuple[str, ...], change: Change) -> ExampleInput:
        """With what `change` makes of each tensor."""
        return ExampleInput(*with_tensors(self.args, self.kwargs, names, change))

    def equals(self, other: ExampleInput) -> bool:
        """Whether the other has the same signature, and all its tensors the same values (NaN equals NaN)."""
        if signature_of((), self.args, self.kwargs) != signature_of((), other.args, other.kwargs):
            return False
        mine, theirs = tensor_leaves((self.args, self.kwargs)), tensor_leaves((other.args, other.kwargs))
        return all(
            torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
            for (_, left), (_, right) in zip(mine, theirs, strict=True)
        )


def read_example_inputs(example_inputs: Any, *, model: str) -> list[ExampleInput]:
    """Checks and copies what the user gave: a non-empty list of dicts (keyword arguments) or tuples (positional ones).

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
    where = f"compile_model(name={model!r}): example_inputs[{index}]"
    if isinstance(entry, tuple):
        example = ExampleInput(entry, {})
    elif isinstance(entry, Mapping):  # transformers' BatchEncoding is a Mapping, but not a dict
        example = ExampleInput((), dict(entry))
    else:
        raise ConfigError(
            f"{where} must be a dict of keyword arguments or a tuple of positional ones, not {type(entry).__name__}"
        )
    for name, value in by_name(example.args, example.kwargs, ()).items():
        if problem := _why_no_signature(value):
            raise ConfigError(f"{where}: no code can be prepared for argument {name!r}: {problem}; {_SUPPORTED}")
    if not any(True for _ in tensor_leaves((example.args, example.kwargs))):
        raise ConfigError(f"{where} holds no tensor")
    return _copied(example, where)


def _copied(example: ExampleInput, where: str) -> ExampleInput:
    try:
        copied = example.clone()
    except Exception as error:
        raise ConfigError(f"{where} cannot be copied: {type(error).__name__}: {error}; {_SUPPORTED}") from error
    before, after = (signature_of((), one.args, one.kwargs) for one in (example, copied))
    if before is None or after is None or relaxed(before) != relaxed(after):
        raise ConfigError(f"{where} is something else when it is copied: {describe(copied, ())}; {_SUPPORTED}")
    return copied


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
            items += [(argument_name(names, index), _leaf(value)) for index, value in enumerate(args)]
        signature = frozenset(items)
        # an argument that comes twice, by position and by name, is a TypeError for the model to raise
        return signature if len(signature) == len(items) else None
    except Exception:  # besides _NoSignature: a container may hold itself, and an argument's own code may fail
        return None


def _why_no_signature(value: Any) -> str:
    """Empty where an argument has one."""
    try:
        _leaf(value)
    except RecursionError:
        return "a container that holds itself, or too many in each other"
    except _NoSignature as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


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

    Both must be one signature but for what this puts right, and for sizes: a tensor of other sizes gets the strides of
    a dense one, with its dimensions in the example's order. The example has no inference tensors.
    """
    wanted = by_name(example.args, example.kwargs, names)
    return (
        tuple(_fit(value, wanted[argument_name(names, index)]) for index, value in enumerate(args)),
        {name: _fit(value, wanted[name]) for name, value in kwargs.items()},
    )


def fits(
    example: ExampleInput, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], *, plainly: bool
) -> bool:
    """Whether `fitted` would make no copy. `plainly`: nor change anything that Dynamo's guards see, but for sizes."""
    wanted, given = by_name(example.args, example.kwargs, names), by_name(args, kwargs, names)
    return all(_fits(value, wanted[name], plainly) for name, value in given.items())


def _fits(value: Any, wanted: Any, plainly: bool) -> bool:
    if isinstance(value, torch.Tensor):
        if plainly and (value.requires_grad or value.is_inference() or type(value) is not type(wanted)):
            return False
        return value.stride() == _strides(value, wanted)
    items = items_of(value)
    return items is None or all(_fits(item, other, plainly) for item, other in _paired(items, wanted))


def _paired(items: Iterable[tuple[Any, Any]], wanted: Any) -> Iterator[tuple[Any, Any]]:
    """Each item with the one in its place in a container of the same signature."""
    return ((item, other) for (_, item), (_, other) in zip(items, items_of(wanted) or (), strict=True))


def _strides(value: torch.Tensor, wanted: torch.Tensor) -> tuple[int, ...]:
    return wanted.stride() if value.shape == wanted.shape else dense_strides(value.shape, wanted)


def _fit(value: Any, wanted: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.is_inference():
            with torch.inference_mode(False):
                value = from_dlpack(value)  # the same memory as an ordinary tensor
        if value.stride() == (strides := _strides(value, wanted)):
            return value
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
    items = items_of(value)
    return value if items is None else rebuilt(value, (_fit(item, other) for item, other in _paired(items, wanted)))


def dense_strides(sizes: Sequence[int], like: torch.Tensor) -> tuple[int, ...]:
    """Strides, in elements, of a dense tensor of these sizes whose dimensions lie in memory as those of `like`."""
    strides, step = [0] * len(sizes), 1
    for dim in sorted(range(len(sizes)), key=lambda dim: (like.stride(dim), -dim)):
        strides[dim], step = step, step * max(sizes[dim], 1)
    return tuple(strides)


def by_name(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The call's arguments by name, also those that were passed by position."""
    return {**kwargs, **{argument_name(names, index): value for index, value in enumerate(args)}}


def argument_name(names: tuple[str, ...], index: int) -> str:
    """Of a positional argument; "*2" for one that the method's signature does not name."""
    return names[index] if index < len(names) else f"*{index}"


class _NoSignature(Exception):
    """An argument is neither a plain tensor nor a plain value nor a container of them; the message says what it is."""


def _leaf(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.dtype not in _DTYPES or value.is_neg() or value.is_conj():
            raise _NoSignature(_unlike_others(value))
        # Dynamo's guards tell inference tensors from others, by their dispatch keys
        state = (value.requires_grad, value.is_inference())
        try:
            return (type(value), value.dtype, value.shape, value.stride(), value.device, state)
        except RuntimeError:
            raise _NoSignature(_unlike_others(value)) from None
    kind = type(value)
    if kind is float:
        return (kind, value.hex())  # 0.0 equals -0.0 and NaN not itself
    if kind in _CONSTANTS:
        return (kind, value)
    if kind is list or kind is tuple:
        return (kind, tuple(map(_leaf, value)))
    items = items_of(value)
    if items is None:
        raise _NoSignature(f"a {kind.__qualname__}")
    if holds_more(value):
        raise _NoSignature(f"a {kind.__qualname__} that has attributes beside its items")
    return (kind, tuple((key, _leaf(item)) for key, item in items))


def _unlike_others(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "a nested tensor"  # which has no sizes
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.dtype not in _DTYPES:
        return f"a tensor of {tensor.dtype}"
    return "a lazily conjugated or negated tensor"  # its memory holds other values


@dataclass(frozen=True, slots=True)
class Words:
    """How a signature is described.

    Attributes:
        sizes: the words for those that may vary, by argument, path inside of it, and dimension.
        device: the word for one; the CPU is not named.
    """

    sizes: Mapping[tuple[str, Path, int], str] = field(default_factory=dict)
    device: Callable[[torch.device], str] = str


_PLAIN = Words()


def describe(example: ExampleInput, names: tuple[str, ...], words: Words = _PLAIN) -> str:
    """The signature for people: "attention_mask: int64[2, 12], input_ids: int64[2, 12]"; strides only if unusual."""
    named = by_name(example.args, example.kwargs, names)
    return ", ".join(f"{name}: {_described(named[name], name, words)}" for name in sorted(named))


def _described(value: Any, name: str, words: Words) -> str:
    try:
        return _describe(value, name, (), words)
    except Exception:  # whatever `signature_of` cannot read: it is to be named, and not to fail once more
        return f"a {type(value).__qualname__}"


def _describe(value: Any, name: str, path: Path, words: Words) -> str:
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return f"nested {value.dtype}"
        sizes = [words.sizes.get((name, path, dim), str(size)) for dim, size in enumerate(value.shape)]
        text = f"{str(value.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
        if value.layout is torch.strided and not value.is_contiguous():
            text += f" strides {list(value.stride())}"
        return text if value.device.type == "cpu" else f"{text} on {words.device(value.device)}"
    items = items_of(value)
    if items is None:
        return repr(value)
    described = [(key, _describe(item, name, (*path, key), words)) for key, item in items]
    kind = "" if type(value) in (dict, list, tuple) else type(value).__qualname__
    if isinstance(value, Mapping):
        return f"{kind}{{{', '.join(f'{_key(key)}: {item}' for key, item in described)}}}"
    inside = ", ".join(item for _, item in described)
    return f"{kind}[{inside}]" if isinstance(value, list) else f"{kind}({inside})"


def _key(key: Any) -> str:
    """1 is another key than "1"."""
    return key if isinstance(key, str) and key.isidentifier() else repr(key)


def batch_size_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Size of the first dimension of the first tensor; 1 for a call without one, or of which it cannot be told."""
    try:
        return next((int(tensor.size(0)) for _, tensor in tensor_leaves((args, kwargs)) if tensor.dim()), 1)
    except Exception:
        return 1


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each leaf of nested containers, with the keys and indices that lead to it."""
    items = items_of(value)
    if items is None:
        yield path, value
        return
    for key, item in items:
        yield from leaves(item, (*path, key))


def tensor_leaves(value: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """Those of the `leaves` that are tensors."""
    return ((path, leaf) for path, leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def with_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...], change: Change
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, with what `change` makes of each tensor in them; the given ones stay as they are."""
    return (
        tuple(_changed(value, argument_name(names, index), (), change) for index, value in enumerate(args)),
        {name: _changed(value, name, (), change) for name, value in kwargs.items()},
    )


def _changed(value: Any, argument: str, path: Path, change: Change) -> Any:
    if isinstance(value, torch.Tensor):
        return change(argument, path, value)
    items = items_of(value)
    if items is None:
        return value
    return rebuilt(value, [_changed(item, argument, (*path, key), change) for key, item in items])


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return empty.zero_().requires_grad_(tensor.requires_grad)
