"""A compiled package: what stands beside the library in its directory, and the way from there to a callable.

    package.json     what a load needs to know: inputs, outputs, weights
    <hash>.so        the library, named by its content (dlopen knows an opened path, whatever lies there now)
    constants.safetensors   tensors that are neither parameters nor buffers of the model, if there are any
    *.cubin, ...     kernels that the library reads when it is opened (CUDA)

Opening imports neither torch._dynamo nor torch._inductor, and runs no compiler.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils import _pytree as pytree

from bentoml_compile.engines.aot.bound import BoundLibrary
from bentoml_compile.engines.aot.cuda_graph import CaptureFailed, GraphedLibrary, captured
from bentoml_compile.engines.aot.library import Library, open_library
from bentoml_compile.engines.aot.weights import Layout
from bentoml_compile.engines.dynamo import GuardMiss
from bentoml_compile.engines.thread_state import modes
from bentoml_compile.shapes import ExampleInput, parameter_names

PACKAGE_FILE = "package.json"
CONSTANTS_FILE = "constants.safetensors"

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
        device: that of the export, cpu, or cuda:0 and the like; the code runs on each of its kind.
        inputs: in the order in which the library takes them.
        output_spec: the structure of what the method returns, as torch.utils._pytree writes it.
        output_constants: (leaf, value) of each leaf of the output that is no tensor; the library returns the others.
        ranges: smallest and largest size of each symbol.
        weights: by the name under which the library asks for them.
        constants: by the names under which the library asks for them; CONSTANTS_FILE holds their elements, in the order
            of memory.
    """

    library: str
    device: str
    inputs: tuple[Leaf, ...]
    output_spec: str
    output_constants: tuple[tuple[int, Constant], ...]
    ranges: dict[str, tuple[int, int]]
    weights: dict[str, Weight]
    constants: dict[str, Weight]

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
            weights=_weights(fields["weights"]),
            constants=_weights(fields["constants"]),
        )


