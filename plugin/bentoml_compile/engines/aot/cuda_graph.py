"""A CUDA graph around a compiled library: one replay instead of a launch for each kernel.

    library = open_library(path, device=device, weights=weights, single_threaded=True)
    graphed = captured(library, example_tensors)
    [logits] = graphed.run([input_ids, attention_mask])

AOTInductor makes no graphs (torch 2.13.0), and its `Run` cannot be captured, since it queries events;
`RunSingleThreaded` can (https://github.com/pytorch/pytorch/pull/148601). A graph reads and writes the same memory at
each replay: a call copies its inputs there and its outputs away, and one call at a time may. Weights are read where
they lie, so that their changes in place count at the next call.

`Graph`, which is all that touches torch.cuda, has not run on a GPU yet: the tests put a graph of the CPU in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bentoml_compile.engines.aot.bound import BoundLibrary
from bentoml_compile.engines.aot.capi import LibraryError
from bentoml_compile.engines.aot.library import Library
from bentoml_compile.engines.aot.slots import Slots

_WARM_UPS = 3  # as torch.cuda.make_graphed_callables
_capturing = threading.Lock()  # one capture at a time in a process, says torch


class CaptureFailed(Exception):
    """No CUDA graph of this library and these inputs can be made; says why."""


def captured(library: Library | BoundLibrary, tensors: Sequence[torch.Tensor]) -> GraphedLibrary:
    """Runs the library a few times with these inputs, then captures one more run.

    Args:
        library: opened with `single_threaded`, and not used by others. It is taken over: closed with the
            GraphedLibrary, or at once where capturing fails.
        tensors: an example of the inputs. Every later call has its sizes, strides and dtypes.

    Raises:
        CaptureFailed: the library or a tensor does not allow a graph, or the capture failed.
        ValueError: not as many tensors as the library takes.
    """
    try:
        if isinstance(library, BoundLibrary):
            raise CaptureFailed("the compiled library runs by torch's binding, whose calls cannot be captured")
        _require_capturable(library, tensors)
        inputs = [_own(tensor) for tensor in tensors]
        graph = Graph(library.device)
        outputs = graph.record(lambda: library.run(inputs))
        _require_device(library, "outputs", {output.device for output in outputs if output is not None})
        return GraphedLibrary(library, graph, inputs, _plan(inputs, outputs))
    except BaseException as error:
        library.close()
        if isinstance(error, (RuntimeError, LibraryError)):
            raise CaptureFailed(str(error).strip().partition("\n")[0]) from error
        raise


def _require_capturable(library: Library, tensors: Sequence[torch.Tensor]) -> None:
    if not library.single_threaded:
        raise CaptureFailed("the compiled library was not opened with single_threaded")
    _require_device(library, "inputs", {tensor.device for tensor in tensors})
    _require_device(library, "weights", library.devices)


def _require_device(library: Library, what: str, devices: Set[torch.device]) -> None:
    """What is read or written by the CPU would be so at the capture alone."""
    if others := devices - {library.device}:
        names = ", ".join(sorted(map(str, others)))
        raise CaptureFailed(f"{what} are on {names}: a graph on {library.device} would keep their values")


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of equal strides, which may be written to in inference mode and out of it."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )


class GraphedLibrary:
    """The same as Library, for one set of sizes, by a CUDA graph; made by `captured`.

    Calls from any threads and streams run one after the other, each in its caller's current stream.
    """

    def __init__(self, library: Library, graph: Graph, inputs: Sequence[torch.Tensor], plan: _Plan) -> None:
        self.names, self.inputs, self.outputs = library.names, library.inputs, library.outputs
        self._library = library
        self._inputs, self._graph, self._plan = inputs, graph, plan
        self._graphs = Slots([graph], name=library.name)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """As Library.run. The outputs are the caller's own, and alias its inputs and each other as in eager.

        Raises:
            ValueError: not as many tensors as `inputs`.
            RuntimeError: closed, or a CUDA error.
        """
        if len(tensors) != self.inputs:
            raise ValueError(f"the compiled library takes {self.inputs} tensors, not {len(tensors)}")
        with self._turn() as graph, torch.no_grad():
            for mine, tensor in zip(self._inputs, tensors, strict=True):
                mine.copy_(tensor)
            graph.replay()
            return self._plan.outputs(tensors)

    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> GraphedLibrary:
        """Another container of the same code and another graph, with other weights; this one stays as it is.

        Raises:
            LibraryError: a weight is missing or does not fit.
            CaptureFailed: as `captured`.
            RuntimeError: closed.
        """
        with self._turn():
            example = [_own(tensor) for tensor in self._inputs]
        return captured(self._library.with_weights(weights), example)

    def close(self) -> None:
        """Waits for the calls under way, then frees graph and library. A second call does nothing."""
        if not self._graphs.drain():
            return
        self._graph.free()
        self._inputs, self._plan = (), _Plan((), ())  # they hold memory
        self._library.close()

    @contextmanager
    def _turn(self) -> Iterator[Graph]:
        graph = self._graphs.take()
        try:
            with graph.turn():
                yield graph
        finally:
            self._graphs.give_back(graph)


@dataclass(frozen=True, slots=True)
class _View:
    """Where an output lies: in one of the pieces, which are the call's inputs and then the copies of the blocks."""

    piece: int
    place: tuple[Sequence[int], Sequence[int], int] | None  # sizes, strides, offset in elements; None: all of the piece

    def of(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        piece = pieces[self.piece]
        if self.place is None:
            return piece
        sizes, strides, offset = self.place
        return piece.as_strided(sizes, strides, piece.storage_offset() + offset)


@dataclass(frozen=True, slots=True)
class _Plan:
    """From the graph's memory to a call's outputs.

    Attributes:
        blocks: what the graph writes and a call copies, each part of memory once, so that outputs which share memory
            still do.
        views: one for each output; None where the model leaves it out.
    """

    blocks: Sequence[torch.Tensor]
    views: Sequence[_View | None]

    def outputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        pieces = [*tensors, *(block.clone() for block in self.blocks)]
        return [None if view is None else view.of(pieces) for view in self.views]


def _plan(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor | None]) -> _Plan:
    """`inputs` and `outputs` are those of the captured run."""
    pieces = list(inputs)
    found = {_memory(tensor): index for index, tensor in enumerate(inputs)}
    views: list[_View | None] = []
    for output in outputs:
        if output is None:
            views.append(None)
            continue
        if (memory := _memory(output)) not in found:
            found[memory] = len(pieces)
            pieces.append(_block([other for other in outputs if other is not None and _memory(other) == memory]))
        piece = pieces[found[memory]]
        place = (output.shape, output.stride(), int(output.storage_offset() - piece.storage_offset()))
        views.append(_View(found[memory], None if place == (piece.shape, piece.stride(), 0) else place))
    return _Plan(pieces[len(inputs) :], views)


