"""Range checks for integer inputs that index into a table.

Eager PyTorch answers an out-of-range index on the CPU with an IndexError; compiled code that runs in several threads
ends the process. So what eager indexes with is watched once. Inputs that index something directly are checked before
each compiled call. Where an index is computed from inputs, no such check is possible: that model's code is compiled
without threads of its own (engines/jit.py), where an index out of range is an exception, which eager then answers.
On CUDA a device assert is eager's behaviour too, and nothing is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bentoml_compile.shapes import ExampleInput, Path, argument_name, tensor_leaves

aten = torch.ops.aten
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_COPIES = (aten._to_copy, aten.clone, aten.contiguous, aten._unsafe_view, aten.lift_fresh)


@dataclass(frozen=True, slots=True)
class Bound:
    """An argument, or the part of it that `path` leads to, must hold values in [low, high]."""

    name: str
    position: int | None  # where the argument stands if it is not given by name
    path: tuple[Any, ...]
    low: int
    high: int


def in_bounds(bounds: Sequence[Bound], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether every checked input is in range: one pass over each, a few microseconds for a batch of token ids."""
    for bound in bounds:
        tensor: Any = kwargs[bound.name] if bound.name in kwargs else args[bound.position]  # type: ignore[index]
        for key in bound.path:
            tensor = tensor[key]
        if tensor.numel():
            low, high = tensor.aminmax()
            if low.item() < bound.low or high.item() > bound.high:
                return False
    return True


@dataclass(frozen=True, slots=True)
class Indexing:
    """What an eager run indexed with: inputs directly (`bounds`), or what it `computed` from inputs."""

    bounds: tuple[Bound, ...]
    computed: bool


def find_indexing(run: Callable[..., Any], example: ExampleInput, names: tuple[str, ...]) -> Indexing:
    """Runs eager on the example and watches what it indexes with.

    An input counts as indexing directly also through views, casts and copies of it, but not through arithmetic.
    """
    inputs = {
        path: tensor
        for path, tensor in tensor_leaves((example.args, example.kwargs))
        if tensor.device.type == "cpu" and tensor.numel()
    }
    # no_grad, not inference_mode: there, composite operators reach the tracker whole and hide what they index.
    # force_eager: a function that the model itself compiles, met under a tracker, is skipped by Dynamo for good.
    with (
        torch.compiler.set_stance("force_eager"),
        torch.inference_mode(False),
        torch.no_grad(),
        _IndexTracker(inputs) as tracker,
    ):
        run(*example.args, **example.kwargs)
    bounds = tuple(_bound(path, low, high, names) for path, (low, high) in tracker.ranges.items())
    return Indexing(bounds, tracker.computed)


def _bound(path: Path, low: int, high: int, names: tuple[str, ...]) -> Bound:
    argument, rest = path[1], path[2:]  # path[0] tells args (0) from kwargs (1)
    if path[0] == 0:
        return Bound(argument_name(names, argument), argument, rest, low, high)
    return Bound(argument, names.index(argument) if argument in names else None, rest, low, high)


class _IndexTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, inputs: dict[Path, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ranges: dict[Path, tuple[int, int]] = {}
        self.computed = False
        self._paths = {_storage(tensor): path for path, tensor in inputs.items() if tensor.dtype in _INTEGERS}
        self._alive: list[torch.Tensor] = []  # a freed storage's address may be used again
        self._derived = {_storage(tensor) for tensor in inputs.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "overloadpacket", func)
        if isinstance(func, torch._ops.HigherOrderOperator):  # e.g. torch.cond, in whose branches nothing is seen
            self.computed = True
        for index, low, high in _indexed(packet, args, kwargs or {}):
            self._note(index, low, high)
        derived = any(_storage(tensor) in self._derived for tensor in _tensors((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):  # also takes away what an address meant before it was freed
            (self._derived.add if derived else self._derived.discard)(_storage(tensor))
        if packet in _COPIES and isinstance(result, torch.Tensor) and args and isinstance(args[0], torch.Tensor):
            path = self._paths.get(_storage(args[0]))
            if path is not None and result.dtype in _INTEGERS:
                self._paths.setdefault(_storage(result), path)
                self._alive.append(result)
        return result

    def _note(self, index: Any, low: int, high: int) -> None:
        if not isinstance(index, torch.Tensor) or index.dtype not in _INTEGERS:
            return
        path = self._paths.get(_storage(index))
        if path is not None:
            before = self.ranges.get(path, (low, high))
            self.ranges[path] = (max(low, before[0]), min(high, before[1]))
        elif _storage(index) in self._derived:
            self.computed = True


def _indexed(packet: Any, args: Any, kwargs: dict[str, Any]) -> list[tuple[Any, int, int]]:
    """(index tensor, lowest, highest allowed value) for each index that this operator reads."""
    if packet is aten.embedding or packet is aten._embedding_bag or packet is aten._embedding_bag_forward_only:
        return [(args[1], 0, args[0].shape[0] - 1)]
    if packet in (aten.index_select, aten.gather, aten.scatter, aten.scatter_add, aten.scatter_, aten.scatter_add_):
        size = args[0].shape[args[1]] if args[0].dim() else 1
        return [(args[2], 0, size - 1)]
    if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        sizes = args[0].shape
        return [(index, -sizes[dim], sizes[dim] - 1) for dim, index in enumerate(args[1]) if index is not None]
    if packet in (aten.nll_loss_forward, aten.nll_loss2d_forward):
        return [(args[1], 0, args[0].shape[1 if args[0].dim() > 1 else 0] - 1)]
    if packet is aten.take:
        return [(args[1], -args[0].numel(), args[0].numel() - 1)]
    return []


def _tensors(value: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in tensor_leaves(value)]


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # no storage (meta, sparse)
        return id(tensor)
