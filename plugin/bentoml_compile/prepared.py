"""PreparedShape: which calls it stands for (one signature, or a range of sizes), what serves them, and why.

`Target` is what a boot compiles: one method of one model, and its prepared shapes.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bentoml_compile.config import CompileConfig
from bentoml_compile.engines.aot.package import tensors_of
from bentoml_compile.engines.aot.shadow import shadow
from bentoml_compile.engines.bounds import Bound
from bentoml_compile.engines.eager import eager_callable
from bentoml_compile.ranges import (
    FreeSize,
    Ranges,
    corners,
    free_sizes,
    label,
    open_signature,
    resized,
    size_at,
)
from bentoml_compile.report import Engine, ShapeReport
from bentoml_compile.shapes import ExampleInput, Signature, by_name, signature_of


@dataclass(eq=False, slots=True)
class PreparedShape:
    """Filled step by step by a boot, read by every call; implements listener.Executable.

    Attributes:
        example: an input that stands for all others, also for their values.
        names: of the method's positional parameters.
        sizes: what may vary; empty for a single signature.
        run: compiled code, None while (or where) eager serves.
        compiled_by: what made code for it, also where eager is faster and serves.
        bounds: of the integer inputs that index; None: not looked for yet.
        by_cuda_graph: code made ahead of time is replayed from a CUDA graph.
        writes_inputs: then a call's tensors must not be replaced by copies with other strides.
        asked: the label under which the config and the examples asked for it.
    """

    model: str
    example: ExampleInput
    names: tuple[str, ...]
    sizes: tuple[FreeSize, ...] = ()
    label: str = ""
    asked: str = ""
    engine: Engine = "eager"
    run: Callable[..., Any] | None = None
    compiled_by: Engine | None = None
    bounds: tuple[Bound, ...] | None = None
    computes_indices: bool = False
    writes_inputs: bool = False
    by_cuda_graph: bool = False
    speedup: float | None = None
    max_error: float | None = None
    reason: str = ""
    prepared: bool = True
    learned: bool = False  # from calls; the least used makes room for others
    uses: int = 0  # of a learned one, roughly

    def __post_init__(self) -> None:
        self.limit_to(self.sizes)
        self.asked = self.asked or self.label

    @property
    def signature(self) -> Signature | None:
        """The example's."""
        return signature_of(self.names, self.example.args, self.example.kwargs)

    @property
    def identity(self) -> str:
        """All of it that code depends on, as text."""
        if not self.sizes:
            return self.label
        groups = [size.to_json() for size in self.sizes]
        return f"{self.label} traced from {label(self.example, self.names, ())}, varying {groups}"

    def limit_to(self, sizes: Sequence[FreeSize]) -> None:
        """Only calls of these sizes from here on; the example is one of them."""
        arguments = by_name(self.example.args, self.example.kwargs, self.names)
        nearest = [(size, min(max(size_at(size.places[0], arguments), size.low), size.high)) for size in sizes]
        self.sizes = tuple(sizes)
        self.example = resized(self.example, self.names, nearest)
        self.label = label(self.example, self.names, sizes)

    def split_one_off(self, size: FreeSize) -> PreparedShape:
        """Takes the size of 1 out of a range; the shape, yet to be compiled, that has it."""
        at_one = tuple(other.fixed_at(1) if other is size else other for other in self.sizes)
        split = PreparedShape(self.model, self.example, self.names, at_one, asked=self.asked)
        self.limit_to([other.from_two() if other is size else other for other in self.sizes])
        return split

    def inputs(self) -> list[ExampleInput]:
        """Those that find out about the shape: the example and the corners of its ranges; not to be written to."""
        return [self.example, *corners(self.example, self.names, self.sizes)] if self.sizes else [self.example]

    def reading(self, tensors: Mapping[str, torch.Tensor]) -> PreparedShape:
        """The same code with other weights, by their names in the model; without code where it cannot have others.

        Raises:
            LibraryError: they do not fit.
        """
        other = copy.copy(self)
        with_weights = getattr(self.run, "with_weights", None)
        other.run = with_weights(tensors) if with_weights is not None else None
        return other

    def serve_by(self, engine: Engine, run: Callable[..., Any]) -> None:
        self.engine = self.compiled_by = engine
        self.run, self.reason = run, ""

    def serve_eagerly(self, reason: str) -> None:
        run, self.engine, self.run, self.reason = self.run, "eager", None, reason
        if close := getattr(run, "close", None):  # a library has memory of its own
            close()

    def report(self) -> ShapeReport:
        return ShapeReport(self.label, self.engine, self.speedup, self.max_error, self.reason)

    def decisions(self) -> dict[str, Any]:
        """What an artifact keeps, so that a warm boot neither verifies nor measures; plain JSON types."""
        return {
            **dataclasses.asdict(self.report()),
            "asked": self.asked,
            "sizes": [size.to_json() for size in self.sizes],
            "compiled_by": self.compiled_by,
            "bounds": [{**dataclasses.asdict(bound), "path": list(bound.path)} for bound in self.bounds or ()],
            "computes_indices": self.computes_indices,
            "writes_inputs": self.writes_inputs,
            "by_cuda_graph": self.by_cuda_graph,
        }

    def decided(self, decisions: Mapping[str, Any]) -> PreparedShape:
        """The inverse of `decisions`, for the shape that was asked for; whoever loads the code sets `run`."""
        sizes = tuple(map(FreeSize.from_json, decisions["sizes"]))
        shape = PreparedShape(self.model, self.example, self.names, sizes, asked=self.asked)
        shape.engine, shape.reason, shape.compiled_by = (decisions[key] for key in ("engine", "reason", "compiled_by"))
        shape.speedup, shape.max_error = decisions["speedup"], decisions["max_error"]
        shape.bounds = tuple(Bound(**bound) for bound in decisions["bounds"])
        for key in ("computes_indices", "writes_inputs", "by_cuda_graph"):
            setattr(shape, key, decisions[key])
        return shape


