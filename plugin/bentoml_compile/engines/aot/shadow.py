"""A model to trace in the live one's stead, and what tracing it did to its Python state.

Tracing hands fake tensors to whatever `forward` assigns. A thread that serves the live model must never meet one, so
the copy is traced; and since compiled code assigns nothing, a forward that assigns is found by comparing.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_SEQUENCES = (list, tuple, set, frozenset, deque)
_OPAQUE = (type, types.ModuleType, nn.Module, torch.Tensor)


def shadow(model: nn.Module) -> nn.Module:
    """A copy of the model's modules and plain attributes that shares every tensor with it.

    Raises:
        Exception: whatever an attribute raises that cannot be copied, e.g. a lock.
    """
    tensors = {id(tensor): tensor for module in model.modules() for tensor in tensors_in(vars(module))}
    memo: dict[int, Any] = dict(tensors)
    return copy.deepcopy(model, memo)


def perturbed(model: nn.Module) -> nn.Module:
    """A copy with other values in every floating parameter and buffer, tied ones alike; the rest is shared.

    Factors of 0.9 to 1.1, so that a variance stays one, and a little added, so that a zero moves too.
    """
    others = {
        id(tensor): (tensor.detach() * (0.9 + 0.2 * torch.rand_like(tensor)) + 0.01 * torch.rand_like(tensor))
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.is_floating_point()
    }
    copied = shadow(model)
    for module in copied.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in others:
                module._parameters[name] = nn.Parameter(others[id(parameter)], requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in others:
                module._buffers[name] = others[id(buffer)]
    return copied


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested dicts, lists, tuples and sets."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, _SEQUENCES):
        for item in value:
            yield from tensors_in(item)


State = dict[str, Any]


def read_state(modules: Sequence[tuple[str, nn.Module]]) -> State:
    """Each plain value, and the identity of each other object, that a model's named modules and hooks can reach."""
    state: State = {}
    seen: dict[int, Any] = {}  # holds the objects: a freed one's id may be used again
    for name, module in modules:
        _read(f"{name}.forward".lstrip("."), type(module).forward, state, seen)
        for key, value in vars(module).items():
            _read(f"{name}.{key}".lstrip("."), value, state, seen)
    return state


def _read(path: str, value: Any, state: State, seen: dict[int, Any]) -> None:
    if type(value) in _PLAIN:
        state[path] = value
        return
    if isinstance(value, (Mapping, *_SEQUENCES)):
        # a container that is replaced by an equal one is no change
        state[path] = (type(value), len(value))
    else:
        state[path] = _Identity(value)
    if id(value) in seen or isinstance(value, _OPAQUE):
        return
    seen[id(value)] = value
    for key, item in _parts(value):
        _read(f"{path}{key}", item, state, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, _SEQUENCES):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, types.FunctionType):
        yield from _variables(value)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif hasattr(value, "__dict__"):
        yield from ((f".{key}", item) for key, item in vars(value).items())


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function finds outside of itself, e.g. the list into which a hook collects."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield f"({name})", cell.cell_contents
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if type(value) in _PLAIN or isinstance(value, (Mapping, *_SEQUENCES)):
            yield f"({name})", value


class _Identity:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def changed(before: State, after: State) -> str | None:
    """The first thing that differs, e.g. "encoder.calls"; None if nothing does."""
    for path in (*before, *(path for path in after if path not in before)):
        if path not in before or path not in after or not _same(before[path], after[path]):
            return _readable(path)
    return None


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other or one != one)  # NaN is not equal to itself


def _readable(path: str) -> str:
    """ "layer.calls" for what nn.Module keeps as "layer._buffers['calls']"."""
    for kept in ("_buffers", "_parameters", "_modules"):
        path = path.replace(f"{kept}['", "").replace("']", "") if f"{kept}['" in path else path
    return path
