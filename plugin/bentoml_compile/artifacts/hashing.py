"""Hashes of texts, of files, and of the sources that compiled code depends on."""

from __future__ import annotations

import datetime
import decimal
import functools
import hashlib
import importlib
import inspect
import os
import re
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from enum import Enum, EnumMeta
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any


def short_hash(parts: Iterable[str]) -> str:
    """12 hex digits over the parts and their boundaries."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogatepass")
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()[:12]


_GLOBAL = "global "
_MODULE = "module "
_ENVIRONMENT = "environment "
_UNSEEN = "unseen "
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
_PRINTED = (  # their repr is their value, too
    range, re.Pattern, decimal.Decimal, datetime.date, datetime.datetime, datetime.time, datetime.timedelta, bytearray,
)  # fmt: skip
_TORCH_S = ("dtype", "device", "Size", "memory_format", "layout")  # not imported here: `artifacts` lists without torch
ABSENT = object()
CACHED = type(functools.lru_cache(maxsize=1)(id))  # what functools makes of a function whose results it keeps
_SEEN_THROUGH: tuple[type, ...] = (  # all that these and classes derived from them hold can be read
    object, type, dict, OrderedDict, defaultdict, list, tuple, deque, set, frozenset, str, bytes, bytearray, bool, int,
    float, complex, FunctionType, MethodType, ModuleType, CodeType, functools.partial, staticmethod, classmethod,
    property,
)  # fmt: skip
_WITHOUT_STATE = (type(threading.Lock()), type(threading.RLock()), weakref.ReferenceType, type(None))
_POINTER = 8  # bytes
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_MOST_ITEMS = 1000  # of a container
_MOST_LEVELS = 20  # of containers in containers


def global_source(module: str, path: str) -> str:
    """How a global that code reads, or an attribute of one ("settings.scale"), is called among sources."""
    return f"{_GLOBAL}{module}:{path}"


def environment_source(name: str) -> str:
    """How an environment variable is called among sources."""
    return f"{_ENVIRONMENT}{name}"


def unseen_source(name: str) -> str:
    """How something that code reads and that cannot be compared is called among sources: it never counts as changed,
    but what depends on it is in doubt.
    """
    return f"{_UNSEEN}{name}"


def unseen(sources: Iterable[str]) -> list[str]:
    """What is in doubt, as `unseen_source` was told."""
    return [source.removeprefix(_UNSEEN) for source in sources if source.startswith(_UNSEEN)]


def attribute_of(value: Any, name: str) -> Any:
    """An attribute without running any code of the value's; ABSENT if there is none, or it is computed."""
    kind = type(value)  # not isinstance, here and below: `__class__` may be a property
    if name.startswith("["):
        return parts_of(value).get(name, ABSENT)
    if issubclass(kind, EnumMeta):
        return value.__members__.get(name, ABSENT)
    if issubclass(kind, ModuleType):
        return vars(value).get(name, ABSENT)
    found = inspect.getattr_static(value, name, ABSENT)
    if type(found) is MemberDescriptorType:  # of __slots__
        try:
            return found.__get__(value, kind)
        except (AttributeError, TypeError):  # not assigned; or the value is the class that has the slot
            return ABSENT
    return ABSENT if issubclass(type(found), (property, staticmethod, classmethod)) else found


def parts_of(value: Any) -> dict[str, Any]:
    """What a small container, a function or a class consists of, by what a part is called in a path: "TABLE.['a']"."""
    kind = type(value)
    if is_opaque(value):
        return {}
    if issubclass(kind, dict):  # a registry may have grown: each item by itself
        return {part_of(key): item for key, item in list(dict.items(value)) if type(key) in _CONSTANTS}
    if issubclass(kind, (list, tuple, deque)):
        base = next(base for base in (list, tuple, deque) if issubclass(kind, base))
        return {"[len]": base.__len__(value), **_numbered(list(base.__iter__(value)))}
    if kind is FunctionType:
        return _numbered([value.__code__, *_given(value)])
    if kind is MethodType:
        return _numbered([value.__func__, value.__self__])
    if kind is functools.partial:
        return _numbered([value.func, value.args, value.keywords])
    if kind is CACHED:
        return _numbered([value.__wrapped__])
    if kind is ContextVar:
        return _numbered([value.get(None)])
    return _numbered([f"{value.__module__}.{value.__qualname__}"]) if issubclass(kind, type) else {}


