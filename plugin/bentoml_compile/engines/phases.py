"""Where the time of a compile went, by torch's own timers (`torch._dynamo.utils.dynamo_timed`).

Checked with torch 2.13.0. Where the private event logger is missing, reports and traces have no phases.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from bentoml_compile import progress

# torch's event -> our phase. A phase's seconds are its own, without the phases nested in it.
_PHASES = {
    "dynamo": "dynamo",
    "backend_compile": "backend",
    "create_aot_dispatcher_function": "aot_autograd",
    "AOTAutogradCache.inductor_load": "cache_load",
    "compile_fx_aot": "inductor",
    "AotCodeCompiler.compile": "cpp_compile",
    "compile_fx.<locals>.fw_compiler_base": "inductor",
    "inductor_compile": "inductor",
    "code_gen": "codegen",
    "GraphLowering.codegen": "codegen",
    "PyCodeCache.load_by_key_path": "load_code",
    "compile_file": "cpp_compile",
    "async_compile.wait": "compile_wait",
    "async_compile.precompile": "triton_compile",
    "CachingAutotuner.benchmark_all_configs": "autotune",
    "AlgorithmSelectorCache.precompile": "autotune",
    "AlgorithmSelectorCache.benchmark": "autotune",
    "CompiledFxGraph.cudagraphify": "cudagraphs",
    "cudagraphify": "cudagraphs",
}


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    started_ns: int
    ended_ns: int
    seconds: float  # its own time, without the phases nested in it
    parent: int | None = None  # the phase around it, by its place in the list
    shape: str = ""  # whose code it was for, where that is known


@contextlib.contextmanager
def recorded_phases() -> Iterator[list[Phase]]:
    """Collects this thread's compile phases, in order of their start; filled at the end."""
    phases: list[Phase] = []
    events = _events.of_thread = []

    def ended(name: str, started_ns: int, ended_ns: int) -> None:
        events.append((started_ns, ended_ns, name))
        progress.phase_ended(name)

    try:
        with _torch_tells(progress.phase_began, ended), progress.phases_inside():
            yield phases
    finally:
        _events.of_thread = None
        phases.extend(nest(events))


@contextlib.contextmanager
def _torch_tells(began: Callable[[str], None], ended: Callable[[str, int, int], None]) -> Iterator[None]:
    """Of this thread's phases, at their start and at their end."""
    try:
        from torch._dynamo.utils import ChromiumEventLogger

        start, end = ChromiumEventLogger.log_event_start, ChromiumEventLogger.log_event_end
    except (ImportError, AttributeError):
        yield
        return
    thread = threading.get_ident()

    def log_event_start(self: Any, event_name: str, *args: Any, **kwargs: Any) -> Any:
        phase = _PHASES.get(event_name)
        if phase is not None and threading.get_ident() == thread:
            began(phase)
        return start(self, event_name, *args, **kwargs)

    def log_event_end(
        self: Any, event_name: str, time_ns: int, metadata: Any, start_time_ns: int, *args: Any, **kwargs: Any
    ) -> Any:
        phase = _PHASES.get(event_name)
        if phase is not None and threading.get_ident() == thread:
            ended(phase, start_time_ns, time_ns)
        return end(self, event_name, time_ns, metadata, start_time_ns, *args, **kwargs)

    ChromiumEventLogger.log_event_start = log_event_start  # type: ignore[method-assign]
    ChromiumEventLogger.log_event_end = log_event_end  # type: ignore[method-assign]
    try:
        yield
    finally:
        ChromiumEventLogger.log_event_start = start  # type: ignore[method-assign]
        ChromiumEventLogger.log_event_end = end  # type: ignore[method-assign]


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """A phase of ours, among torch's, if phases are being recorded in this thread."""
    started = time.time_ns()
    try:
        with progress.phases_inside():
            progress.phase_began(name)
            yield
    finally:
        if _events.of_thread is not None:
            _events.of_thread.append((started, time.time_ns(), name))


def include(phases: Iterable[Phase]) -> None:
    """Phases that another process on this machine recorded, among this thread's, if those are being recorded."""
    if _events.of_thread is not None:
        _events.of_thread.extend((item.started_ns, item.ended_ns, item.name) for item in phases)


class _Events(threading.local):
    of_thread: list[tuple[int, int, str]] | None = None


_events = _Events()


def nest(events: Iterable[tuple[int, int, str]]) -> list[Phase]:
    """Turns (start, end, phase) of one thread into phases with their own time; a phase inside itself is one phase."""
    outermost: list[tuple[int, int, str]] = []
    own: list[int] = []
    parents: list[int | None] = []
    open_: list[int] = []  # indices of the phases around the current event
    for start, end, name in sorted(events, key=lambda event: (event[0], -event[1])):
        while open_ and outermost[open_[-1]][1] <= start:
            open_.pop()
        if open_ and outermost[open_[-1]][2] == name:
            continue
        if open_:
            own[open_[-1]] -= end - start
        parents.append(open_[-1] if open_ else None)
        open_.append(len(outermost))
        outermost.append((start, end, name))
        own.append(end - start)
    return [
        Phase(name, start, end, max(0, ns) / 1e9, parent)
        for (start, end, name), ns, parent in zip(outermost, own, parents, strict=True)
    ]


def seconds_by_phase(phases: Iterable[Phase]) -> dict[str, float]:
    total: dict[str, float] = {}
    for phase in phases:
        total[phase.name] = total.get(phase.name, 0.0) + phase.seconds
    return total
