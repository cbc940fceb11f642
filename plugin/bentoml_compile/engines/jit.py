"""The jit engine: `torch.compile`, made ready shape by shape before the first request."""

from __future__ import annotations

import contextlib
import inspect
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from bentoml_compile.config import CompileConfig, nearest
from bentoml_compile.engines import dynamo
from bentoml_compile.engines.build import OnFailure, Record, examine, shape_failure
from bentoml_compile.engines.copies import copied
from bentoml_compile.engines.eager import call_as_traced, eager_callable
from bentoml_compile.engines.own_thread import OwnThread
from bentoml_compile.engines.phases import recorded_phases
from bentoml_compile.errors import ConfigError
from bentoml_compile.listener import Compile
from bentoml_compile.prepared import PreparedShape, Target
from bentoml_compile.ranges import Place, resized, sizes_to_trace, tensor_at
from bentoml_compile.report import GraphBreak
from bentoml_compile.shapes import ExampleInput, by_name, parameter_names

T = TypeVar("T")

CUDA_GRAPH_RUNS = 2  # after the run that compiles: CUDA graph trees record in the second and replay from the third on

# Dynamo moves the code that it has found to the front of its list, where another thread that goes through the list
# misses it: 94 of 8000 calls by 8 threads with two shapes (torch 2.13.0), and none where it is asked twice.
_LOOK_UPS = 3


class GraphBroken(Exception):
    """`fullgraph` was asked for and Dynamo could not give it; `__cause__` is Dynamo's own error."""


class JitProgram:
    """One model under `torch.compile`. Open it for compiling with `preparing()`; otherwise it never compiles.

    Attributes:
        thread: where it compiles and runs, whoever calls; None: where it is called. CUDA graphs belong to the thread
            that recorded them (https://github.com/pytorch/pytorch/issues/123177).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        method: str,
        config: CompileConfig,
        *,
        fullgraph: bool,
        threads: bool = True,
        name: str = "model",
    ) -> None:
        self.eager = eager_callable(model, method)
        self._names = parameter_names(getattr(model, method))
        self._has_cuda_graphs = uses_cuda_graphs(model, config)
        self._fullgraph = fullgraph
        self._compiled = torch.compile(
            self.eager,
            fullgraph=fullgraph,
            dynamic=config.dynamic if isinstance(config.dynamic, bool) else None,
            **_backend(config, threads),
        )
        self._gate = dynamo.install_gate(self._compiled)
        if self._gate is not None:
            self._gate.open = False
        self._shares = 0
        self._sharing = threading.Lock()
        self.thread = OwnThread(name, _cuda_devices(model)) if self._has_cuda_graphs else None

    @contextmanager
    def preparing(self, shapes: int) -> Iterator[None]:
        """Compiling is allowed inside, for `shapes` signatures without meeting Dynamo's recompile limit."""
        limits = {name: max(getattr(torch._dynamo.config, name), 2 * shapes + 8) for name in _LIMITS}
        limits["accumulated_recompile_limit"] += _OTHERS  # which counts the code of all programs of a class
        # profile-guided dynamic shapes would make a warm boot trace another graph than the cold one
        with (
            torch._dynamo.config.patch(automatic_dynamic_local_pgo=False, automatic_dynamic_remote_pgo=False, **limits),
            _without_openssl(),
        ):
            if self._gate is not None:
                self._gate.open = True
            try:
                yield
            finally:
                if self._gate is not None:
                    self._gate.open = False

    def prepare(self, example: ExampleInput, places: Sequence[tuple[Place, int, int]] = ()) -> None:
        """Compiles for the example's signature and warms up, under inference mode as in serving.

        The sizes at `places` become symbols, from the smallest to the largest size that stands beside each.

        Raises:
            GraphBroken: the model is not one graph and `fullgraph` was asked for.
            Exception: whatever the backend raises.
        """
        for run in range(1 + CUDA_GRAPH_RUNS * self._has_cuda_graphs):
            try:
                self(*(inputs := self._marked(example.clone(), places)).args, **inputs.kwargs)
            except Exception as error:
                if run == 0 and self._fullgraph and _means_graph_break(error):
                    raise GraphBroken(str(error)) from error
                raise

    def _marked(self, inputs: ExampleInput, places: Sequence[tuple[Place, int, int]]) -> ExampleInput:
        arguments = by_name(inputs.args, inputs.kwargs, self._names)
        for place, low, high in places:
            torch._dynamo.mark_dynamic(tensor_at(place, arguments), place.dim, min=low, max=high)
        return inputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs compiled code. Raises dynamo.GuardMiss instead of compiling outside of `preparing()`.

        With a thread also what OwnThread.run raises.
        """
        if self.thread is None:
            return self._run(args, kwargs)
        compiles: list[Compile] = []
        try:
            return self.thread.run(self._run_in_thread, args, kwargs, compiles)
        finally:
            if compiles:
                dynamo.watch.compiles.extend(compiles)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.inference_mode():
            for _ in range(_LOOK_UPS - 1):
                try:
                    return self._compiled(*args, **kwargs)
                except dynamo.GuardMiss:
                    continue
            return self._compiled(*args, **kwargs)

    def _run_in_thread(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiles: list[Compile]) -> Any:
        """The result is the caller's own; `compiles` gets those that happened, which are noted by thread."""
        try:
            return copied(self._run(args, kwargs))
        finally:
            if dynamo.watch.compiles:
                compiles.extend(dynamo.watch.take())

    def do(self, function: Callable[..., T], *args: Any) -> T:
        """Calls the function where the program compiles and runs."""
        return function(*args) if self.thread is None else self.thread.run(function, *args)

    def share(self) -> JitProgram | Share:
        """What a prepared shape calls. A program with a thread ends it when all of its shares are closed."""
        if self.thread is None:
            return self
        with self._sharing:
            self._shares += 1
        return Share(self)

    def close(self) -> None:
        """Waits for the call under way, where there is a thread, and ends that; calls raise RuntimeError then."""
        if self.thread is not None:
            self.thread.close()

    def drop_share(self) -> None:
        with self._sharing:
            self._shares -= 1
            last = not self._shares
        if last:
            self.close()