def _weights(fields: Mapping[str, Mapping[str, Any]]) -> dict[str, Weight]:
    return {name: Weight(**{key: _tuple(value) for key, value in one.items()}) for name, one in fields.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def open_package(
    directory: Path,
    model: nn.Module,
    method: str,
    *,
    device: torch.device | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    graphed: ExampleInput | None = None,
) -> AotExecutable:
    """Opens a package with the live model's own tensors, by reference.

    Args:
        directory: where `export_package` wrote it, or a copy.
        model: the model that it was made from, or one of equal structure; not copied and not changed.
        device: another one of the package's kind, where the model is now.
        weights: by name in the model, instead of the model's.
        graphed: a call to capture in a CUDA graph, which then serves every call of the same sizes and strides; None
            means no graph.

    Raises:
        CaptureFailed: only with `graphed`.
        LibraryError: a weight is missing or differs in dtype, sizes or strides.
        OSError, ValueError, KeyError, TypeError: the directory is incomplete or altered.
    """
    package = Package.from_json((directory / PACKAGE_FILE).read_text())
    if graphed is not None and package.ranges:
        raise CaptureFailed(f"a graph is of one size, and the package was compiled for ranges: {package.ranges}")
    device = device or torch.device(package.device)
    constants = _load_constants(directory, package, device) if package.constants else {}
    library = open_library(
        directory / package.library,
        device=device,
        weights=_asked_for(package, tensors_of(model) if weights is None else weights, constants),
        expected={asked: weight.layout for asked, weight in {**package.weights, **package.constants}.items()},
        cubin_dir=directory,
        single_threaded=graphed is not None,
    )
    try:
        executable = AotExecutable(package, library, parameter_names(getattr(model, method)), constants)
        return executable if graphed is None else executable.graphed(graphed)
    except BaseException:
        library.close()
        raise


def save_constants(directory: Path, constants: Mapping[str, torch.Tensor]) -> None:
    """Writes CONSTANTS_FILE: each tensor's elements from its first to its last, in the order of memory."""
    elements = {}
    for name, tensor in constants.items():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        length = 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0
        elements[name] = tensor.as_strided((length,), (1,), tensor.storage_offset()).clone()
    save_file(elements, directory / CONSTANTS_FILE)


def _load_constants(directory: Path, package: Package, device: torch.device) -> dict[str, torch.Tensor]:
    try:
        elements = load_file(directory / CONSTANTS_FILE, device=str(device))
    except SafetensorError as error:
        raise ValueError(f"{CONSTANTS_FILE} is damaged: {error}") from error
    return {
        name: elements[name].clone().as_strided(constant.sizes, constant.strides)  # cloned: aligned as torch's own
        for name, constant in package.constants.items()
    }


def _asked_for(
    package: Package, tensors: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What there is of the library's weights, by the names that it asks for; `tensors` by their names in the model."""
    found = {asked: tensors[weight.name] for asked, weight in package.weights.items() if weight.name in tensors}
    return {**found, **constants}


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

    def __init__(
        self,
        package: Package,
        library: Library | BoundLibrary | GraphedLibrary,
        names: Sequence[str],
        constants: Mapping[str, torch.Tensor],
    ) -> None:
        self.package = package
        self._library = library
        self._tensors = constants  # of CONSTANTS_FILE
        self._inputs = [_located(leaf.path, names) for leaf in package.inputs]
        self._constants = sorted(package.output_constants)
        self._structure = _structure(package.output_spec, library.outputs + len(self._constants))
        self._device_type = torch.device(package.device).type
        self._surroundings = _surroundings(self._device_type)  # those of the export: the fingerprint holds them
        self._modes = modes()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The method's result.

        Raises:
            GuardMiss: autocast or the default dtype is another than when the package was opened, or a torch mode (e.g.
                `with torch.device(...)`, FakeTensorMode) would show eager's operators something else.
            LibraryError, RuntimeError: as Library.run.
        """
        if (found := _surroundings(self._device_type)) != self._surroundings:
            raise GuardMiss(f"autocast and default dtype are {found}, not {self._surroundings}")
        if modes() > self._modes:  # fewer is no matter: the boot's thread may have a default device, a worker's none
            raise GuardMiss("a TorchFunctionMode or TorchDispatchMode is active")
        tensors = self._find(args, kwargs)
        with _inference_mode(True):
            leaves: list[Any] = self._library.run(tensors)
        for index, constant in self._constants:  # in ascending order, so that each lands where it belongs
            leaves.insert(index, constant)
        return self._structure(leaves)

    def _find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The call's tensors, in the library's order."""
        tensors = []
        for name, position, path in self._inputs:
            value = kwargs[name] if name in kwargs else args[position]
            for key in path:
                value = value[key]
            tensors.append(value)
        return tensors

    def graphed(self, example: ExampleInput) -> AotExecutable:
        """The same by a CUDA graph of this call; takes the library over, which must be opened single_threaded.

        Raises:
            CaptureFailed: why no graph was made; the library is closed.
        """
        if isinstance(self._library, GraphedLibrary):
            return self
        return self._with(captured(self._library, self._find(example.args, example.kwargs)))

    def with_weights(self, tensors: Mapping[str, torch.Tensor]) -> AotExecutable:
        """Another executable of the same code, with other weights by reference, graphed if this one is.

        This one stays as it is: the caller switches to the other, then closes this. The package's files are not needed,
        but for CUDA kernels and by BoundLibrary.

        Args:
            tensors: by name in the model, of every parameter and buffer in `package.weights`. More are fine.

        Raises:
            LibraryError: a weight is missing or differs in dtype, sizes or strides.
            CaptureFailed: only if this one is graphed.
        """
        return self._with(self._library.with_weights(_asked_for(self.package, tensors, self._tensors)))

    def _with(self, library: Library | BoundLibrary | GraphedLibrary) -> AotExecutable:
        other = copy.copy(self)
        other._library = library
        return other

    def close(self) -> None:
        """Waits for calls under way and frees the library; a later call raises RuntimeError."""
        self._library.close()


# what torch.inference_mode enters, without a microsecond of Python around it; private, checked with torch 2.13.0
_inference_mode: Any = getattr(torch._C, "_InferenceMode", torch.inference_mode)


def _structure(output_spec: str, leaves: int) -> Callable[[list[Any]], Any]:
    """What puts so many leaves into the structure; a flat one at once, without walking through it.

    Raises:
        ValueError: the structure has another number of leaves.
    """
    spec = pytree.treespec_loads(output_spec)
    if spec.num_leaves != leaves:
        raise ValueError(f"the package's output has {spec.num_leaves} leaves, and its library makes {leaves}")
    if spec.is_leaf():
        return operator.itemgetter(0)
    node = pytree.SUPPORTED_NODES.get(spec.type)
    if node is not None and all(child.is_leaf() for child in spec.children()):
        return functools.partial(_unflatten, node.unflatten_fn, spec.context)
    return functools.partial(pytree.tree_unflatten, treespec=spec)


def _unflatten(function: Callable[[list[Any], Any], Any], context: Any, leaves: list[Any]) -> Any:
    return function(leaves, context)


def _surroundings(device_type: str) -> tuple[torch.dtype | None, torch.dtype]:
    """Autocast's dtype on the device, if it is on, and the default dtype: both decide the dtypes of results."""
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    return autocast, torch.get_default_dtype()


def _located(path: tuple[Any, ...], names: Sequence[str]) -> tuple[str, int, tuple[Any, ...]]:
    """(name, position, path inside of the argument): a call may pass the argument by either."""
    argument = path[1]
    if path[0] == 0:
        return names[argument] if argument < len(names) else "", argument, path[2:]
    return argument, names.index(argument) if argument in names else -1, path[2:]
