"""What a model is, apart from the values of its weights, as axes of a fingerprint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bentoml_compile.artifacts.describe import Describer, qualified
from bentoml_compile.artifacts.hashing import file_hash, short_hash

__all__ = ["ModelAxes", "model_axes"]


@dataclass(frozen=True, slots=True)
class ModelAxes:
    """Axes of a model, the single attributes behind the axis "attributes", so that a miss can name the one, and what
    of the model no axis tells.
    """

    axes: dict[str, str]
    attributes: dict[str, str]
    devices: tuple[torch.device, ...]
    doubts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    kind: str  # parameter | buffer
    tensor: torch.Tensor


def model_axes(model: nn.Module) -> ModelAxes:
    """Structure, training flag, attributes, hooks, tensors and sources of `model`."""
    modules = list(_modules(model))
    first = {id(module): name for name, module in reversed(modules)}
    own = [(name, module) for name, module in modules if first[id(module)] == name]
    tensors = [tensor for name, module in own for tensor in _tensors(name, module)]
    names = {id(module): f"module {name or '(root)'}" for name, module in own}
    names |= {id(tensor.tensor): f"{tensor.kind} {tensor.name}" for tensor in reversed(tensors)}
    describer = Describer(names)

    classes = [f"{name} {first[id(module)]} {describer.module_class(type(module))}" for name, module in modules]
    attributes = {
        f"{name}.{key}".lstrip("."): text for name, module in own for key, text in describer.attributes(module).items()
    }
    hooks = [f"{name} {hook}" for name, module in own for hook in describer.hooks(module)]
    hooks += [f"every module {describer.describe(hook)}" for hook in _global_hooks()]
    shapes = [f"{t.name} {t.kind} {short_hash(describer.tensor(t.tensor, values=False))}" for t in tensors]

    axes = {
        "structure": f"{short_hash(classes)} ({qualified(type(model))}, {len(own)} modules)",
        "training": _training(own),
        "attributes": f"{short_hash(f'{key}={text}' for key, text in attributes.items())} ({len(attributes)})",
        "hooks": f"{short_hash(hooks)} ({len(hooks)})" if hooks else "none",
        "tensors": f"{short_hash([*shapes, *_ties(tensors)])} ({_summary(tensors)})",
        "sources": _sources(describer.files),
    }
    return ModelAxes(axes, attributes, _devices(tensors), tuple(sorted(describer.doubts)))


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under every name, without going into one a second time: which ones are shared is structure, too."""
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        yield name, module
        if id(module) not in seen:
            seen.add(id(module))
            children = [(key, child) for key, child in module._modules.items() if child is not None]
            waiting.extend((f"{name}.{key}".lstrip("."), child) for key, child in reversed(children))


def _tensors(prefix: str, module: nn.Module) -> Iterator[_Tensor]:
    for kind, state in (("parameter", module._parameters), ("buffer", module._buffers)):
        for name, tensor in state.items():
            if tensor is not None:
                yield _Tensor(f"{prefix}.{name}".lstrip("."), kind, tensor)


def _ties(tensors: list[_Tensor]) -> Iterator[str]:
    """Which tensors share memory, and how far apart they start.

    By address ranges, not by storage: checkpoints are often loaded as many views of one storage.
    """
    ranges = []
    for position, entry in enumerate(tensors):
        start = _address(entry.tensor)
        if start and entry.tensor.numel():
            steps = zip(entry.tensor.shape, entry.tensor.stride(), strict=True)
            length = (1 + sum((size - 1) * step for size, step in steps)) * entry.tensor.element_size()
            ranges.append((str(entry.tensor.device), start, start + length, position))
    ranges.sort()
    device, first_start, end = "", 0, 0
    for where, start, stop, position in ranges:
        if where == device and start < end:
            yield f"{tensors[position].name} shares memory at {start - first_start}"
        else:
            device, first_start, end = where, start, 0
        end = max(end, stop)


def _address(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a wrapper subclass or a fake tensor has no memory
        return 0


def _training(modules: list[tuple[str, nn.Module]]) -> str:
    flags = [module.training for _, module in modules]
    if len(set(flags)) == 1:
        return "train" if flags[0] else "eval"
    return f"mixed {short_hash(map(str, flags))} ({sum(flags)} of {len(flags)} train)"


def _summary(tensors: list[_Tensor]) -> str:
    dtypes = Counter(str(entry.tensor.dtype).removeprefix("torch.") for entry in tensors)
    counts = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items()))
    return f"{counts}; {sum(entry.tensor.numel() for entry in tensors)} values" if tensors else "no tensors"


def _devices(tensors: list[_Tensor]) -> tuple[torch.device, ...]:
    return tuple(sorted({entry.tensor.device for entry in tensors}, key=str)) or (torch.get_default_device(),)


def _sources(files: Iterable[Path]) -> str:
    # By name and content: the same model in a Bento that lies elsewhere is the same model.
    parts = sorted(f"{path.name} {file_hash(path)}" for path in files)
    return f"{short_hash(parts)} ({len(parts)} files)" if parts else "none"


def _global_hooks() -> list[Any]:
    """Hooks that torch runs on every module's call.

    Private names of torch.nn.modules.module, checked with torch 2.9 to 2.13; one that is missing counts as no hooks.
    """
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    tables = [getattr(torch.nn.modules.module, f"_global_{kind}_hooks", {}) for kind in kinds]
    return [hook for table in tables for hook in table.values()]
