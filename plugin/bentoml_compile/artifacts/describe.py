"""A short text for any Python value that is the same in every process in which the value is the same.

Nothing in it depends on addresses, set order or PYTHONHASHSEED, and nothing of the value's own code is run: no
property, no `__repr__`, no `__iter__`. Values that differ in a way that could change compiled code give different
texts; the few that are known by name alone are listed in `_by_name`, and what cannot be read at all is in `doubts`.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import inspect
import logging
import os
import re
import sys
import types
import uuid
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from bentoml_compile.artifacts.hashing import CACHED, file_of, hides_state, reduced, short_hash

_MAX_DEPTH = 100  # levels; what lies deeper counts by its class alone, long before Python's recursion limit

_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented)})
_PRINTED = (  # their repr is their value
    range, slice, re.Pattern, PurePath, uuid.UUID, decimal.Decimal, fractions.Fraction,
    datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_NATIVE = (
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)  # to an object, a class, a module or nothing
_WRAPPERS = (staticmethod, classmethod)
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PYTHON = str(Path(os.__file__).parent) + os.sep

MODULE_STATE = frozenset(vars(nn.Module()))  # what every nn.Module keeps for itself: parameters, hooks, children, ...
_HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks",
    "_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def qualified(kind: Any) -> str:
    """The dotted name of a class or function."""
    return f"{getattr(kind, '__module__', None)}.{getattr(kind, '__qualname__', type(kind).__qualname__)}"


def is_versioned(module: str | None) -> bool:
    """Whether the module is torch's or Python's own, so that their versions stand for its source."""
    top = (module or "builtins").partition(".")[0]
    return top in ("torch", "torchgen", "functorch") or (top in sys.stdlib_module_names and top != "__main__")


class Describer:
    """Describes values, each object once. Not for use by several threads.

    Args:
        names: what to call the objects that belong to the model itself, by their id: they are described elsewhere.

    Attributes:
        files: the source files of the functions and classes that were met, without torch's and Python's own.
        doubts: what was met that can be told from another by its class alone.
    """

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        self.files: set[Path] = set()
        self.doubts: set[str] = set()
        self._noted: set[str] = set()  # names of files; a large model's functions name the same few thousands of times
        self._names = names or {}
        self._done: dict[int, tuple[object, str]] = {}  # holds the object, so that its id stays its own
        self._open: dict[int, int] = {}
        self._hiding: dict[type, bool] = {}

    def describe(self, value: Any) -> str:
        kind = type(value)
        if kind in _SCALARS:
            return f"{kind.__name__} {value!r}"
        key = id(value)
        if key in self._names:
            return f"the model's {self._names[key]}"
        if key in self._done:
            return self._done[key][1]
        if key in self._open:
            return f"cycle {self._open[key]}"
        if len(self._open) >= _MAX_DEPTH:
            self.doubts.add(f"what lies {_MAX_DEPTH} levels deep")
            return f"deep {qualified(kind)}"
        self._open[key] = len(self._open)
        try:
            text = short_hash(self._parts(value, kind))
        finally:
            del self._open[key]
        self._done[key] = (value, text)
        return text

    def attributes(self, module: nn.Module) -> dict[str, str]:
        """The module's plain attributes by name: all that torch does not keep for itself."""
        return {name: self.describe(value) for name, value in _own_attributes(module)}

    def hooks(self, module: nn.Module) -> list[str]:
        """One text for each hook; the order counts, the process's running hook number does not."""
        state = vars(module)
        return [
            f"{kind} {[flag for flag in _HOOK_FLAGS if number in state.get(flag, ())]} {self.describe(hook)}"
            for kind in _HOOKS
            for number, hook in state.get(kind, {}).items()
        ]

    def module_class(self, kind: type) -> str:
        """The class by name and by what its bases (torch's own aside) define: patched methods count, too."""
        return f"{qualified(kind)} {self.describe(kind)}"

    def _class(self, kind: type) -> Iterator[str]:
        yield qualified(kind)
        if issubclass(kind, nn.Module):
            for base in kind.__mro__:
                yield from self._class_parts(base)
            return
        for base in kind.__mro__:
            if not is_versioned(base.__module__):
                # a library's functions are in its files, which are noted; its settings may be anywhere
                yield from self._class_parts(base, functions=not _is_installed(base.__module__))

    def _class_parts(self, base: type, *, functions: bool = True) -> Iterator[str]:
        yield qualified(base)
        self._note_source(base.__module__)
        own = not is_versioned(base.__module__)
        for name, value in sorted(vars(base).items()):
            if issubclass(type(value), (types.FunctionType, *_WRAPPERS, property)):
                if (own and functions) or (name == "forward" and not is_versioned(getattr(value, "__module__", None))):
                    yield f"{name} {self.describe(value)}"
            elif own and not name.startswith("__") and name not in _OF_ABC:
                yield f"{name} {self.describe(value)}"

    def _parts(self, value: Any, kind: type) -> Iterator[str]:
        yield qualified(kind)
        if issubclass(kind, _PRINTED):
            yield repr(value)
        elif issubclass(kind, enum.Enum):
            yield value.name
        elif (name := _by_name(value)) is not None:
            yield name
            if issubclass(kind, types.ModuleType) and not is_versioned(name):
                self._note_source(name)
                yield from self._constants(value)
        elif issubclass(kind, type):
            yield from self._class(value)
        elif kind is types.GeneratorType:
            yield from map(self.describe, (value.gi_code, value.gi_frame and dict(value.gi_frame.f_locals)))
        elif kind is ContextVar:
            yield self.describe(value.get(None))
        elif kind in (types.UnionType, types.GenericAlias):
            yield self.describe(value.__args__)
        elif issubclass(kind, _BOUND):
            yield qualified(value)
            if not isinstance(value.__self__, types.ModuleType):
                yield self.describe(value.__self__)
        elif issubclass(kind, torch.Tensor):
            yield from self.tensor(value)
        elif issubclass(kind, nn.Module):
            yield from self._hidden_module(value)
        elif kind.__module__ == "numpy" and hasattr(kind, "tobytes"):
            yield from self._array(value)
        elif issubclass(kind, types.CodeType):
            yield from self._code(value)
        elif issubclass(kind, types.FunctionType):
            yield from self._function(value)
        elif issubclass(kind, types.MethodType):
            yield from map(self.describe, (value.__func__, value.__self__))
        elif issubclass(kind, functools.partial):
            yield from map(self.describe, (value.func, value.args, value.keywords))
        elif issubclass(kind, _WRAPPERS):
            yield self.describe(value.__func__)
        elif issubclass(kind, property):
            yield from map(self.describe, (value.fget, value.fset))
        else:
            yield from self._container(value, kind)
            yield from self._state(value, kind)

    def _constants(self, module: types.ModuleType) -> Iterator[str]:
        for name, value in sorted(vars(module).items()):
            if type(value) in _SCALARS and not name.startswith("__"):
                yield f"{name}={value!r}"

    def _container(self, value: Any, kind: type) -> Iterator[str]:
        # The base class's own methods: a subclass's override is somebody's code.
        if issubclass(kind, dict):
            for key, item in dict.items(value):
                yield f"{self.describe(key)}={self.describe(item)}"
            if issubclass(kind, defaultdict):
                yield self.describe(value.default_factory)
        elif issubclass(kind, types.MappingProxyType):
            yield self.describe(dict(value))
        elif issubclass(kind, (list, tuple, deque)):
            base = list if issubclass(kind, list) else tuple if issubclass(kind, tuple) else deque
            if issubclass(kind, deque):
                yield f"maxlen={value.maxlen}"
            items = list(base.__iter__(value))
            if set(map(type, items)) <= _SCALARS:
                yield repr(items)
            else:
                yield from map(self.describe, items)
        elif issubclass(kind, (set, frozenset)):
            base_set = set if issubclass(kind, set) else frozenset
            yield from sorted(map(self._apart, base_set.__iter__(value)))
        elif issubclass(kind, (bytearray, memoryview)):
            yield hashlib.sha256(value).hexdigest()
        elif issubclass(kind, (str, bytes, int, float, complex)):  # a subclass: an IntEnum has been met above
            base_scalar = next(b for b in (str, bytes, int, float, complex) if issubclass(kind, b))
            yield base_scalar.__repr__(value)

    def _apart(self, value: Any) -> str:
        """As `describe`, independent of what was met before: a set has no order in which its items are met."""
        other = Describer(self._names)
        other._open = dict(self._open)
        text = other.describe(value)
        self.files |= other.files
        self.doubts |= other.doubts
        return text

    def _state(self, value: Any, kind: type) -> Iterator[str]:
        self._note_source(kind.__module__)
        if kind.__module__.startswith("torch._dynamo"):
            return  # a compiled function: its state is torch's, and different after every call
        skip = _LEFT_OUT_OF_HUGGING_FACE if _is_hugging_face(kind) else ()
        for name, item in sorted(_instance_dict(value).items(), key=lambda pair: str(pair[0])):
            if name not in skip:
                yield f"{name}={self.describe(item)}"
        for base in kind.__mro__:
            for name, slot in sorted(vars(base).items()):
                if issubclass(type(slot), types.MemberDescriptorType) and not name.startswith("__"):
                    try:
                        yield f"{name}={self.describe(slot.__get__(value, kind))}"
                    except AttributeError:
                        yield f"{name} unset"
        if not is_versioned(kind.__module__):
            yield self.describe(kind)  # the class's attributes are the object's, too
        if kind is CACHED:
            if value.cache_info().currsize:
                self.doubts.add(f"what {qualified(value)} has cached")
        elif self._hides_state(kind) and not issubclass(kind, types.MappingProxyType):
            if (inside := reduced(value)) is None:
                self.doubts.add(f"a {qualified(kind)}")
            else:
                yield self.describe(inside)

    def _hides_state(self, kind: type) -> bool:
        if kind not in self._hiding:
            self._hiding[kind] = hides_state(kind)
        return self._hiding[kind]

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        yield qualified(function)
        if is_versioned(function.__module__) and _is_versioned_file(function.__code__.co_filename):
            return
        self._note_source(function.__module__)
        self._note_file(function.__code__.co_filename)
        yield self.describe(function.__code__)
        yield self.describe(function.__defaults__)
        yield self.describe(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                yield self.describe(cell.cell_contents)
            except ValueError:
                yield "empty cell"
        for name in function.__code__.co_names:  # a constant of the function's module, set from the environment maybe
            if type(function.__globals__.get(name, function)) in _SCALARS:
                yield f"global {name}={function.__globals__[name]!r}"

    def _code(self, code: types.CodeType) -> Iterator[str]:
        yield code.co_code.hex()
        yield self.describe(code.co_consts)
        yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags))
        yield repr((code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount))

    def _hidden_module(self, module: nn.Module) -> Iterator[str]:
        """A module in a list or closure: not in the model's state, so its weights count by value."""
        yield self.module_class(type(module))
        yield f"training={module.training}"
        yield from (f"{name}={text}" for name, text in self.attributes(module).items())
        yield from self.hooks(module)
        for state in ("_parameters", "_buffers", "_modules"):
            yield self.describe(vars(module)[state])

    def _array(self, value: Any) -> Iterator[str]:
        yield f"{value.dtype.str} {value.shape}"
        yield self.describe(value.tolist()) if value.dtype.hasobject else hashlib.sha256(value.tobytes()).hexdigest()

    def tensor(self, tensor: torch.Tensor, *, values: bool = True) -> Iterator[str]:
        """Kind, dtype, shape, strides, device kind, requires_grad and, unless told otherwise, the values."""
        yield f"{qualified(type(tensor))} {tensor.dtype} {tuple(tensor.shape)} {tensor.device.type} {tensor.layout}"
        yield f"{tensor.requires_grad} {tensor.stride() if tensor.layout is torch.strided else ''}"
        if hasattr(tensor, "__tensor_flatten__"):  # torch's protocol for tensors that wrap tensors (torchao, DTensor)
            inner, context = tensor.__tensor_flatten__()
            yield self.describe(context)
            for name in inner:
                yield from self.tensor(getattr(tensor, name), values=values)
        elif values and tensor.device.type != "meta":
            yield _value_hash(tensor)

    def _note_source(self, module: str | None) -> None:
        if not is_versioned(module):
            self._note_file(file_of(module))

    def _note_file(self, name: str) -> None:
        if name in self._noted:
            return
        self._noted.add(name)
        if name.endswith(".py") and Path(name).is_absolute() and not _is_versioned_file(name):
            self.files.add(Path(name))