class Share:
    """The program, for one of the shapes that it serves: a shape that goes over to eager must not end the others'."""

    def __init__(self, program: JitProgram) -> None:
        self._program: JitProgram | None = program
        self._call = program.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def close(self) -> None:
        """The last share's waits as JitProgram.close. A second call does nothing."""
        program, self._program = self._program, None
        if program is not None:
            program.drop_share()


def build(
    target: Target,
    shapes: Sequence[PreparedShape],
    *,
    cache: Path | None,
    fullgraph: bool,
    record: Record,
    on_failure: OnFailure,
) -> None:
    """Gives each of these shapes code to run: compiled, or loaded as far as the Inductor cache directory has it.

    A shape whose compile fails is told to `on_failure` and keeps no code. A size of 1 is a constant to Dynamo, so
    where a range begins with it, another shape is added to the target's.

    Raises:
        GraphBroken, ConfigError
        Exception: a failure that every shape shares.
    """
    shapes = [*shapes, *_split_ones_off(target, shapes)]
    for shape in shapes:
        examine(target, shape, record)
    threads = not any(shape.computes_indices for shape in shapes)
    program = JitProgram(
        target.model, target.method, target.config, fullgraph=fullgraph, threads=threads, name=target.name
    )
    with contextlib.closing(program.share()):  # its thread ends where no shape serves by it
        program.do(_compile, program, shapes, cache, fullgraph, record, on_failure)


def _compile(
    program: JitProgram,
    shapes: Sequence[PreparedShape],
    cache: Path | None,
    fullgraph: bool,
    record: Record,
    on_failure: OnFailure,
) -> None:
    try:
        with (
            dynamo.inductor_cache(cache),
            recorded_phases() as phases,
            dynamo.recorded_graph_breaks() as breaks,
            program.preparing(len(shapes)),
        ):
            for shape in shapes:
                try:
                    _prepare(program, shape)
                    shape.serve_by("jit", program.share())
                except GraphBroken:
                    for whole in shapes:  # they are compiled again, by another program
                        whole.serve_eagerly("")
                    raise
                except Exception as error:
                    on_failure(shape, shape_failure(error))
    finally:
        record.took(phases)
        if not fullgraph:
            record.breaks = tuple(dict.fromkeys((*record.breaks, *breaks)))


def _split_ones_off(target: Target, shapes: Iterable[PreparedShape]) -> list[PreparedShape]:
    split = []
    waiting = list(shapes)
    while waiting:
        shape = waiting.pop()
        while one := next((size for size in shape.sizes if size.begins_at_one), None):
            waiting.append(shape.split_one_off(one))
            split.append(waiting[-1])
    target.shapes.extend(split)
    return split


