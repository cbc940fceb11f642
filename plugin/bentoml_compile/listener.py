"""How the core tells what it does, without knowing who listens.

`model.py` and the engines open a `Stage` around each step of a boot and report every call of a compiled model.
Telemetry subclasses `Listener`; the core never imports it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from bentoml_compile.report import CompileReport

logger = logging.getLogger("bentoml_compile")

Value = str | bool | int | float


@dataclass(slots=True, eq=False)
class Event:
    """Something that happened inside a stage, e.g. a fallback to eager."""

    name: str
    time_ns: int
    attributes: dict[str, Value]


@dataclass(slots=True, eq=False)
class Stage:
    """A timed step of a boot: "startup" or a descendant of it.

    Names are those of the spans without their prefix: startup, lookup, load, compile, phase.dynamo, verify, measure,
    store, wait. Times are nanoseconds since the epoch.
    """

    name: str
    parent: Stage | None
    started_ns: int
    ended_ns: int | None = None
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Compile:
    """A Dynamo compile that happened inside a call."""

    started_ns: int
    ended_ns: int
    reason: str


class Executable(Protocol):
    """What served a call: one prepared shape, or eager for a signature that was not prepared."""

    @property
    def model(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def label(self) -> str:
        """The prepared shape's signature, or "unprepared"; few distinct values, fit for a metric's label."""

    @property
    def prepared(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Call:
    """One call of a compiled model. Times are nanoseconds since the epoch."""

    executable: Executable
    started_ns: int
    ended_ns: int
    compiles: Sequence[Compile] = ()  # that happened inside of it
    fallback: str | None = None  # why a prepared shape was answered eagerly this time
    error: BaseException | None = None
    queue_seconds: float = 0.0
    # the rest only if `tracing()` said so when the call began
    shape: str | None = None
    batch_size: int | None = None
    device_seconds: float | None = None
    padding_ratio: float | None = None  # share of the padded inputs that is no data; None: not padded

    @property
    def engine(self) -> str:
        """What really answered: eager where it stepped in for compiled code."""
        return "eager" if self.fallback is not None else self.executable.engine


class Listener:
    """Every method does nothing here; override what you need. An exception raised in one is logged and dropped."""

    hears_plain_calls: ClassVar[bool] = True  # False: `answered` has nothing to do in this class

    def preparing(self, model: str) -> None:
        """`compile_model` was called; its startup stage is about to begin."""

    def stage_started(self, stage: Stage) -> None:
        """A stage begins; its parent, if any, has begun before in this thread."""

    def stage_ended(self, stage: Stage) -> None:
        """The same object as at its start, now with `ended_ns`, its final attributes and its events."""

    def ready(self, report: CompileReport) -> None:
        """`compile_model` is about to return; its startup stage is over."""

    def fallback(self, model: str, reason: str) -> None:
        """Something ended in eager. `reason` is one of few fixed words (no_compiler, time_limit, ...)."""

    def unprepared(self, model: str, action: str) -> None:
        """A call whose signature was not prepared; action is "eager" or "reject"."""

    def tracing(self) -> bool:
        """Whether the current call's trace is sampled, so that details that cost time are wanted."""
        return False

    def called(self, call: Call) -> None:
        """One call of a compiled model is over (in the caller's thread and context)."""

    def answered(self, executable: Executable, started_ns: int, ended_ns: int) -> None:
        """Told in place of `called` where a call, like nearly all, has nothing to tell but its length: it is not traced
        and did not queue, nothing was compiled, nothing failed.

        Override it to do without a `Call`: a small model answers in ten microseconds.
        """
        self.called(Call(executable, started_ns, ended_ns))


class Listeners:
    """Several listeners as one; telemetry must never break a boot or a request, so their exceptions end here."""

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self._listeners = tuple(listeners)
        self._tracing = tuple(one for one in self._listeners if _overrides(one, "tracing"))
        self._answered = tuple(one for one in self._listeners if one.hears_plain_calls)
        self._warned = False

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def tell(self, method: str, *args: Any) -> None:
        for listener in self._listeners:
            try:
                getattr(listener, method)(*args)
            except Exception:
                self._warn(listener, method)

    def tracing(self) -> bool:
        for listener in self._tracing:
            try:
                if listener.tracing():
                    return True
            except Exception:
                self._warn(listener, "tracing")
        return False

    def answered(self, executable: Executable, started_ns: int, ended_ns: int) -> None:
        for listener in self._answered:
            try:
                listener.answered(executable, started_ns, ended_ns)
            except Exception:
                self._warn(listener, "answered")

    def _warn(self, listener: Listener, method: str) -> None:
        if not self._warned:  # once: a broken exporter must not fill the log
            self._warned = True
            logger.exception("telemetry: %s.%s failed; serving goes on", type(listener).__name__, method)


def _overrides(listener: Listener, method: str) -> bool:
    return getattr(type(listener), method) is not getattr(Listener, method)


class Timeline:
    """The stages of one boot, nested by `with`.

    A step of the boot begins where the one before it ended, so that the steps add up to the whole.
    """

    def __init__(self, listeners: Listeners) -> None:
        self.listeners = listeners
        self.ended: dict[str, float] = {}  # seconds by name, phases left out
        self._open: list[Stage] = []
        self._last_step_ns: int | None = None

    @property
    def current(self) -> Stage:
        return self._open[-1]

    @property
    def root(self) -> Stage:
        return self._open[0]

    @contextlib.contextmanager
    def stage(self, name: str, **attributes: Value) -> Iterator[Stage]:
        stage = self._start(name, attributes)
        try:
            yield stage
        except BaseException as error:
            stage.error = error
            raise
        finally:
            self._open.remove(stage)
            self._end(stage, time.time_ns())

    def past(self, name: str, parent: Stage, started_ns: int, ended_ns: int, **attributes: Value) -> Stage:
        """A stage that is already over, such as one of torch's own phases."""
        stage = Stage(name, parent, started_ns, attributes=attributes)
        self.listeners.tell("stage_started", stage)
        self._end(stage, ended_ns)
        return stage

    def event(self, name: str, **attributes: Value) -> None:
        self.current.events.append(Event(name, time.time_ns(), attributes))

    def _start(self, name: str, attributes: dict[str, Value]) -> Stage:
        parent = self._open[-1] if self._open else None
        started_ns = time.time_ns()
        if parent is not None and parent.parent is None:
            started_ns = parent.started_ns if self._last_step_ns is None else self._last_step_ns
        stage = Stage(name, parent, started_ns, attributes=attributes)
        self._open.append(stage)
        self.listeners.tell("stage_started", stage)
        return stage

    def _end(self, stage: Stage, ended_ns: int) -> None:
        stage.ended_ns = ended_ns
        if stage.parent is not None and stage.parent.parent is None:
            self._last_step_ns = ended_ns
        if not stage.name.startswith("phase."):
            self.ended[stage.name] = self.ended.get(stage.name, 0.0) + (ended_ns - stage.started_ns) / 1e9
        self.listeners.tell("stage_ended", stage)