def is_opaque(value: Any) -> bool:
    """Whether it is a container that is not looked into: a large one, or objects without an order."""
    base = next((base for base in _CONTAINERS if issubclass(type(value), base)), None)
    return base is not None and (base in (set, frozenset) or base.__len__(value) > _MOST_ITEMS)


def _numbered(items: Iterable[Any]) -> dict[str, Any]:
    return {part_of(number): item for number, item in enumerate(items)}


def part_of(key: object) -> str:
    """What the item of this key is called in a path."""
    return f"[{key!r}]".replace(".", "\\x2e")  # a dot separates


def hides_state(kind: type) -> bool:
    """Whether objects of this class hold what only C code can read: are they larger than what can be seen of them?"""
    if issubclass(kind, (*_WITHOUT_STATE, ContextVar)):
        return False
    seen = max(base.__basicsize__ for base in kind.__mro__ if base in _SEEN_THROUGH)
    slots = sum(type(slot) is MemberDescriptorType for base in kind.__mro__ for slot in vars(base).values())
    pointers = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ > seen + _POINTER * pointers


def reduced(value: Any) -> Any:
    """What pickle would keep of an object that hides its state, by its C code alone; None if nothing."""
    for name, arguments in (("__reduce_ex__", (2,)), ("__reduce__", ()), ("__getstate__", ())):
        method = inspect.getattr_static(type(value), name, None)
        if type(method) is MethodDescriptorType and method.__objclass__ is not object:
            try:
                return method(value, *arguments)
            except Exception:  # e.g. "cannot be pickled"
                return None
    return None


def file_source(path: str, module: object) -> str:
    """How a file is called among sources: by the module that is loaded from it, since a Bento and its environment may
    lie elsewhere on the next machine; by its path where there is none.
    """
    return f"{_MODULE}{module}" if isinstance(module, str) and _imported_from(module) == path else path


def file_of(module: str | None) -> str:
    """Where a module that is imported was loaded from; empty if that is no file."""
    return getattr(sys.modules.get(module or ""), "__file__", None) or ""


def _imported_from(module: str) -> str | None:
    return None if module == "__main__" else getattr(sys.modules.get(module), "__file__", None)


def _module_file(module: str) -> str | None:
    """The file that a module was imported from or, without running anything, would be."""
    if module in sys.modules:
        return _imported_from(module)
    spec = _find_spec(module)
    return None if spec is None else spec.origin


def _find_spec(module: str) -> ModuleSpec | None:
    """As importlib.util.find_spec, which would import the packages that the module lies in."""
    parent = module.rpartition(".")[0]
    path = None
    if parent:
        package = sys.modules.get(parent) or _find_spec(parent)
        path = getattr(package, "__path__", None) or getattr(package, "submodule_search_locations", None)
        if path is None:
            return None
    return next(filter(None, (finder.find_spec(module, path) for finder in sys.meta_path)), None)


