"""What a model's code is: every source file, global, environment variable and data file that running it reads.

Compiled code has all of them baked in, and a warm boot of an ahead-of-time artifact does not trace again. So the cold
boot watches one eager run, and the artifact keeps what it saw; artifacts/hashing.py compares it with what is there now.
What cannot be compared is kept by name: it leaves the artifact in doubt, and each boot that loads it verifies it.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import os
import sys
import sysconfig
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from types import (
    ClassMethodDescriptorType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, TypeGuard

import torch

from bentoml_compile.artifacts.hashing import (
    ABSENT,
    CACHED,
    attribute_of,
    environment_source,
    file_of,
    file_source,
    global_source,
    hash_sources,
    hides_state,
    is_opaque,
    part_of,
    parts_of,
    stable_text,
    unseen_source,
)
from bentoml_compile.collecting import without_collecting

logger = logging.getLogger("bentoml_compile")

_OWN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_READ_ENVIRONMENT: CodeType = type(os.environ).__getitem__.__code__
_CODE = (".py", ".pyc", ".so")
_NO_SETTINGS = ("torch", "logging", "threading", "os", "weakref")
_METHODS = (FunctionType, MethodDescriptorType, WrapperDescriptorType, ClassMethodDescriptorType)
_DEPTH = 3  # attributes of attributes of a global


@contextlib.contextmanager
def watched_sources() -> Iterator[dict[str, str]]:
    """Collects the sources of all Python functions that this thread calls inside, with their hashes; filled at the end.

    torch and the standard library are left out: their versions are axes of the fingerprint. So are finalizers of
    garbage, which is others' and may read what changes: a count, a registry.
    """
    sources: dict[str, str] = {}
    seen: dict[CodeType, dict[str, Any]] = {}
    read: set[str] = set()

    def on_call(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        if frame.f_code is _READ_ENVIRONMENT and _is_read_by_the_user(frame):
            read.add(environment_source(frame.f_locals["key"]))
        if frame.f_code not in seen:
            seen[frame.f_code] = frame.f_globals

    before = sys.getprofile()
    with _watched_files(read), without_collecting():
        sys.setprofile(on_call)
        try:
            yield sources
        finally:
            sys.setprofile(before)
            sources.update(_collected(read, seen))


def _collected(read: set[str], seen: dict[CodeType, dict[str, Any]]) -> dict[str, str]:
    """Fails no boot: an exception here would be taken for the model's own."""
    try:
        return hash_sources(read | _sources_of(seen))
    except Exception as error:
        logger.debug("sources could not be read", exc_info=True)
        return hash_sources([unseen_source(f"the model's code ({type(error).__name__})")])


def _sources_of(seen: dict[CodeType, dict[str, Any]]) -> set[str]:
    codes = {code: names for code, names in seen.items() if _is_the_users(code.co_filename)}
    # an object may be handed on to another function
    attributes = {name for code in codes for name in _names(code) if not name.startswith("__")}
    read = _Globals(attributes, seen.keys())
    for code, names in codes.items():
        read.found.add(file_source(code.co_filename, names.get("__name__")))
        read.named_by(code, names)
    return read.found


def _names(code: CodeType) -> set[str]:
    """Also those that `getattr` may be given."""
    return {*code.co_names, *(text for text in code.co_consts if isinstance(text, str) and text.isidentifier())}


def _is_the_users(path: str) -> bool:
    if path.startswith(_OWN) or not os.path.isfile(path):
        return False
    return not path.startswith(_STDLIB) or path.startswith(_PACKAGES)


# globals


