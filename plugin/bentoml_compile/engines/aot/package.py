"""A compiled package: what stands beside the library in its directory, and the way from there to a callable.

    package.json     what a load needs to know: inputs, outputs, weights
    <hash>.so        the library, named by its content (dlopen knows an opened path, whatever lies there now)
    constants.pt     tensors that are neither parameters nor buffers of the model, if there are any
    *.cubin, ...     kernels that the library reads when it is opened (CUDA)

Opening imports neither torch._dynamo nor torch._inductor, and runs no compiler.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from bentoml_compile.engines.aot.bound import BoundLibrary
from bentoml_compile.engines.aot.library import Library, open_library
from bentoml_compile.engines.aot.weights import Layout
from bentoml_compile.engines.dynamo import GuardMiss
from bentoml_compile.shapes import parameter_names

PACKAGE_FILE = "package.json"
CONSTANTS_FILE = "constants.pt"

Size = int | str  # str: a symbol, e.g. "s0", or in strides a product, e.g. "64*s0"
Constant = None | bool | int | float | str


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of the call.

    Attributes:
        path: keys and indices that lead to it from (args, kwargs), as in `shapes.leaves`.
        sizes: of each dimension; dimensions of one symbol are of one size.
        strides: in elements, as the library reads it.
        device: cpu or cuda.
    """

    path: tuple[Any, ...]
    dtype: str
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    device: str

    def strides_at(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        """The strides that the library expects where each symbol has this size."""
        return tuple(math.prod(_value(factor, symbols) for factor in str(stride).split("*")) for stride in self.strides)


def _value(factor: str, symbols: Mapping[str, int]) -> int:
    return symbols[factor] if factor in symbols else int(factor)


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer that the library takes: its name in the model, and what it must be."""

    name: str
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        return Layout(getattr(torch, self.dtype.removeprefix("torch.")), self.sizes, self.strides)


@dataclass(frozen=True, slots=True)
class Package:
    """Everything that a load needs besides the library and the live model. `to_json` and `from_json` are inverses.

    Attributes:
        library: its file name.
        device: cpu, or cuda:0 and the like.
        inputs: in the order in which the library takes them.
        output_spec: the structure of what the method returns, as torch.utils._pytree writes it.
        output_constants: (leaf, value) of each leaf of the output that is no tensor; the library returns the others.
        ranges: smallest and largest size of each symbol.
        weights: by the name under which the library asks for them.
        constants: names that the library asks for and that CONSTANTS_FILE holds.
    """

    library: str
    device: str
    inputs: tuple[Leaf, ...]
    output_spec: str
    output_constants: tuple[tuple[int, Constant], ...]
    ranges: dict[str, tuple[int, int]]
    weights: dict[str, Weight]
    constants: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Package:
        """Raises ValueError, KeyError or TypeError if the text is none of `to_json`'s."""
        fields = json.loads(text)
        return cls(
            library=fields["library"],
            device=fields["device"],
            inputs=tuple(Leaf(**{key: _tuple(value) for key, value in leaf.items()}) for leaf in fields["inputs"]),
            output_spec=fields["output_spec"],
            output_constants=_tuple(fields["output_constants"]),
            ranges={symbol: (low, high) for symbol, (low, high) in fields["ranges"].items()},
            weights={
                name: Weight(**{key: _tuple(value) for key, value in weight.items()})
                for name, weight in fields["weights"].items()
            },
            constants=tuple(fields["constants"]),
        )


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def open_package(
    directory: Path, model: nn.Module, method: str, *, weights: Mapping[str, torch.Tensor] | None = None
) -> AotExecutable:
    """Opens a package with the live model's own tensors, by reference.

    Args:
        directory: where `export_package` wrote it, or a copy.
        model: the model that it was made from, or one of equal structure; not copied and not changed.
        weights: by name in the model, instead of the model's.

    Raises:
        LibraryError: a weight is missing or differs in dtype, sizes or strides.
        OSError, ValueError, KeyError, TypeError: the directory is incomplete or altered.
    """
    package = Package.from_json((directory / PACKAGE_FILE).read_text())
    tensors = tensors_of(model) if weights is None else weights
    given = {asked: tensors[weight.name] for asked, weight in package.weights.items() if weight.name in tensors}
    if package.constants:
        given |= torch.load(directory / CONSTANTS_FILE, map_location=package.device, weights_only=True)
    library = open_library(
        directory / package.library,
        device=torch.device(package.device),
        weights=given,
        expected={asked: weight.layout for asked, weight in package.weights.items()},
        cubin_dir=directory,
    )
    return AotExecutable(package, library, parameter_names(getattr(model, method)))


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under each of their names: tied ones have several, and a library asks for one of them."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


class AotExecutable:
    """Calls the library as the model's method would be called: same arguments, same structure of the result.

    Of the arguments it checks nothing: the caller has found that the call's signature is one that the package was made
    for. Of torch's settings it checks those that change what eager would return, and that are baked into the code.
    """

    def __init__(self, package: Package, library: Library | BoundLibrary, names: Sequence[str]) -> None:
        self.package = package
        self._library = library
        self._inputs = [_find(leaf.path, names) for leaf in package.inputs]
        self._spec = pytree.treespec_loads(package.output_spec)
        self._constants = sorted(package.output_constants)
        self._device_type = torch.device(package.device).type
        self._surroundings = _surroundings(self._device_type)  # those of the export: the fingerprint holds them
        self._modes = _modes()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The method's result.

        Raises:
            GuardMiss: autocast or the default dtype is another than when the package was opened, or a torch mode (e.g.
                `with torch.device(...)`, FakeTensorMode) would show eager's operators something else.
            LibraryError, RuntimeError: as Library.run.
        """
        if (found := _surroundings(self._device_type)) != self._surroundings:
            raise GuardMiss(f"autocast and default dtype are {found}, not {self._surroundings}")
        if _modes() > self._modes:  # fewer is no matter: the boot's thread may have a default device, a worker's none
            raise GuardMiss("a TorchFunctionMode or TorchDispatchMode is active")
        tensors = []
        for name, position, path in self._inputs:
            value = kwargs[name] if name in kwargs else args[position]
            for key in path:
                value = value[key]
            tensors.append(value)
        with torch.inference_mode():
            leaves: list[Any] = self._library.run(tensors)
        for index, constant in self._constants:  # in ascending order, so that each lands where it belongs
            leaves.insert(index, constant)
        return pytree.tree_unflatten(leaves, self._spec)

    def close(self) -> None:
        """Waits for calls under way and frees the library; a later call raises RuntimeError."""
        self._library.close()


def _surroundings(device_type: str) -> tuple[torch.dtype | None, torch.dtype]:
    """Autocast's dtype on the device, if it is on, and the default dtype: both decide the dtypes of results."""
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    return autocast, torch.get_default_dtype()


def _modes() -> int:
    """How many torch modes this thread is in. Private, checked with torch 2.13.0; none is seen where it is missing."""
    try:
        return torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    except AttributeError:
        return 0


def _find(path: tuple[Any, ...], names: Sequence[str]) -> tuple[str, int, tuple[Any, ...]]:
    """(name, position, path inside of the argument): a call may pass the argument by either."""
    argument = path[1]
    if path[0] == 0:
        return names[argument] if argument < len(names) else "", argument, path[2:]
    return argument, names.index(argument) if argument in names else -1, path[2:]
