"""The fingerprint of a model, its settings and this machine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from bentoml_compile.artifacts.axes import FORMAT, Fingerprint
from bentoml_compile.artifacts.describe import Describer
from bentoml_compile.artifacts.environment import environment_axes
from bentoml_compile.artifacts.hashing import short_hash
from bentoml_compile.artifacts.structure import model_axes
from bentoml_compile.config import CompileConfig

__all__ = ["Fingerprint", "fingerprint"]

# they decide about serving and storing only; what was measured is kept, and asked for or not by each boot
_NOT_IN_CODE = {
    "enabled",
    "on_unprepared",
    "prepare_after",
    "pad",
    "startup",
    "ready_when",
    "time_limit",
    "artifacts",
    "keep_eager_if_slower",
}
_LONG = 200  # characters


def fingerprint(model: nn.Module, *, method: str, config: CompileConfig, shapes: Sequence[str]) -> Fingerprint:
    """The fingerprint of `model` as it is now.

    Args:
        model: its weights' values do not count; everything else that it holds does.
        method: the name of the method that is compiled.
        config: the keys that decide about serving and storing only do not count.
        shapes: the signatures of the prepared shapes, in the order in which they are compiled.

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
        "shapes": _shortened("; ".join(shapes)),
    }
    return Fingerprint(axes, seen.attributes, seen.doubts)


def _config_axes(config: CompileConfig) -> dict[str, str]:
    values = config.model_dump(exclude=_NOT_IN_CODE)
    if isinstance(values["verify"], dict):
        values["verify"].pop("on_load")  # decides when to check, not what is compiled
    describer = Describer()
    texts = {name: value if isinstance(value, str) else _readable(value, describer) for name, value in values.items()}
    return {f"config.{name}": _shortened(text) for name, text in texts.items()}


def _readable(value: object, describer: Describer) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_readable(value[key], describer)}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_readable(item, describer) for item in value) + "]"
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    return describer.describe(value)  # e.g. a custom pass in `options`


def _shortened(text: str) -> str:
    return text if len(text) <= _LONG else f"{short_hash([text])} ({text[:60]}...)"
