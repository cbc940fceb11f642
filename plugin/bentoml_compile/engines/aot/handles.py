"""Tensors as AOTInductor's C functions know them: handles. Private parts of torch, checked with torch 2.13.0.

A handle owns a reference to its tensor until somebody takes it over or frees it. `require` raises MissingSymbol where
torch lacks one of the names; the caller then uses torch's own binding, which holds the interpreter lock.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from bentoml_compile.engines.aot.capi import MissingSymbol, declare, torch_library

_aoti = getattr(torch._C, "_aoti", None)
_new: Any = getattr(_aoti, "unsafe_alloc_void_ptrs_from_tensors", None)
# the singular function never frees the handle: 13 KB a call
_take_over: Any = getattr(_aoti, "alloc_tensors_by_stealing_from_void_ptrs", None)

_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_of = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def require() -> None:
    """Raises MissingSymbol if this torch cannot turn tensors into handles and back."""
    if _new is None or _take_over is None:
        raise MissingSymbol(f"torch {torch.__version__} has no functions for tensor handles in torch._C._aoti")
    _delete()


def handles_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A new handle for each tensor. Whoever receives them must take them over or `free` them."""
    return [_pointer_in(capsule, None) for capsule in _new(tensors)]


def tensors_of(handles: Sequence[int | None]) -> list[torch.Tensor | None]:
    """Takes the handles over: their tensors, and None for NULL."""
    tensors: list[torch.Tensor | None] = _take_over([_capsule_of(handle, None, None) for handle in handles if handle])
    if len(tensors) == len(handles):
        return tensors
    taken = iter(tensors)
    return [next(taken) if handle else None for handle in handles]


def free(handles: Iterable[int | None]) -> None:
    """Frees each handle that is not NULL."""
    for handle in handles:
        if handle:
            _delete()(handle)


@functools.cache
def _delete() -> Callable[[int], int]:
    function: Callable[[int], int] = declare(torch_library(), "aoti_torch_delete_tensor_object", (ctypes.c_void_p,))
    return function