def stable_text(value: Any, around: tuple[int, ...] = ()) -> str | None:
    """What the value is, the same in every process; None for what is neither constant, array, container nor function,
    or contains what is not, or itself.

    A function is its bytecode, constants, defaults and closure: a helper may be replaced without any file changing.

    Args:
        around: the ids of what contains the value.
    """
    kind, text_of = type(value), functools.partial(stable_text, around=(*around, id(value)))
    if id(value) in around or len(around) > _MOST_LEVELS:
        return value.__qualname__ if kind is FunctionType else None
    if kind in _CONSTANTS or (kind.__module__ == "torch" and kind.__name__ in _TORCH_S):
        return repr(value)
    if kind in _PRINTED:
        return repr(value)
    if kind.__module__ == "numpy" and hasattr(kind, "tobytes"):
        return None if value.dtype.hasobject else _array_text(value)
    if kind in (list, tuple, deque) and len(value) <= _MOST_ITEMS:
        return _joined(kind, map(text_of, list(value)))
    if kind in (set, frozenset) and len(value) <= _MOST_ITEMS:
        return _joined(kind, sorted(map(text_of, list(value)), key=str))
    if kind is dict and len(value) <= _MOST_ITEMS:
        return _joined(kind, [text for pair in list(value.items()) for text in map(text_of, pair)])
    if kind is FunctionType:
        called = f"{value.__module__}.{value.__qualname__} {_code_text(value.__code__)}"
        return _joined(kind, [called, *map(text_of, _given(value))])
    if kind is CodeType:
        return _code_text(value)
    if kind is BuiltinFunctionType:
        return _joined(kind, [f"{value.__module__}.{value.__qualname__}", _owner_text(value.__self__, text_of)])
    if kind is functools.partial:
        return _joined(kind, map(text_of, (value.func, value.args, value.keywords)))
    if issubclass(kind, Enum):
        return _joined(kind, [value.name, text_of(value.value)])
    if kind is type and _is_known(value):
        return f"{value.__module__}.{value.__qualname__}"
    if kind is not CACHED and _is_known(kind) and hides_state(kind):
        return None if (inside := reduced(value)) is None else text_of(inside)
    return None


def _is_known(kind: type) -> bool:
    """Whether a class is Python's or a library's of C code, so that its name stands for it."""
    top = kind.__module__.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("torch", "numpy")


def _owner_text(owner: Any, text_of: Callable[[Any], str | None]) -> str | None:
    """Of a built-in function: None or a module; a method's is an object."""
    return "" if owner is None or issubclass(type(owner), (ModuleType, type)) else text_of(owner)


def _array_text(array: Any) -> str:
    return f"{array.dtype.str} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


def _joined(kind: type, texts: Iterable[str | None]) -> str | None:
    texts = list(texts)
    return None if None in texts else f"{kind.__name__}({', '.join(map(str, texts))})"


def _given(function: FunctionType) -> list[Any]:
    """The defaults and the closure; the class of a method that says `super()` by its name."""
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values.append(cell.cell_contents.__qualname__ if name == "__class__" else cell.cell_contents)
        except ValueError:
            values.append("not assigned yet")
    return values


def _code_text(code: CodeType) -> str:
    constants = [_code_text(item) if type(item) is CodeType else stable_text(item) for item in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def hash_sources(sources: Iterable[str]) -> dict[str, str]:
    """What each source is now: a SHA-256 of a file (by its path or `file_source`), or of a global's or an environment
    variable's value. Always the same for what is `unseen`.

    "missing" where a file cannot be read or found, or a value is gone. A global's module is imported, as the model's
    own code does, unless it is already.
    """
    hashes = {}
    for source in sorted(set(sources)):
        if source.startswith(_MODULE):
            file = _module_file(source.removeprefix(_MODULE))
            hashes[source] = "missing" if file is None else file_hash(file)
        elif source.startswith(_GLOBAL):
            hashes[source] = _global_hash(*source.removeprefix(_GLOBAL).split(":", 1))
        elif source.startswith(_UNSEEN):
            hashes[source] = "unseen"
        elif source.startswith(_ENVIRONMENT):
            hashes[source] = _text_hash(os.environ.get(source.removeprefix(_ENVIRONMENT)))
        else:
            hashes[source] = file_hash(source)
    return hashes


def _global_hash(module: str, path: str) -> str:
    try:
        value: Any = sys.modules.get(module) or importlib.import_module(module)
    except (Exception, SystemExit):
        return "missing"
    try:
        for name in path.split("."):
            value = attribute_of(value, name)
            if value is ABSENT:
                return "missing"
        return _text_hash(stable_text(value))
    except Exception:  # another thread changes it, or its class has odd ways
        return "missing"


def _text_hash(text: str | None) -> str:
    return "missing" if text is None else hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def file_hash(path: str | Path) -> str:
    """The SHA-256 of a file's content, "missing" if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError:
        return "missing"
    return digest.hexdigest()
