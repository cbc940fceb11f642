"""What a model's code is: every source file and every global that running it reads.

Compiled code has both baked in, and a warm boot of an ahead-of-time artifact does not trace again. So the cold boot
watches one eager run, and the artifact keeps what it saw; artifacts/hashing.py compares it with what is there now.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

from bentoml_compile.artifacts.hashing import global_source, stable_text

_OWN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})


@contextlib.contextmanager
def watched_sources() -> Iterator[set[str]]:
    """Collects the sources of every Python function that this thread calls inside; filled at the end.

    torch and the standard library are left out: their versions are axes of the fingerprint.
    """
    sources: set[str] = set()
    seen: dict[CodeType, dict[str, Any]] = {}

    def on_call(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code not in seen:
            seen[frame.f_code] = frame.f_globals

    before = sys.getprofile()
    sys.setprofile(on_call)
    try:
        yield sources
    finally:
        sys.setprofile(before)
        for code, names in seen.items():
            if _is_the_users(code.co_filename):
                sources.add(code.co_filename)
                sources |= _globals(code, names)


def _is_the_users(path: str) -> bool:
    if path.startswith(_OWN) or not os.path.isfile(path):
        return False
    return not path.startswith(_STDLIB) or path.startswith(_PACKAGES)


def _globals(code: CodeType, names: dict[str, Any]) -> set[str]:
    """The globals that a function names: its module's own, and those of modules that it has imported."""
    module = names.get("__name__")
    found = set()
    for name in code.co_names:
        value = names.get(name)
        if name in names and isinstance(module, str) and stable_text(value) is not None:
            found.add(global_source(module, name))
        elif isinstance(value, ModuleType) and _is_the_users(getattr(value, "__file__", None) or ""):
            used = {
                name for name in code.co_names if name in vars(value) and stable_text(vars(value)[name]) is not None
            }
            found |= {global_source(value.__name__, attribute) for attribute in used}
            found |= {str(value.__file__)} if used else set()
    return found
