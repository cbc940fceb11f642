"""A compiled library, called off the interpreter lock.

    library = open_library(path, device=device, weights=dict(model.named_parameters()))
    [logits] = library.run([input_ids, attention_mask])
    library.close()

torch's own binding holds Python's lock for the whole run, and with it a worker's event loop. ctypes lets go of it, so
`Library` calls AOTInductor's C functions itself, and `BoundLibrary` (the binding) is for what it cannot do.

Neither checks an input but for their number: dtype, sizes, strides, device and values are the caller's to guard, and a
wrong one is a wrong answer or the end of the process.

**Calls at once.** `Run` hands each call one of the container's models, which share the weights; a call that fails
while another waits for a model does not wake it, so no more calls go in than there are models (`Slots`). Two callers on
two cores got 70 calls/s with one model and 128 with two (eager: 105). `RunSingleThreaded` needs no models, but its
header calls it unsafe among threads, and a call takes the same processor time by either. On CUDA a call is over before
its kernels have run: with a second model the next call need not wait for them.

**Threads of a call.** Nothing to set: in a fresh Python thread torch's operators take over `torch.set_num_threads` by
themselves, and generated code has its number of threads built in.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bentoml_compile.engines.aot import capi, handles
from bentoml_compile.engines.aot.bound import BoundLibrary
from bentoml_compile.engines.aot.capi import ConstantEntry, LibraryError, MissingSymbol
from bentoml_compile.engines.aot.slots import Slots
from bentoml_compile.engines.aot.weights import Layout, in_place

__all__ = ["BoundLibrary", "Layout", "Library", "LibraryError", "open_library"]

logger = logging.getLogger("bentoml_compile")


def calls_at_once(device: torch.device) -> int:
    """How many calls are worth running at once: one for each core of this process, or two on a CUDA device."""
    return 2 if device.type == "cuda" else len(os.sched_getaffinity(0))


def open_library(
    path: Path,
    *,
    device: torch.device,
    weights: Mapping[str, torch.Tensor],
    expected: Mapping[str, Layout] | None = None,
    num_models: int | None = None,
    cubin_dir: Path | None = None,
    single_threaded: bool = False,
) -> Library | BoundLibrary:
    """A Library, or a BoundLibrary where the file or this torch does not allow one; the debug log says why.

    Arguments and errors are those of Library.
    """
    kind: type[Library] | type[BoundLibrary] = Library
    if why := _needs_binding(path):
        logger.debug("%s runs by torch's binding: %s", path.name, why)
        kind = BoundLibrary
    return kind(
        path,
        device=device,
        weights=weights,
        expected=expected,
        num_models=num_models,
        cubin_dir=cubin_dir,
        single_threaded=single_threaded,
    )


def _needs_binding(path: Path) -> str:
    if needs_proxy_executor(path):
        return "it has operators that only the binding can run"
    try:
        handles.require()
    except MissingSymbol as error:
        return str(error)
    return ""


def needs_proxy_executor(path: Path) -> bool:
    """Whether the library has operators without a C function. AOTInductor then writes a .json of the same stem."""
    return path.with_suffix(".json").exists()


class Library:
    """One shared library of AOTInductor with one set of weights, mapped in place: nothing is copied anywhere.

    Args:
        path: the .so. A path stands for one content as long as the process lives, so name files by their content.
        device: what the library was compiled for; a CUDA device without an index means the current one.
        weights: the tensor of every constant that the library takes, by its name in the model. Given by reference,
            so their changes in place are seen. More names than that are fine.
        expected: the layout that each weight was compiled with. Without it only dtypes are checked, since a library
            does not tell sizes and strides.
        num_models: how many calls may run at once; more wait. None means `calls_at_once`.
        cubin_dir: where the CUDA kernels lie; None means where they were compiled.
        single_threaded: run by RunSingleThreaded, one call at a time whatever `num_models` says: on CUDA the one way
            that can be captured in a graph (https://github.com/pytorch/pytorch/pull/148601).

    Raises:
        LibraryError: not a library of AOTInductor, another file under a path that was opened before, or a weight
            that is missing or does not fit.
    """

    names: tuple[str, ...]  # of the weights that it takes
    inputs: int
    outputs: int
    devices: frozenset[torch.device]  # of the weights: a CUDA library may keep some on the CPU

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
        handles.require()
        self.name = path.name
        self.device = capi.with_index(device)
        self._on_cuda = self.device.type == "cuda"
        self.single_threaded = single_threaded
        self._num_models = 1 if single_threaded else num_models or calls_at_once(device)
        self._expected = expected
        self._cubin_dir = cubin_dir
        self._library = capi.load(path)
        self._run = getattr(self._library, f"AOTInductorModelContainerRun{'SingleThreaded' if single_threaded else ''}")
        self._hold(weights)

    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> Library:
        """Another container of the same code, with other weights; this one stays as it is, and may be closed.

        The file may be gone: its code is in memory. CUDA kernels that lie beside it are read once more.

        Raises:
            LibraryError: a weight is missing or does not fit.
        """
        other = copy.copy(self)
        other._hold(weights)
        return other

    def _hold(self, weights: Mapping[str, torch.Tensor]) -> None:
        """A container of its own, with these weights."""
        self._container = capi.create(self._library, self.device, self._num_models, self._cubin_dir)
        try:
            interface = capi.interface_of(self._library, self._container)
            tensors = in_place(interface.constants, weights, self._expected, self.device)
            self._give(interface.constants, tensors)
        except BaseException:
            self._library.AOTInductorModelContainerDelete(self._container)
            raise
        self.names = tuple(constant.original for constant in interface.constants)
        self.inputs, self.outputs = interface.inputs, interface.outputs
        self.devices = frozenset(tensor.device for tensor in tensors)
        slots = [_Arrays(self._container, self.inputs, self.outputs) for _ in range(self._num_models)]
        self._slots = Slots(slots, name=self.name)

    def _give(self, constants: Sequence[capi.Constant], tensors: Sequence[torch.Tensor]) -> None:
        """Hands the weights over; the container makes handles of its own, so ours are freed whatever happens."""
        given = handles.handles_of(tensors)
        entries = (ConstantEntry * len(given))(
            *(ConstantEntry(constant.name, handle) for constant, handle in zip(constants, given, strict=True))
        )
        try:
            code = self._library.AOTInductorModelContainerUpdateUserManagedConstantBufferPairs(
                self._container, entries, len(entries), False, True
            )
            capi.check(self._library, code)
        finally:
            handles.free(given)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """One call, from any thread. The caller has guarded the inputs; an output that the model leaves out is None.

        Raises:
            ValueError: not as many tensors as `inputs`.
            LibraryError: AOTInductor's message. The library is usable afterwards.
            RuntimeError: closed.
        """
        if len(tensors) != self.inputs:  # AOTInductor would end the process
            raise ValueError(f"the compiled library takes {self.inputs} tensors, not {len(tensors)}")
        arrays = self._slots.take()
        try:
            if not self._on_cuda:
                return self._call(tensors, arrays, None)
            with torch.cuda.device(self.device):
                return self._call(tensors, arrays, torch.cuda.current_stream(self.device).cuda_stream)
        finally:
            self._slots.give_back(arrays)

    def _call(self, tensors: Sequence[torch.Tensor], arrays: _Arrays, stream: int | None) -> list[torch.Tensor | None]:
        given, got = arrays.given, arrays.got
        got[:] = arrays.nothing  # the call leaves the place of a missing output as it is
        given[:] = handles.handles_of(tensors)
        code = self._run(*arrays.arguments, stream, None)
        if code:
            try:
                capi.check(self._library, code)
            finally:
                handles.free(given)  # those that the call has taken over are NULL now
                handles.free(got)
        return handles.tensors_of(got[:])

    def close(self) -> None:
        """Waits for the calls under way, then gives the weights back. A second call does nothing."""
        if not self._slots.drain():
            return
        if self._on_cuda:
            torch.cuda.synchronize(self.device)  # a call returns before its kernels have run
        weights = self._weights()
        self._library.AOTInductorModelContainerDelete(self._container)
        handles.free(weights)

    def _weights(self) -> list[int | None]:
        """The container's handles of the weights, which it needs while it lives and does not free itself."""
        entries, count = ctypes.POINTER(ConstantEntry)(), ctypes.c_size_t()
        code = self._library.AOTInductorModelContainerExtractConstantsMapEntries(
            self._container, ctypes.byref(entries), ctypes.byref(count), False
        )
        capi.check(self._library, code)
        return [entries[index].handle for index in range(count.value)]


class _Arrays:
    """Where one call at a time puts its handles; kept from call to call, since making them takes microseconds."""

    __slots__ = ("arguments", "given", "got", "nothing")

    def __init__(self, container: ctypes.c_void_p, inputs: int, outputs: int) -> None:
        self.given: Any = (ctypes.c_void_p * inputs)()
        self.got: Any = (ctypes.c_void_p * outputs)()
        self.nothing = [None] * outputs
        self.arguments = (container, *_place(self.given), *_place(self.got))  # of Run, up to the stream


def _place(array: Any) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(ctypes.addressof(array)), ctypes.c_size_t(len(array))
