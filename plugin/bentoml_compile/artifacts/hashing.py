"""Hashes of texts, of files, and of the sources that compiled code depends on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Iterable
from enum import Enum, EnumMeta
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, ModuleType
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
_TORCH_S = ("dtype", "device", "Size", "memory_format", "layout")  # not imported here: `artifacts` lists without torch
ABSENT = object()
_MOST_ITEMS = 1000  # of a container; a larger one is data, not a setting
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


def file_source(path: str, module: object) -> str:
    """How a file is called among sources: by the module that is loaded from it, since a Bento and its environment may
    lie elsewhere on the next machine; by its path where there is none.
    """
    return f"{_MODULE}{module}" if isinstance(module, str) and _imported_from(module) == path else path


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
    """What the value is, the same in every process; None for what is neither constant, container nor function, or
    contains itself.

    A function is its bytecode, constants, defaults and closure: a helper may be replaced without any file changing.

    Args:
        around: the ids of what contains the value.
    """
    if id(value) in around or len(around) > _MOST_LEVELS:
        return None
    kind, text_of = type(value), functools.partial(stable_text, around=(*around, id(value)))
    if kind in _CONSTANTS or (kind.__module__ == "torch" and kind.__name__ in _TORCH_S):
        return repr(value)
    if kind in (list, tuple) and len(value) <= _MOST_ITEMS:
        return _joined(kind, map(text_of, list(value)))
    if kind in (set, frozenset) and len(value) <= _MOST_ITEMS:
        return _joined(kind, sorted(map(text_of, list(value)), key=str))
    if kind is dict and len(value) <= _MOST_ITEMS:
        return _joined(kind, [text for pair in list(value.items()) for text in map(text_of, pair)])
    if kind is FunctionType:
        return _function_text(value)
    if kind is BuiltinFunctionType:
        return f"{value.__module__}.{value.__qualname__}"
    if kind is functools.partial:
        return _joined(kind, map(text_of, (value.func, value.args, value.keywords)))
    if issubclass(kind, Enum):
        return _joined(kind, [value.name, text_of(value.value)])
    return None


def _joined(kind: type, texts: Iterable[str | None]) -> str | None:
    texts = list(texts)
    return None if None in texts else f"{kind.__name__}({', '.join(map(str, texts))})"


def _function_text(function: FunctionType) -> str:
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            values.append(cell.cell_contents)
    # a function in a closure by its name alone: it may be this one
    texts = [value.__qualname__ if type(value) is FunctionType else stable_text(value) for value in values]
    return f"{function.__module__}.{function.__qualname__} {_code_text(function.__code__)} {texts}"


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
