"""Containers: the one place that says what of an argument is looked into, and how another of its kind is made."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any


def items_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The items of a list, tuple or MutableMapping, of whatever class, in order, each with its index or key; else None.

    Another Mapping cannot be written to, so that there is no way to make one like it.
    """
    if type(value) is dict:
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if isinstance(value, MutableMapping):  # transformers' BatchEncoding is a Mapping, but not a dict
        return ((key, value[key]) for key in value)
    return None


def rebuilt(value: Any, items: Iterable[Any]) -> Any:
    """A container of the same class with these in place of its own items; the given one stays as it is.

    Raises:
        Exception: whatever a class raises that cannot be copied, or not be written to.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(items)
    if kind is dict:
        return dict(zip(value, items, strict=True))
    if isinstance(value, tuple):
        return getattr(kind, "_make", kind)(items)  # a NamedTuple takes its items one by one
    made = copy.copy(value)
    keys = range(len(value)) if isinstance(value, list) else list(value)
    for key, item in zip(keys, items, strict=True):
        made[key] = item
    return made


def holds_more(value: Any) -> bool:
    """Whether a container has public attributes that are not its items: code may read what no walk over these finds."""
    for name, item in (getattr(value, "__dict__", None) or {}).items():
        if item is None or name.startswith("_") or (name == "data" and isinstance(value, UserDict)):
            continue
        if not isinstance(value, Mapping) or name not in value or value[name] is not item:
            return True
    return False
