"""The module that is exported: tensors in, tensors out; what else the call takes and returns is noted beside it."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import types
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
    """Filled while the model is traced.

    Attributes:
        spec: the output's structure.
        constants: (leaf, value) of each leaf of the output that is no tensor.
        problem: what was wrong.
        in_doubt: Python's random was drawn from, by the model or by another thread meanwhile: a server that traces
            requests draws the ids of their spans. To be traced again with `watched`.
        watched: every call of the tracing thread is looked at, which takes time, so that there is no doubt.
    """

    spec: str = ""
    constants: tuple[tuple[int, Constant], ...] = ()
    problem: str | None = None
    in_doubt: bool = False
    watched: bool = False


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
        before, python, numpy = read_state(self._named), random.getstate(), _numpy_state()
        with _Draws() if self._result.watched else contextlib.nullcontext() as draws:
            output = eager_callable(self.model, self._method)(*args, **kwargs)
        name = changed(before, read_state(self._named))
        if name is not None:
            self._result.problem = f"forward changes '{name}', which compiled code would not do"
        elif numpy != _numpy_state() or (draws is not None and draws.found):
            self._result.problem = "draws numbers from Python's or NumPy's random in forward"
        self._result.in_doubt |= draws is None and python != random.getstate()
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


class _Draws:
    """Whether this thread, inside of it, draws from Python's random. NumPy's is not seen: Cython tells no profiler."""

    _random: Any = random.random.__self__  # type: ignore[attr-defined]  # behind the module's functions

    def __init__(self) -> None:
        self.found = False

    def __enter__(self) -> _Draws:
        self._before = sys.getprofile()
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _look(self, frame: types.FrameType, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__self__", None) is self._random:
            self.found |= called.__name__ in ("random", "getrandbits")  # what all the others draw by


def _numpy_state() -> tuple[Any, ...] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    _, keys, position, *gauss = numpy.random.get_state()
    return keys.tobytes(), position, gauss
