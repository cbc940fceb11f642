"""Hashes of texts, of files, and of the sources that compiled code depends on."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType, FunctionType
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
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
_MOST_ITEMS = 1000  # of a container; a larger one is data, not a setting


def global_source(module: str, name: str) -> str:
    """How a global that code reads is called among sources, beside the paths of files."""
    return f"{_GLOBAL}{module}:{name}"


def stable_text(value: Any) -> str | None:
    """What the value is, the same in every process; None for what is neither constant, container nor function.

    A function is its bytecode, constants, defaults and closure: a helper may be replaced without any file changing.
    """
    kind = type(value)
    if kind in _CONSTANTS:
        return repr(value)
    if kind in (list, tuple) and len(value) <= _MOST_ITEMS:
        return _joined(kind, map(stable_text, value))
    if kind in (set, frozenset) and len(value) <= _MOST_ITEMS:
        return _joined(kind, sorted((stable_text(item) for item in value), key=str))
    if kind is dict and len(value) <= _MOST_ITEMS:
        return _joined(kind, [text for pair in value.items() for text in map(stable_text, pair)])
    if kind is FunctionType:
        return _function_text(value)
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
    """What each source is now: a file's path and its SHA-256, or a `global_source` and its value's.

    "missing" where a file cannot be read or a global is gone. Left out where the global's module is
    not imported (yet): it will be what its file, a source as well, makes it.
    """
    hashes = {}
    for source in sorted(set(sources)):
        if not source.startswith(_GLOBAL):
            hashes[source] = file_hash(source)
        elif (module := source.removeprefix(_GLOBAL).rpartition(":")[0]) in sys.modules:
            hashes[source] = _global_hash(vars(sys.modules[module]), source.rpartition(":")[2])
    return hashes


def _global_hash(values: Mapping[str, Any], name: str) -> str:
    text = stable_text(values[name]) if name in values else None
    return "missing" if text is None else hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


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
