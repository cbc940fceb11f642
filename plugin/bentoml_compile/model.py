"""compile_model() and CompiledModel: a model made ready before the first request, and a call that never compiles.

    encoder = compile_model(load_encoder(), example_inputs=[{"input_ids": ids, "attention_mask": mask}], name="encoder")
    encoder.report.outcome      # "compiled" on the first boot, "loaded" on the next
    encoder(input_ids=..., attention_mask=...)

This module knows neither BentoML nor OpenTelemetry: `bentoml_compile.compile_model` adds the service's config and the
listeners. The steps of a boot are in startup.py.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bentoml_compile.config import CompileConfig, parse_config
from bentoml_compile.engines import dynamo, jit
from bentoml_compile.engines.bounds import in_bounds
from bentoml_compile.engines.eager import device_of, eager_callable
from bentoml_compile.engines.limits import prompt_termination
from bentoml_compile.errors import ConfigError, UnpreparedInputError
from bentoml_compile.listener import Call, Compile, Executable, Listener, Listeners, Timeline
from bentoml_compile.prepared import PreparedShape
from bentoml_compile.report import CompileReport, GraphBreak
from bentoml_compile.shapes import (
    ExampleInput,
    Signature,
    batch_size_of,
    describe,
    fitted,
    parameter_names,
    read_example_inputs,
    relaxed,
    signature_of,
)
from bentoml_compile.startup import Startup

logger = logging.getLogger("bentoml_compile")

_open_models: weakref.WeakValueDictionary[str, CompiledModel] = weakref.WeakValueDictionary()
_explained: list[tuple[str, tuple[GraphBreak, ...]]] | None = None


def compile_model(
    model: torch.nn.Module,
    *,
    example_inputs: Sequence[Mapping[str, Any] | tuple[Any, ...]],
    name: str = "model",
    method: str = "forward",
    config: CompileConfig | Mapping[str, Any] | None = None,
    listeners: Sequence[Listener] = (),
    default_store: Path | None = None,
) -> CompiledModel:
    """Compiles (or loads) one method of a model for the signatures of `example_inputs`.

    Args:
        model: the module as it will serve: on its device, in its dtype, in eval mode. It is not copied.
        example_inputs: one entry per prepared shape: a dict of keyword arguments or a tuple of positional ones.
        name: unique in the process; artifacts, spans and metrics carry it.
        method: the method to compile; `forward` means calling the module, with its hooks.
        config: None means defaults.
        listeners: told about every step and call.
        default_store: where artifacts are kept if the config names no place; None: nowhere.

    Raises:
        ConfigError: a wrong setting, a wrong example input, or a second model of this name.
        GraphBreakError: `fullgraph: require` and the model is not one graph.
        VerificationError: `verify.strict` and the compiled result differs.
    """
    config = parse_config(config, where=f"compile_model(name={name!r})")
    examples = [example.clone() for example in read_example_inputs(example_inputs, model=name)]
    _check_model(model, method, name)
    names = parameter_names(getattr(model, method))
    shapes = [PreparedShape(name, describe(e, names), signature_of(names, e.args, e.kwargs), e) for e in examples]
    shapes = list({shape.label: shape for shape in shapes}.values())
    timeline = Timeline(Listeners(listeners))
    timeline.listeners.tell("preparing", name)
    with (
        prompt_termination(),
        timeline.stage("startup", model=name, mode=config.mode, fullgraph=config.fullgraph) as stage,
    ):
        startup = Startup(model, method, name, config, names, shapes, timeline, default_store)
        if _explained is not None:
            _explained.append((name, jit.find_graph_breaks(model, method, examples)))
        else:
            startup.run()
        report = startup.report((time.time_ns() - stage.started_ns) / 1e9)
        stage.attributes.update(
            engine=report.engine,
            outcome=report.outcome,
            fingerprint=report.fingerprint,
            graph_breaks=len(report.graph_breaks),
        )
    timeline.listeners.tell("ready", report)
    _say_ready(report)
    compiled = CompiledModel(model, method, config, names, startup, report, timeline.listeners)
    _open_models[name] = compiled
    return compiled


def _check_model(model: Any, method: str, name: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"compile_model(name={name!r}): model must be a torch.nn.Module, not {type(model).__name__}")
    if not callable(getattr(model, method, None)):
        raise ConfigError(f"compile_model(name={name!r}): {type(model).__name__} has no method {method!r}")
    if name in _open_models:
        gc.collect()  # an earlier service instance may wait for it
    if name in _open_models:
        raise ConfigError(
            f"compile_model(name={name!r}): this process has a compiled model of that name; give each its own name, "
            "or close() the other"
        )
    if model.training:
        logger.warning("model %r is in training mode; call model.eval() first for inference", name)


def _say_ready(report: CompileReport) -> None:
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in report.phases.items() if seconds >= 0.05)
    engines = ", ".join(
        f"{shape.signature} → {shape.engine}" + (f" ({shape.speedup:.2f}x)" if shape.speedup else "")
        for shape in report.shapes
    )
    logger.info(
        "model %r: %s in %.2f s%s; %s",
        report.model,
        report.outcome,
        report.seconds,
        f" ({phases})" if phases else "",
        engines,
    )


@contextlib.contextmanager
def explaining() -> Iterator[list[tuple[str, tuple[GraphBreak, ...]]]]:
    """Inside, compile_model compiles nothing and appends (name, graph breaks) to the list instead."""
    global _explained
    _explained = []
    try:
        yield _explained
    finally:
        _explained = None


@dataclass(frozen=True, slots=True)
class _Unprepared:
    """What serves a signature that was not prepared; implements listener.Executable."""

    model: str
    engine: str = "eager"
    label: str = "unprepared"
    prepared: bool = False


@dataclass(frozen=True, slots=True)
class _Serving:
    """What answers calls; replaced whole, so that no call sees half of a change."""

    eager: Callable[..., Any]
    exact: dict[Signature | None, PreparedShape]
    relaxed: dict[Signature, PreparedShape]

    @classmethod
    def of(cls, eager: Callable[..., Any], shapes: Sequence[PreparedShape]) -> _Serving:
        exact: dict[Signature | None, PreparedShape] = {}
        by_copy: dict[Signature, PreparedShape] = {}
        for shape in shapes:
            if shape.signature is not None:
                exact[shape.signature] = shape
                if not shape.writes_inputs:
                    by_copy.setdefault(relaxed(shape.signature), shape)
        return cls(eager, exact, by_copy)

    def almost(self, signature: Signature | None) -> PreparedShape | None:
        """The prepared shape that differs in nothing but what a copy of the tensors puts right."""
        return self.relaxed.get(relaxed(signature)) if signature is not None else None


_SAID_AT_MOST = 50
_WOULD_CHANGE_THE_MODEL = frozenset(
    ("to", "cpu", "cuda", "xpu", "to_empty", "half", "float", "double", "bfloat16", "type", "train", "compile")
)


class CompiledModel:
    """Calls a model's method: compiled where the input's signature was prepared, else as `on_unprepared` says.

    Takes and returns exactly what the method does, from any thread, always under `torch.inference_mode()`. Reads the
    model's attributes through. What is changed on the model after start-up is not seen by ahead-of-time code; under
    jit, Dynamo's guards notice much of it, and such calls run eagerly. Weights replaced in place are fine with both.

    Attributes:
        report: what the boot did.
        recompiles: how many compiles have happened inside calls since.
    """

    report: CompileReport
    recompiles: int

    def __init__(
        self,
        model: torch.nn.Module,
        method: str,
        config: CompileConfig,
        names: tuple[str, ...],
        startup: Startup,
        report: CompileReport,
        listeners: Listeners,
    ) -> None:
        dynamo.start_watching()
        self.__dict__.update(
            _model=model,
            _names=names,
            _artifact=startup.artifact,
            _serving=_Serving.of(eager_callable(model, method), startup.shapes),
            _unprepared=_Unprepared(report.model),
            _rejects=config.enabled and config.on_unprepared == "reject",
            _listeners=listeners,
            _on_cuda=device_of(model).type == "cuda",
            _lock=threading.Lock(),
            _said=set(),
            report=report,
            recompiles=0,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The story of a request: signature, the prepared executable, result.

        Raises:
            UnpreparedInputError: `on_unprepared: reject` and the signature was not prepared.
            Exception: whatever the model itself raises for this input.
        """
        serving: _Serving = self._serving
        signature = signature_of(self._names, args, kwargs)
        shape = serving.exact.get(signature)
        if shape is None:
            if (shape := serving.almost(signature)) is not None:
                args, kwargs = fitted(shape.example, self._names, args, kwargs)
            else:
                self._check_unprepared(args, kwargs)
        executable: Executable = shape if shape is not None else self._unprepared
        fallback: str | None = None
        error: BaseException | None = None
        clock = _DeviceClock() if self._on_cuda and self._listeners.tracing() else None
        started = time.time_ns()
        try:
            if shape is None or (run := shape.run) is None or not in_bounds(shape.bounds or (), args, kwargs):
                with torch.inference_mode():
                    return serving.eager(*args, **kwargs)
            try:
                return run(*args, **kwargs)
            except Exception as failure:
                fallback = self._explain_fallback(failure)
                with torch.inference_mode():
                    return serving.eager(*args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._tell(executable, args, kwargs, started, fallback, clock, error)

    def close(self) -> None:
        """Frees the compiled code and the name. A later call raises RuntimeError."""
        if _open_models.get(self.report.model) is self:
            del _open_models[self.report.model]
        if self._artifact is not None:
            self._artifact.release()
        shapes = self._serving.exact.values()
        self.__dict__.update(_artifact=None, _serving=_Serving.of(self._closed, ()), _rejects=False)
        for shape in shapes:
            shape.serve_eagerly("closed")  # waits for calls that are under way

    def _closed(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"model {self.report.model!r} is closed")

    def _check_unprepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        action = "reject" if self._rejects else "eager"
        self._listeners.tell("unprepared", self.report.model, action)
        if not self._rejects and len(self._said) >= _SAID_AT_MOST:
            return
        given = describe(ExampleInput(args, kwargs), self._names)
        if not self._rejects:
            self._say_once(f"not prepared, answered eagerly: {given}")
        else:
            prepared = "\n".join(f"  {shape.signature}" for shape in self.report.shapes)
            raise UnpreparedInputError(
                f"model {self.report.model!r}: this input was not prepared: {given}\nprepared are:\n{prepared}"
            )

    def _explain_fallback(self, failure: Exception) -> str:
        """Why a prepared shape is answered eagerly this time; said once per reason in the log."""
        reason = "guard" if isinstance(failure, dynamo.GuardMiss) else "call_failed"
        said = f"{reason}: {failure if reason == 'guard' else type(failure).__name__}"
        self._say_once(
            f"a prepared shape was answered eagerly ({said}); was the model, autocast or a torch setting changed after "
            "start-up?",
            None if reason == "guard" else failure,
        )
        self._listeners.tell("fallback", self.report.model, reason)
        return reason

    def _say_once(self, message: str, error: BaseException | None = None) -> None:
        """Once in a process, and only so many different things: a client's inputs must not fill the log."""
        if message not in self._said and len(self._said) < _SAID_AT_MOST:
            self._said.add(message)
            logger.warning("model %r: %s", self.report.model, message, exc_info=error)

    def _tell(
        self,
        executable: Executable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        started: int,
        fallback: str | None,
        clock: _DeviceClock | None,
        error: BaseException | None,
    ) -> None:
        ended = time.time_ns()
        compiles: Sequence[Compile] = ()
        if dynamo.watch.compiles:
            compiles = [compile_ for compile_ in dynamo.watch.take() if compile_.started_ns >= started]
            with self._lock:
                self.__dict__["recompiles"] += len(compiles)
        listeners = self._listeners
        if not listeners:
            return
        call = Call(executable, started, ended, compiles, fallback, error)
        if listeners.tracing():
            call.shape = executable.label if executable.prepared else describe(ExampleInput(args, kwargs), self._names)
            call.batch_size = batch_size_of(args, kwargs)
            call.device_seconds = clock.seconds() if clock else None
        listeners.tell("called", call)

    def __getattr__(self, name: str) -> Any:
        # only for what this class does not have
        if name.startswith("__") or "_model" not in self.__dict__:
            raise AttributeError(name)
        if name in _WOULD_CHANGE_THE_MODEL:
            raise AttributeError(f"a compiled model is fixed at start-up: call {name}() on the model before that")
        return getattr(self.__dict__["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"a compiled model is fixed at start-up: set {name!r} on the model before compile_model() is called"
        )

    def __repr__(self) -> str:
        report = self.report
        return (
            f"<CompiledModel {report.model!r} {report.engine} {report.outcome}, {len(report.shapes)} prepared shapes>"
        )


class _DeviceClock:
    """Seconds that the GPU spent on a call; only made for sampled calls, since reading it waits for the device."""

    def __init__(self) -> None:
        self._started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._started.record()

    def seconds(self) -> float:
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended.record()
        ended.synchronize()
        return float(self._started.elapsed_time(ended)) / 1e3
