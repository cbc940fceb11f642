"""Hashes of texts, of files, and of the sources that compiled code depends on."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
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


def global_source(module: str, name: str) -> str:
    """How a global constant is called among sources, beside the paths of files."""
    return f"{_GLOBAL}{module}:{name}"


def is_constant(value: Any) -> bool:
    """Whether the value is one that code has baked in, and that says by its repr what it is."""
    if type(value) in (tuple, frozenset):
        return all(map(is_constant, value))
    return type(value) in _CONSTANTS


def hash_sources(sources: Iterable[str]) -> dict[str, str]:
    """What each source is now: a file's path and its SHA-256, or a `global_source` and its value's.

    "missing" where a file cannot be read or a global is no constant any more. Left out where the global's module is
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
    if name not in values or not is_constant(values[name]):
        return "missing"
    value = values[name]
    text = repr(sorted(value, key=repr)) if isinstance(value, frozenset) else repr(value)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def hash_files(paths: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each file's content by its path, "missing" where it cannot be read."""
    return {path: file_hash(path) for path in sorted(set(paths))}


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
