"""The jit engine: `torch.compile`, made ready shape by shape before the first request."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from bentoml_compile.config import CompileConfig, nearest
from bentoml_compile.engines import dynamo
from bentoml_compile.engines.build import OnFailure, Record, examine, shape_failure
from bentoml_compile.engines.eager import eager_callable
from bentoml_compile.engines.phases import recorded_phases
from bentoml_compile.errors import ConfigError
from bentoml_compile.prepared import PreparedShape
from bentoml_compile.report import GraphBreak
from bentoml_compile.shapes import ExampleInput

CUDA_GRAPH_RUNS = 2  # after the run that compiles: CUDA graph trees record in the second and replay from the third on


class GraphBroken(Exception):
    """`fullgraph` was asked for and Dynamo could not give it; `__cause__` is Dynamo's own error."""


class JitProgram:
    """One model under `torch.compile`. Open it for compiling with `preparing()`; otherwise it never compiles."""

    def __init__(
        self, model: torch.nn.Module, method: str, config: CompileConfig, *, fullgraph: bool, threads: bool = True
    ) -> None:
        self._eager = eager_callable(model, method)
        self._has_cuda_graphs = uses_cuda_graphs(model, config)
        self._fullgraph = fullgraph
        self._compiled = torch.compile(
            self._eager, fullgraph=fullgraph, dynamic=config.dynamic, **_backend(config, threads)
        )
        self._gate = dynamo.install_gate(self._compiled)
        if self._gate is not None:
            self._gate.open = False

    @contextmanager
    def preparing(self, shapes: int) -> Iterator[None]:
        """Compiling is allowed inside, for `shapes` signatures without meeting Dynamo's recompile limit."""
        limits = {name: max(getattr(torch._dynamo.config, name), 2 * shapes + 8) for name in _LIMITS}
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

    def prepare(self, example: ExampleInput) -> None:
        """Compiles for the example's signature and warms up, under inference mode as in serving.

        Raises:
            GraphBroken: the model is not one graph and `fullgraph` was asked for.
            Exception: whatever the backend raises.
        """
        for run in range(1 + CUDA_GRAPH_RUNS * self._has_cuda_graphs):
            try:
                self(*(inputs := example.clone()).args, **inputs.kwargs)
            except Exception as error:
                if run == 0 and self._fullgraph and _means_graph_break(error):
                    raise GraphBroken(str(error)) from error
                raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs compiled code. Raises dynamo.GuardMiss instead of compiling outside of `preparing()`."""
        with torch.inference_mode():
            result = self._compiled(*args, **kwargs)
            return _copied(result) if self._has_cuda_graphs else result


def build(
    model: torch.nn.Module,
    method: str,
    config: CompileConfig,
    names: tuple[str, ...],
    shapes: Sequence[PreparedShape],
    *,
    cache: Path | None,
    fullgraph: bool,
    record: Record,
    on_failure: OnFailure,
) -> None:
    """Gives each shape compiled code to run: compiled, or loaded as far as the Inductor cache directory has it.

    A shape whose compile fails is told to `on_failure` and keeps no code.

    Raises:
        GraphBroken, ConfigError
        Exception: a failure that every shape shares.
    """
    eager = eager_callable(model, method)
    for shape in shapes:
        examine(shape, eager, names, record)
    threads = not any(shape.computes_indices for shape in shapes)
    program = JitProgram(model, method, config, fullgraph=fullgraph, threads=threads)
    try:
        with (
            dynamo.inductor_cache(cache),
            recorded_phases() as phases,
            dynamo.recorded_graph_breaks() as breaks,
            program.preparing(len(shapes)),
        ):
            for shape in shapes:
                try:
                    program.prepare(shape.example)
                    shape.serve_by("jit", program)
                except GraphBroken:
                    raise
                except Exception as error:
                    on_failure(shape, shape_failure(error))
    finally:
        record.phases += phases
        if not fullgraph:
            record.breaks = tuple(dict.fromkeys((*record.breaks, *breaks)))


def _without_openssl() -> AbstractContextManager[Any]:
    """Inductor runs `openssl` to name its precompiled C++ headers (torch 2.13); slim images lack it."""
    if shutil.which("openssl") or not hasattr(torch._inductor.config, "cpp_cache_precompile_headers"):
        return nullcontext()
    patch: AbstractContextManager[Any] = torch._inductor.config.patch(cpp_cache_precompile_headers=False)
    return patch


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
    on_cuda = any(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
    return on_cuda and bool(
        {**torch._inductor.list_mode_options(config.mode), **config.options}.get("triton.cudagraphs")
    )


def _copied(result: Any) -> Any:
    """The next replay of a CUDA graph overwrites its outputs."""
    from torch.utils import _pytree as pytree

    return pytree.tree_map_only(torch.Tensor, torch.clone, result)
