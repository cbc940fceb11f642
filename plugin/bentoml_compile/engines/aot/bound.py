"""A compiled library behind torch's own Python binding: for what `Library` cannot do.

The binding runs every operator, but holds the interpreter lock for the whole run.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from bentoml_compile.engines.aot import capi
from bentoml_compile.engines.aot.capi import LibraryError, MissingSymbol
from bentoml_compile.engines.aot.slots import Slots
from bentoml_compile.engines.aot.weights import Layout, in_place


class BoundLibrary:
    """The same as Library, with its arguments, attributes and errors, at the cost of the interpreter lock.

    Calls run one at a time whatever `num_models` says, and no CUDA graph can be captured of them whatever
    `single_threaded` says. Weights that it was given stay in memory after `close`: the binding has no way to give them
    back (torch 2.13.0).
    """

    names: tuple[str, ...]
    inputs: int
    outputs: int

    def __init__(
        self,
        path: Path,
        *,
        device: torch.device,
        weights: Mapping[str, torch.Tensor],
        expected: Mapping[str, Layout] | None = None,
        num_models: int | None = None,
        cubin_dir: Path | None = None,
        single_threaded: bool = False,
    ) -> None:
        device = capi.with_index(device)
        self._path = path
        self._again = functools.partial(BoundLibrary, path, device=device, expected=expected, cubin_dir=cubin_dir)
        interface = _interface(capi.load(path), device, cubin_dir)
        tensors = in_place(interface.constants, weights, expected, device)
        self.names = tuple(constant.original for constant in interface.constants)
        self.inputs, self.outputs = interface.inputs, interface.outputs
        given = {constant.name.decode(): tensor for constant, tensor in zip(interface.constants, tensors, strict=True)}
        try:
            runner = _runner(path, device, cubin_dir)
            runner.update_constant_buffer(given, False, True, True)
        except RuntimeError as error:
            raise _in_short(error) from error
        self._slots: Slots[Callable[..., Any]] = Slots([runner.run], name=path.name)
        # kept, since only one call at a time enters it
        self._on_device: AbstractContextManager[Any] = (
            torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        )

    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> BoundLibrary:
        """As Library.with_weights, but the file must still be there.

        Raises:
            LibraryError: the file is gone or was replaced, or a weight is missing or does not fit.
        """
        if not self._path.exists():
            raise LibraryError(f"{self._path.name} is gone, and torch's binding opens the file again for other weights")
        return self._again(weights=weights)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """As Library.run."""
        if len(tensors) != self.inputs:
            raise ValueError(f"the compiled library takes {self.inputs} tensors, not {len(tensors)}")
        run = self._slots.take()
        try:
            with self._on_device:  # the binding takes the stream that is current on the current device
                outputs: list[torch.Tensor | None] = run(list(tensors))
            return outputs
        except RuntimeError as error:
            raise _in_short(error) from error
        finally:
            self._slots.give_back(run)

    def close(self) -> None:
        """Waits for the call under way."""
        self._slots.drain()


def _runner(path: Path, device: torch.device, cubin_dir: Path | None) -> Any:
    """torch's binding of one library. Private, checked with torch 2.13.0; MissingSymbol if it is not there."""
    name = f"AOTIModelContainerRunner{device.type.capitalize()}"
    runner = getattr(getattr(torch._C, "_aoti", None), name, None)
    if runner is None:
        raise MissingSymbol(f"torch {torch.__version__} has no torch._C._aoti.{name}")
    return runner(str(path), 1) if device.type == "cpu" else runner(str(path), 1, str(device), str(cubin_dir or ""))


def _interface(library: ctypes.CDLL, device: torch.device, cubin_dir: Path | None) -> capi.Interface:
    """By a container of our own: the binding does not tell how many inputs there are."""
    container = capi.create(library, device, 1, cubin_dir)
    try:
        return capi.interface_of(library, container)
    finally:
        library.AOTInductorModelContainerDelete(container)


def _in_short(error: RuntimeError) -> LibraryError:
    """The first line of the binding's message; the rest is a C++ trace, which `__cause__` keeps."""
    return LibraryError(str(error).strip().partition("\n")[0])