# Where a Hugging Face model or its config was loaded from is no part of the code, and the generation config keeps a
# hash of itself that is another in every process. Checked with transformers 5.24.
_LEFT_OUT_OF_HUGGING_FACE = ("_name_or_path", "name_or_path", "_commit_hash", "_original_object_hash")

# What Python keeps in an abstract class. Checked with Python 3.11.
_OF_ABC = ("_abc_impl",)

# What torch.compile leaves in a module that it has compiled. Checked with torch 2.13.
_MARKS_OF_TORCH_COMPILE = ("_compiled_call_impl", "_is_torch_compile")


def _is_installed(module: str) -> bool:
    return "-packages" in file_of(module)


def _is_hugging_face(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "transformers" for base in kind.__mro__)


def _own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    skip = _LEFT_OUT_OF_HUGGING_FACE if _is_hugging_face(type(module)) else ()
    for name, value in sorted(vars(module).items()):
        if name not in MODULE_STATE and name not in skip and name not in _MARKS_OF_TORCH_COMPILE:
            yield name, value


def _by_name(value: Any) -> str | None:
    """The name, for what is known by it alone."""
    if issubclass(type(value), _NATIVE):
        return qualified(value)
    if issubclass(type(value), (types.ModuleType, logging.Logger)):
        return getattr(value, "__name__", None) or getattr(value, "name", "")
    if issubclass(type(value), torch.Generator):
        return str(value.device)
    is_weak = type(value).__module__ in ("weakref", "_weakrefset") or issubclass(type(value), weakref.ReferenceType)
    return "" if is_weak else None


def _instance_dict(value: Any) -> Mapping[str, Any]:
    state = inspect.getattr_static(value, "__dict__", None)  # not getattr: a class may make it a property
    if issubclass(type(state), (types.GetSetDescriptorType, types.MemberDescriptorType)):  # e.g. a SimpleNamespace's
        state = state.__get__(value)
    return state if issubclass(type(state), dict) else {}


def _is_versioned_file(name: str) -> bool:
    """As `is_versioned`, by file: a decorated function carries the module name of what it wraps."""
    if name.startswith(("<frozen", _TORCH)):
        return True
    return name.startswith(_PYTHON) and "-packages" not in name


def _value_hash(tensor: torch.Tensor) -> str:
    try:
        plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
        data = plain.resolve_conj().resolve_neg().cpu().contiguous().flatten().view(torch.uint8)
        array: Any = data.numpy()
        return hashlib.sha256(array).hexdigest()
    except (RuntimeError, TypeError, NotImplementedError):
        return "no values"  # a fake or functional tensor has none to read
