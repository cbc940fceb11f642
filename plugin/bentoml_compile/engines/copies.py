"""A result whose tensors are copies: what the next replay of a CUDA graph overwrites is then nobody's."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


def copied(result: Any) -> Any:
    """The result with a copy of each tensor; one that comes twice is copied once.

    Objects that pytree does not know (a dataclass, a cache of keys and values) stay the same objects, and get the
    copies as their attributes. A model's own modules are left alone.
    """
    return _Copier().copy(result)


class _Copier:
    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}
        self._sources: list[Any] = []  # alive, so that no id comes again

    def copy(self, value: Any) -> Any:
        return pytree.tree_map(self._leaf, value)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in self._copies:
                self._sources.append(leaf)
                self._copies[id(leaf)] = leaf.clone()
            return self._copies[id(leaf)]
        if hasattr(leaf, "__dict__") and not isinstance(leaf, type) and not callable(leaf):
            self._fill(leaf)
        return leaf

    def _fill(self, holder: Any) -> None:
        if any(holder is source for source in self._sources):
            return
        self._sources.append(holder)
        for name, value in list(vars(holder).items()):
            before, structure = pytree.tree_flatten(value)
            after = [self._leaf(leaf) for leaf in before]
            if any(new is not old for new, old in zip(after, before, strict=True)):
                object.__setattr__(holder, name, pytree.tree_unflatten(after, structure))  # a dataclass may be frozen