def prepared_shapes(
    model: str, examples: Iterable[ExampleInput], names: tuple[str, ...], ranges: Ranges
) -> list[PreparedShape]:
    """One for each example outside of the ranges, and one for all examples inside that differ in nothing else."""
    shapes: list[PreparedShape] = []
    inside: dict[Signature, list[ExampleInput]] = {}
    for example in examples:
        sizes = free_sizes(ranges, [example], names)
        signature = signature_of(names, example.args, example.kwargs) if sizes else None
        if signature is None:
            shapes.append(PreparedShape(model, example, names))
        else:
            inside.setdefault(open_signature(signature, ranges), []).append(example)
    for alike in inside.values():
        shapes.append(PreparedShape(model, alike[0], names, free_sizes(ranges, alike, names)))
    return list({shape.label: shape for shape in shapes}.values())


@dataclass(eq=False, slots=True)
class Weights:
    """Of a model that may be given others while something is compiled for it.

    Attributes:
        lock: held while they are replaced, and while compiled code is compared with the model.
        replaced: how often they were.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    replaced: int = 0


@dataclass(eq=False, slots=True)
class Target:
    """What is compiled: one method of a model, for some shapes, as the config says.

    `shapes` changes during a boot: a range may turn out not to hold for a size of 1, which then is a shape of its own.
    `rehearsal` is a copy of the model that trials run in its place while the model itself serves: it shares the
    parameters, and has its own buffers.
    """

    model: torch.nn.Module
    method: str
    name: str
    config: CompileConfig
    names: tuple[str, ...]
    examples: tuple[ExampleInput, ...]
    rehearsal: torch.nn.Module | None = None
    shapes: list[PreparedShape] = field(default_factory=list)
    weights: Weights = field(default_factory=Weights)
    _read: int = 0  # `weights.replaced` when its code last took the present ones

    def __post_init__(self) -> None:
        self.shapes.extend(self.asked())

    @property
    def eager(self) -> Callable[..., Any]:
        """What a caller would call without us."""
        return eager_callable(self.model, self.method)

    @property
    def trial(self) -> Callable[..., Any]:
        """As `eager`, for finding out what the model does; may run while the model serves."""
        return eager_callable(self.model if self.rehearsal is None else self.rehearsal, self.method)

    def of_examples(self, examples: tuple[ExampleInput, ...]) -> Target:
        """The same model for other examples."""
        return Target(self.model, self.method, self.name, self.config, self.names, examples, weights=self.weights)

    def rehearse(self) -> None:
        """From here on trials run a copy.

        Raises:
            Exception: whatever an attribute of the model raises that cannot be copied.
        """
        self.rehearsal = shadow(self.model)
        for module in self.rehearsal.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.clone()

    def asked(self) -> list[PreparedShape]:
        """The shapes as they were before anything was found out about them."""
        return prepared_shapes(self.name, self.examples, self.names, self.config.ranges)

    def forget(self) -> None:
        """Back to the shapes that were asked for; the code of the others is closed."""
        for shape in self.shapes:
            shape.serve_eagerly("")
        self.shapes[:] = self.asked()

    def read_present_weights(self) -> bool:
        """Code that was opened before the weights were replaced reads the old ones; whether there was any."""
        if self._read == self.weights.replaced:
            return False
        self._read = self.weights.replaced
        tensors = tensors_of(self.model)
        for shape in self.shapes:
            if shape.compiled_by == "aot" and shape.run is not None:
                before, shape.run = shape.run, shape.reading(tensors).run
                getattr(before, "close")()  # noqa: B009  # a plain callable to the type checker
        return True

    def compiled_shapes(self) -> list[PreparedShape]:
        return [shape for shape in self.shapes if shape.run is not None]
