"""Fingerprint: everything that an artifact must match, by name, so that a miss can say what differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

FORMAT = 4  # of the axes and of the manifest; raise it when either changes its meaning
_NAMED = 3  # attributes that a difference names before it only counts


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a model, its settings and this machine look like to a compiler.

    Attributes:
        axes: readable values by axis, in a fixed order; long ones as a hash and a summary.
        attributes: the single values behind the axis "attributes", to name the one that differs.
        doubts: what the axes do not tell, although the model has it.
        id: 16 hex digits over the axes.
    """

    axes: Mapping[str, str]
    attributes: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    doubts: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def id(self) -> str:
        return hashlib.sha256(json.dumps(list(self.axes.items())).encode()).hexdigest()[:16]

    def differences(self, axes: Mapping[str, str], attributes: Mapping[str, str] | None = None) -> list[str]:
        """What differs from another fingerprint's axes, e.g. "torch: 2.13.0 here, 2.12.1 there"."""
        found = []
        for name in dict.fromkeys([*self.axes, *axes]):
            here, there = self.axes.get(name, "nothing"), axes.get(name, "nothing")
            if here != there:
                detail = _differing(self.attributes, attributes or {}) if name == "attributes" else ""
                found.append(f"{name}: {detail or f'{here} here, {there} there'}")
        return found


def _differing(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    names = [name for name in dict.fromkeys([*here, *there]) if here.get(name) != there.get(name)]
    if not here or not there or not names:
        return ""
    shown = [f"{name} is {here.get(name, 'unset')} here, {there.get(name, 'unset')} there" for name in names[:_NAMED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")