def _prepare(program: JitProgram, shape: PreparedShape) -> None:
    traced = sizes_to_trace(shape.example, shape.names, shape.sizes)
    example = resized(shape.example, shape.names, zip(shape.sizes, traced, strict=True))
    varying = [size for size in shape.sizes if not size.is_fixed]
    if varying:  # Dynamo runs a function that it does not look into (allow_in_graph) with fake tensors
        call_as_traced(program.eager, example.clone())
    program.prepare(example, [(place, size.low, size.high) for size in varying for place in size.places])


def _without_openssl() -> AbstractContextManager[Any]:
    """Inductor runs `openssl` to name its precompiled C++ headers (torch 2.13); slim images lack it."""
    if shutil.which("openssl") or not hasattr(torch._inductor.config, "cpp_cache_precompile_headers"):
        return nullcontext()
    patch: AbstractContextManager[Any] = torch._inductor.config.patch(cpp_cache_precompile_headers=False)
    return patch


_OTHERS = 4096
_LIMITS = ("recompile_limit", "accumulated_recompile_limit")


def _backend(config: CompileConfig, threads: bool = True) -> dict[str, Any]:
    """`torch.compile` takes a mode or options, not both: for Inductor the options go on top of the mode's.

    Without `threads`, Inductor's own CPU code has no OpenMP region: an index out of range in it is an exception then,
    and not the process's end (torch 2.13). Matrix products and convolutions are libraries, and stay parallel.
    """
    arguments: dict[str, Any] = {"backend": config.backend}
    if config.backend != "inductor":
        arguments["options"] = dict(config.options) or None
    elif config.options or not threads:
        forced = {} if threads else {"cpp.threads": 1}
        arguments["options"] = {**torch._inductor.list_mode_options(config.mode), **config.options, **forced}
    else:
        arguments["mode"] = config.mode
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # torch 2.13; two models may share code
        arguments["isolate_recompiles"] = True
    return arguments


def check_backend(config: CompileConfig, *, where: str) -> None:
    """Refuses a backend or an Inductor option that torch does not know, before anything is compiled.

    Raises:
        ConfigError
    """
    backends = torch._dynamo.list_backends(None)
    if config.backend not in backends:
        hint = nearest(config.backend, backends)
        raise ConfigError(
            f"{where}: torch_compile.backend={config.backend!r} is not a torch.compile backend{hint}; "
            f"known: {', '.join(sorted(backends))}"
        )
    known = torch._inductor.list_options()
    for option in config.options if config.backend == "inductor" else ():
        if option.replace("-", "_") not in known:
            raise ConfigError(
                f"{where}: torch_compile.options: {option!r} is not an Inductor option{nearest(option, known)}; "
                "torch._inductor.list_options() lists them"
            )
    try:
        torch.compile(lambda: None, **_backend(config))  # compiles nothing, but reads the options
    except RuntimeError as error:
        raise ConfigError(f"{where}: torch_compile.options={dict(config.options)!r}: {error}") from None


def find_graph_breaks(model: torch.nn.Module, method: str, examples: list[ExampleInput]) -> tuple[GraphBreak, ...]:
    """Every graph break of the model on these inputs, without compiling code.

    A model that Dynamo cannot trace at all has one break, Dynamo's own error.
    """
    found: dict[GraphBreak, None] = {}
    for example in examples:
        program = JitProgram(model, method, CompileConfig(backend="eager"), fullgraph=False)
        try:
            # fullgraph=True captures these too, so they are not breaks there
            with (
                torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True),
                dynamo.recorded_graph_breaks() as breaks,
                program.preparing(len(examples)),
            ):
                program.prepare(example)
        except Exception as error:
            breaks = [*breaks, break_from(error)]
        found.update(dict.fromkeys(breaks))
    return tuple(found)


def break_from(error: BaseException) -> GraphBreak:
    """The graph break that a Dynamo error stands for."""
    return dynamo.graph_break(str(error), getattr(error, "real_stack", None))


def _means_graph_break(error: Exception) -> bool:
    from torch._dynamo import exc

    if isinstance(error, exc.BackendCompilerFailed):
        return False
    # the RuntimeError: Dynamo skipped the whole frame ("found no compiled frames", torch 2.13)
    return isinstance(error, exc.TorchDynamoException) or "no compiled frames" in str(error)


def uses_cuda_graphs(model: torch.nn.Module, config: CompileConfig) -> bool:
    """Whether torch.compile makes CUDA graphs for this model, by the config or torch's own settings."""
    if not _cuda_devices(model):
        return False
    if config.backend != "inductor":
        return config.backend == "cudagraphs"
    options = {**torch._inductor.list_mode_options(config.mode), **config.options}
    return bool(options.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))


def _cuda_devices(model: torch.nn.Module) -> set[int]:
    return {tensor.device.index for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
