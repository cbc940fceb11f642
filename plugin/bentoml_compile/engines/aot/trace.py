"""The module that is exported: tensors in, tensors out; what else the call takes and returns is noted beside it."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from bentoml_compile.engines.aot.package import Constant
from bentoml_compile.engines.aot.shadow import changed, read_state
from bentoml_compile.engines.eager import eager_callable
from bentoml_compile.shapes import ExampleInput

_CONSTANTS = (type(None), bool, int, float, str)


@dataclass(slots=True)
class TracedResult:
    """Filled while the model is traced: the output's structure, its leaves that are no tensors, and what was wrong."""

    spec: str = ""
    constants: tuple[tuple[int, Constant], ...] = ()
    problem: str | None = None


class Call(nn.Module):
    """Calls the method, with the model's hooks, for the tensors of an example."""

    def __init__(self, model: nn.Module, method: str, example: ExampleInput, result: TracedResult) -> None:
        super().__init__()
        self.model = model
        self._method = method
        self._example = example
        self._result = result
        # found here: what torch.export shows forward are proxies, of new classes each time (torch 2.13.0, MaskFormer)
        self._named = tuple(model.named_modules())

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = with_tensors((self._example.args, self._example.kwargs), iter(tensors))
        # read here: torch.export sets the attributes back that forward assigns
        before, drawn = read_state(self._named), _random_state()
        output = eager_callable(self.model, self._method)(*args, **kwargs)
        name = changed(before, read_state(self._named))
        if name is not None:
            self._result.problem = f"forward changes '{name}', which compiled code would not do"
        elif drawn != _random_state():
            self._result.problem = "draws numbers from Python's or NumPy's random in forward"
        return self._note(output)

    def _note(self, output: Any) -> tuple[torch.Tensor, ...]:
        leaves, spec = pytree.tree_flatten(output)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        self._result.constants = tuple(
            (index, leaf) for index, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)
        )
        self._result.problem = self._result.problem or _problem(leaves)
        if self._result.problem is None:
            self._result.spec, self._result.problem = _written(spec)
        return tensors


def with_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """A copy of nested containers with the tensors in place of its own, in the order of `shapes.leaves`."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        filled: Any = copy.copy(value)
        for key in value:
            filled[key] = with_tensors(value[key], tensors)
        return filled
    if isinstance(value, (list, tuple)):
        items = [with_tensors(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _problem(leaves: list[Any]) -> str | None:
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided:
                return f"returns a tensor of layout {leaf.layout}; return a dense one"
            continue
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return "returns a number that depends on its inputs' sizes or values; return it as a tensor"
        if "Cache" in type(leaf).__name__:
            return f"returns a {type(leaf).__name__}; pass use_cache=False"
        if type(leaf) not in _CONSTANTS:
            return f"returns a {type(leaf).__name__}; return tensors in tuples, lists, dicts or a ModelOutput"
    return None if any(isinstance(leaf, torch.Tensor) for leaf in leaves) else "returns no tensor"


def _written(spec: pytree.TreeSpec) -> tuple[str, str | None]:
    """The structure as text, and what is wrong with it: not every registered class can be read again."""
    try:
        text = pytree.treespec_dumps(spec)
        readable = pytree.treespec_loads(text) == spec
    except Exception as error:
        return "", f"returns a structure that cannot be written down: {str(error).strip().splitlines()[0][:200]}"
    return text, None if readable else "returns a dict whose keys are neither strings nor numbers"


def _random_state() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, keys, position, *gauss = numpy.random.get_state()
    return random.getstate(), keys.tobytes(), position, gauss