@dataclass(eq=False)
class _Globals:
    """The globals that functions name: their modules' own, and those of modules that they or their modules import.

    Attributes:
        attributes: what the code reads of objects, by name.
        ran: the code that was running.
    """

    attributes: set[str]
    ran: Collection[CodeType]
    found: set[str] = field(default_factory=set)
    _done: dict[tuple[str, str], bool] = field(default_factory=dict)
    _met: set[int] = field(default_factory=set)  # of the present global, which may contain itself

    def named_by(self, code: CodeType, names: dict[str, Any]) -> None:
        module = names.get("__name__")
        for name in code.co_names:
            if name in names and isinstance(module, str):
                self._read(module, name, names[name])
        for imported in _modules(code, names):
            used = [self._read(imported.__name__, name, vars(imported)[name]) for name in code.co_names
                    if name in vars(imported)]  # fmt: skip
            if any(used):
                self.found.add(file_source(str(imported.__file__), imported.__name__))

    def _read(self, module: str, name: str, value: Any) -> bool:
        """Whether the global is a setting."""
        if (module, name) not in self._done:
            self._met.clear()
            try:
                self._done[module, name] = self._reach(module, name, value)
            except Exception:  # e.g. another thread changes it
                logger.debug("global %s of %s could not be read", name, module, exc_info=True)
                self._done[module, name] = self._cannot_see(module, name)
        return self._done[module, name]

    def _cannot_see(self, module: str, path: str) -> bool:
        self.found.add(unseen_source(f"{module}:{path}"))
        return True

    def _reach(self, module: str, path: str, value: Any, depth: int = _DEPTH) -> bool:
        """Notes the value itself, or what of it the code can read by name, if it is an object."""
        if stable_text(value) is not None:
            self.found.add(global_source(module, path))
            return True
        if _is_module(value) or _is_no_setting(value) or id(value) in self._met:
            return False
        self._met.add(id(value))
        kind = type(value)
        if kind is CACHED and value.cache_info().currsize and value.__wrapped__.__code__ not in self.ran:
            return self._cannot_see(module, path)  # what an earlier call has left
        if (kind is not CACHED and hides_state(kind)) or (is_opaque(value) and not _is_library(module)):
            return self._cannot_see(module, path)
        if depth == 0:
            return False
        used = [self._reach(module, f"{path}.{name}", part, depth - 1) for name, part in self._parts(module, value)]
        for name in self.attributes:
            inner = attribute_of(value, name)
            if inner is not ABSENT and (depth == _DEPTH or not issubclass(type(inner), (type, *_METHODS))):
                used.append(self._reach(module, f"{path}.{name}", inner, depth - 1))
        if any(used):
            self._note_class(value)
        return any(used)

    def _parts(self, module: str, value: Any) -> Iterable[tuple[str, Any]]:
        """Of a library's dictionary what the code names: it may be a registry that every model adds to."""
        parts = parts_of(value)
        if issubclass(type(value), dict) and _is_library(module):
            return [(name, parts[name]) for name in parts.keys() & set(map(part_of, self.attributes))]
        return parts.items()

    def _note_class(self, value: Any) -> None:
        kind = _class_of(value)
        file = file_of(kind.__module__)
        if _is_the_users(file):
            self.found.add(file_source(file, kind.__module__))


def _modules(code: CodeType, names: dict[str, Any]) -> list[ModuleType]:
    """The user's modules that a function names, or imports itself."""
    package = names.get("__package__")
    found = {}
    for name in code.co_names:
        for value in (names.get(name), sys.modules.get(name), sys.modules.get(f"{package}.{name}")):
            if _is_module(value) and _is_the_users(getattr(value, "__file__", None) or ""):
                found[value.__name__] = value
    return list(found.values())


def _is_no_setting(value: Any) -> bool:
    """Tensors and modules: export refuses those that are no part of the model. Others change with the process."""
    kind = _class_of(value)
    top = kind.__module__.partition(".")[0]
    return issubclass(kind, (torch.Tensor, torch.nn.Module)) or top in _NO_SETTINGS


def _is_library(module: str) -> bool:
    return file_of(module).startswith(_PACKAGES)


def _is_module(value: Any) -> TypeGuard[ModuleType]:
    return issubclass(type(value), ModuleType)  # not isinstance: `__class__` may be a property


def _class_of(value: Any) -> type:
    return value if issubclass(type(value), type) else type(value)


# environment and files


def _is_read_by_the_user(frame: FrameType) -> bool:
    """Whether the standard library's own functions, if any, were called by code of the user."""
    caller = frame.f_back
    while caller is not None and _is_stdlib(caller.f_code.co_filename):
        caller = caller.f_back
    return caller is not None and _is_the_users(caller.f_code.co_filename)


def _is_stdlib(path: str) -> bool:
    return path.startswith("<frozen ") or (path.startswith(_STDLIB) and not path.startswith(_PACKAGES))


@contextlib.contextmanager
def _watched_files(found: set[str]) -> Iterator[None]:
    """Adds the data files that this thread opens for reading."""
    real, thread = builtins.open, threading.get_ident()

    def watched(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and not isinstance(file, int) and not set(mode) & set("wax+"):
            found.update(_data_files([os.path.abspath(os.fsdecode(file))]))
        return real(file, mode, *args, **kwargs)

    builtins.open, io.open = watched, watched
    try:
        yield
    finally:
        builtins.open, io.open = real, real


def _data_files(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        if not path.endswith(_CODE) and not path.startswith(("/proc/", "/sys/", "/dev/")) and os.path.isfile(path):
            yield path
