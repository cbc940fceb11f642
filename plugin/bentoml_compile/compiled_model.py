"""CompiledModel: the story of a request. A call never waits for a compiler unless the config says so."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bentoml_compile.artifacts.places import NO_PLACES, Places
from bentoml_compile.background import background
from bentoml_compile.engines import dynamo
from bentoml_compile.engines.bounds import in_bounds
from bentoml_compile.engines.eager import device_of
from bentoml_compile.engines.own_thread import last_wait
from bentoml_compile.errors import UnpreparedInputError
from bentoml_compile.late import LateShapes
from bentoml_compile.listener import Call, Compile
from bentoml_compile.padding import Padded
from bentoml_compile.prepared import PreparedShape
from bentoml_compile.report import CompileReport
from bentoml_compile.serving import Serving
from bentoml_compile.shapes import ExampleInput, Signature, batch_size_of, describe, signature_of
from bentoml_compile.startup import Startup
from bentoml_compile.weights import replace_weights

logger = logging.getLogger("bentoml_compile")

open_models: weakref.WeakValueDictionary[str, CompiledModel] = weakref.WeakValueDictionary()
"""This process's models by name."""

MOST_LEARNED = 32  # shapes of a model; the least used one makes room


@dataclass(frozen=True, slots=True)
class _Unprepared:
    """What serves a signature that was not prepared; implements listener.Executable."""

    model: str
    engine: str = "eager"
    label: str = "unprepared"
    prepared: bool = False


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
    _serving: Serving

    def __init__(self, startup: Startup, report: CompileReport, places: Places = NO_PLACES) -> None:
        dynamo.start_watching()
        target, listeners = startup.target, startup.timeline.listeners
        config = target.config
        self.__dict__.update(
            _target=target,
            _names=target.names,
            _artifacts={} if startup.artifact is None else {"": startup.artifact},
            # the shapes of a boot in the background are its own until they are verified: eager answers for these
            _serving=Serving(
                target.eager,
                target.shapes if startup.is_over else target.asked(),
                target.names,
                config.ranges,
                startup.padding,
            ),
            _unprepared=_Unprepared(report.model),
            _pending=not startup.is_over,
            _stopped=False,
            _late=LateShapes(target, listeners, places, self._install),
            _listeners=listeners,
            _on_cuda=device_of(target.model).type == "cuda",
            _lock=threading.Lock(),
            _replacing=threading.Lock(),
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
        serving = self._enter()
        shape: PreparedShape | None = None
        padded: Padded | None = None
        waited: Compile | None = None  # for a compile of this call's own
        fallback: str | None = None
        error: BaseException | None = None
        traced = self._listeners.tracing()
        clock = _DeviceClock() if traced and self._on_cuda else None
        started = time.time_ns()
        try:
            signature = signature_of(self._names, args, kwargs)
            shape = serving.exact.get(signature)
            if shape is None:
                found = serving.look_further(signature, args, kwargs)
                if found is None and self._is_to_be_compiled(signature, args, kwargs):
                    serving.calls.pop()  # weights can be replaced while it waits
                    try:
                        waited = self._late.prepare_now(signature, ExampleInput(args, kwargs))
                    finally:
                        serving = self._enter()
                    found = serving.look_further(signature, args, kwargs)
                if found is not None:
                    shape, args, kwargs, padded = found.shape, found.args, found.kwargs, found.padded
            if shape is None or (run := shape.run) is None or not in_bounds(shape.bounds or (), args, kwargs):
                with torch.inference_mode():
                    return serving.eager(*args, **kwargs)
            try:
                return run(*args, **kwargs) if padded is None else padded.run(run, args, kwargs)
            except Exception as failure:
                fallback = self._explain_fallback(failure)
                with torch.inference_mode():
                    return serving.eager(*args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            serving.calls.pop()
            ended = time.time_ns()
            executable = shape or self._unprepared
            queued = last_wait.arrived_ns >= started
            if queued or traced or fallback or error or waited or padded or dynamo.watch.compiles:
                call = Call(executable, started, ended, fallback=fallback, error=error)
                call.queue_seconds = last_wait.seconds if queued else 0.0
                call.padding_ratio = padded.waste if padded else None
                self._tell(call, waited, traced, clock, args, kwargs)
            else:
                self._listeners.answered(executable, started, ended)

    def update_weights(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Other values for all weights, while calls go on; none of them sees some old and some new ones.

        Nothing is compiled. While it runs, a second set of weights is in memory. What shares memory in the model still
        does. Buffers that are not in the model's state dict stay as they are.

        Args:
            state_dict: as for torch's `load_state_dict(strict=True)`; of names that are one tensor, one is enough.

        Raises:
            ValueError: it does not fit the model, or the code has its weights built in.
            RuntimeError: the model is closed, or the compiled code takes no other weights.
            Exception: the model cannot be copied. Whatever is raised, the old weights go on serving.
        """
        started = time.perf_counter()
        with self._target.weights.lock, self._replacing:
            if self._is_closed:
                self._closed()
            self._target.weights.replaced += 1
            replace_weights(self._target, self._serving, state_dict, self._switch)
        logger.info("model %r: weights replaced in %.2f s", self.report.model, time.perf_counter() - started)

    @property
    def is_ready(self) -> bool:
        """Whether the service may say so, by `ready_when`; false for good where the config asked to stop the boot."""
        return self._target.config.ready_when == "eager" or not (self._pending or self._stopped)

    def close(self) -> None:
        """Frees the compiled code and the name. A later call raises RuntimeError."""
        if open_models.get(self.report.model) is self:
            del open_models[self.report.model]
        with self._replacing:
            shapes, artifacts = self._serving.shapes, list(self._artifacts.values())
            self._artifacts.clear()
            self._switch(Serving(self._closed, (), (), {}))
        for shape in shapes:
            shape.serve_eagerly("closed")  # waits for calls that are under way
        for artifact in artifacts:
            artifact.release()

    # what serves

    def _enter(self) -> Serving:
        """What answers the call that begins now; it is among its `calls` until it is over."""
        while True:
            serving = self._serving
            serving.calls.append(None)
            if serving is self._serving:
                return serving
            serving.calls.pop()  # it was replaced in between, and may have been drained

    def _switch(self, serving: Serving) -> None:
        self.__dict__["_serving"] = serving

    @property
    def _is_closed(self) -> bool:
        return bool(self._serving.eager == self._closed)

    def _adopt(self, startup: Startup, report: CompileReport) -> None:
        """A boot in the background is over: from the next call on, its shapes serve."""
        target = startup.target
        with self._replacing:
            if self._is_closed:
                _discard(startup)
                return
            target.read_present_weights()  # once more: they may have been replaced since the boot compared
            made = (target.eager, target.shapes, target.names, target.config.ranges, startup.padding)
            self._switch(Serving(*made, before=self._serving))
            if startup.artifact is not None:
                self._artifacts[""] = startup.artifact
            self.__dict__["report"] = report

    def _settle(self) -> None:
        """The boot's span has ended, too: who has found the model ready sees that it did."""
        self.__dict__["_pending"] = False

    def _stop(self, error: BaseException | None) -> None:
        """The config asked for a hard stop, in the background: never ready."""
        self.__dict__["_stopped"] = True
        logger.error("model %r: will not be ready: %s", self.report.model, error)

    def _install(self, startup: Startup) -> None:
        """A shape that came late; the least used one of those that did may have to go."""
        new = startup.target.compiled_shapes()
        with self._replacing:
            if self._is_closed or not new:
                _discard(startup)
                return
            startup.target.read_present_weights()
            serving = self._serving
            learned = sorted((shape for shape in serving.shapes if shape.learned), key=lambda shape: shape.uses)
            dropped = learned[: max(0, len(learned) + len(new) - MOST_LEARNED)]
            shapes = [*(shape for shape in serving.shapes if shape not in dropped), *new]
            self._switch(serving.with_shapes(shapes, serving.eager))
            if startup.artifact is not None:
                self._artifacts[new[0].label] = startup.artifact
            report = dataclasses.replace(self.report, shapes=tuple(shape.report() for shape in shapes))
            self.__dict__["report"] = report
        self._listeners.tell("ready", report)
        if dropped:
            background.run(functools.partial(self._drop, serving, dropped))

    def _drop(self, serving: Serving, shapes: Sequence[PreparedShape]) -> None:
        serving.drain()
        for shape in shapes:
            shape.serve_eagerly("dropped")
            with self._replacing:
                artifact = self._artifacts.pop(shape.label, None)
            if artifact is not None:
                artifact.release()
            self._late.forget(shape.signature)  # at last: from here on it may have another artifact of that label

    def _closed(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"model {self.report.model!r} is closed")

    # what a call meets

    def _is_to_be_compiled(self, signature: Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Of a call that was not prepared: refuses it, or counts it, or has the call wait for a compile."""
        config = self._target.config
        action = config.on_unprepared if config.enabled else "eager"
        if self._is_closed or (self._pending and (config.pad or action == "compile")):
            return False  # what is not there yet may be there in a moment
        self._listeners.tell("unprepared", self.report.model, action)
        inputs = ExampleInput(args, kwargs)
        if action == "reject":
            prepared = "\n".join(f"  {shape.label}" for shape in self._serving.shapes)
            raise UnpreparedInputError(
                f"model {self.report.model!r}: this input was not prepared: {describe(inputs, self._names)}\n"
                f"prepared are:\n{prepared}"
            )
        if action == "compile":
            return True
        if config.enabled and not self._pending:
            self._late.saw(signature, inputs)
        if len(self._said) < _SAID_AT_MOST:
            self._say_once(f"not prepared, answered eagerly: {describe(inputs, self._names)}")
        return False

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

    def _say_once(
        self, message: str, error: BaseException | None = None, *, key: str = "", level: int = logging.WARNING
    ) -> None:
        """Once in a process, and only so many different things: a client's inputs must not fill the log."""
        key = key or message
        if key not in self._said and len(self._said) < _SAID_AT_MOST:
            self._said.add(key)
            logger.log(level, "model %r: %s", self.report.model, message, exc_info=error)

    def _tell(
        self,
        call: Call,
        waited: Compile | None,
        traced: bool,
        clock: _DeviceClock | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Of a call that was more than an answer."""
        compiles = [one for one in dynamo.watch.take() if one.started_ns >= call.started_ns]
        call.compiles = [*compiles, waited] if waited is not None else compiles
        if call.compiles:
            with self._lock:
                self.__dict__["recompiles"] += len(call.compiles)
            self._say_compiled(call)
        if traced:
            given = ExampleInput(args, kwargs)
            plain = call.executable.prepared and call.padding_ratio is None
            call.shape = call.executable.label if plain else describe(given, self._names)
            call.batch_size = batch_size_of(args, kwargs)
            call.device_seconds = clock.seconds() if clock else None
        self._listeners.tell("called", call)

    def _say_compiled(self, call: Call) -> None:
        for compile_ in call.compiles:
            seconds = (compile_.ended_ns - compile_.started_ns) / 1e9
            if dynamo.is_recompile_limit(compile_):
                call.fallback = call.fallback or "recompile_limit"
                self._listeners.tell("fallback", self.report.model, "recompile_limit")
                self._say_once(f"{compile_.reason}; Dynamo runs that code eagerly from here on", level=logging.ERROR)
            else:
                self._say_once(
                    f"compiled inside of a call, for {seconds:.1f} s: {compile_.reason}", key=compile_.reason
                )

    def __getattr__(self, name: str) -> Any:
        # only for what this class does not have
        if name.startswith("__") or "_target" not in self.__dict__:
            raise AttributeError(name)
        if name in _WOULD_CHANGE_THE_MODEL:
            raise AttributeError(f"a compiled model is fixed at start-up: call {name}() on the model before that")
        return getattr(self.__dict__["_target"].model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"a compiled model is fixed at start-up: set {name!r} on the model before compile_model() is called"
        )

    def __repr__(self) -> str:
        report = self.report
        return (
            f"<CompiledModel {report.model!r} {report.engine} {report.outcome}, {len(report.shapes)} prepared shapes>"
        )


def _discard(startup: Startup) -> None:
    """Nobody wants it any more."""
    for shape in startup.target.shapes:
        shape.serve_eagerly("closed")
    if startup.artifact is not None:
        startup.artifact.release()


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
