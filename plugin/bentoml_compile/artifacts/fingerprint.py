"""Fingerprint: everything that an artifact must match, by name, so that a miss can say what differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from bentoml_compile.artifacts.describe import Describer, short_hash
from bentoml_compile.artifacts.environment import environment_axes
from bentoml_compile.artifacts.structure import hash_files, model_axes
from bentoml_compile.config import CompileConfig

__all__ = ["FORMAT", "Fingerprint", "fingerprint", "hash_files"]

FORMAT = 1  # of the axes and of the manifest; raise it when either changes its meaning

_NOT_IN_CODE = {"enabled", "on_unprepared", "time_limit", "artifacts"}  # they decide about serving and storing only
_LONG = 200  # characters
_NAMED = 3  # attributes that a difference names before it only counts


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a model, its settings and this machine look like to a compiler.

    Attributes:
        axes: readable values by axis, in a fixed order; long ones as a hash and a summary.
        attributes: the single values behind the axis "attributes", to name the one that differs.
        id: 16 hex digits over the axes.
    """

    axes: Mapping[str, str]
    attributes: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

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


def fingerprint(model: nn.Module, *, method: str, config: CompileConfig, shapes: Sequence[str]) -> Fingerprint:
    """The fingerprint of `model` as it is now.

    Args:
        model: its weights' values do not count; everything else that it holds does.
        method: the name of the method that is compiled.
        config: the keys that decide about serving and storing only do not count.
        shapes: the signatures of the prepared shapes.

    Returns:
        The same axes in every process on machines of one kind. Of files that the model's code calls into, only those
        that define its classes, hooks and functions are in it; a compile records the others (`Store`).
    """
    seen = model_axes(model)
    axes = {
        "format": str(FORMAT),
        **environment_axes(seen.devices),
        "method": method,
        **seen.axes,
        **_config_axes(config),
        "shapes": _shortened("; ".join(sorted(shapes))),
    }
    return Fingerprint(axes, seen.attributes)


def _config_axes(config: CompileConfig) -> dict[str, str]:
    values = config.model_dump(exclude=_NOT_IN_CODE)
    if isinstance(values["verify"], dict):
        values["verify"].pop("on_load")  # decides when to check, not what is compiled
    describer = Describer()
    return {f"config.{name}": _shortened(_readable(value, describer)) for name, value in values.items()}


def _readable(value: object, describer: Describer) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_readable(value[key], describer)}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, (bool, int, float, str, type(None), list, tuple)):
        return str(value)
    return describer.describe(value)  # e.g. a custom pass in `options`


def _shortened(text: str) -> str:
    return text if len(text) <= _LONG else f"{short_hash([text])} ({text[:60]}...)"


def _differing(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    names = [name for name in dict.fromkeys([*here, *there]) if here.get(name) != there.get(name)]
    if not here or not there or not names:
        return ""
    shown = [f"{name} is {here.get(name, 'unset')} here, {there.get(name, 'unset')} there" for name in names[:_NAMED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")