def _memory(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that are views of each other; but a view by another dtype is copied by itself."""
    return (tensor.untyped_storage().data_ptr(), tensor.dtype) if tensor.numel() else id(tensor)


def _block(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """What to clone for these outputs, which share memory: the one itself if that keeps its strides, or their span."""
    first = outputs[0]
    if all(output is first for output in outputs) and first.clone().stride() == first.stride():
        return first
    low = min(output.storage_offset() for output in outputs)
    return first.as_strided((max(map(_end, outputs)) - low,), (1,), low)


def _end(tensor: torch.Tensor) -> int:
    """One past the last element in memory."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + 1 + sum((size - 1) * stride for size, stride in steps)


class Graph:
    """One run, captured; and the turns of those who replay it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]  # the last turn is over

    def record(self, run: Callable[[], list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """What the captured run returns: memory that each replay writes.

        Kernels are loaded and libraries set up by the runs before, on the stream of the capture. Other threads may go
        on using CUDA, and allocate.

        Raises:
            RuntimeError: torch or CUDA could not capture it.
        """
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with (
                _capturing,
                torch.cuda.stream(stream),
            ):  # torch.cuda.graph does not set the stream back where a capture fails
                for _ in range(_WARM_UPS):
                    run()
                with (
                    _own_workspaces(),
                    torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"),
                ):
                    outputs = run()
            torch.cuda.current_stream().wait_stream(stream)
        return outputs

    @contextmanager
    def turn(self) -> Iterator[None]:
        """What is queued inside runs in the caller's current stream, after all of the turn before."""
        with torch.cuda.device(self._device):
            self._over.wait()
            try:
                yield
            finally:
                self._over.record()

    def replay(self) -> None:
        self._graph.replay()

    def free(self) -> None:
        """Waits for what is queued, and gives the graph's memory back."""
        torch.cuda.synchronize(self._device)
        self._graph.reset()


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """cuBLAS keeps its workspaces for each stream; the graph's must be in its own memory, and used by no one else.

    As torch's own CUDA graphs have it (torch/_inductor/cudagraph_trees.py). Private, checked with torch 2.13.0; where
    it is missing, nothing is captured.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is None:
        raise RuntimeError(f"torch {torch.__version__} has no torch._C._cuda_clearCublasWorkspaces")
    clear()
    try:
        yield
    finally:
        clear()
