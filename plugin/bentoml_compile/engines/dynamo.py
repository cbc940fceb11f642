"""All of torch's private parts that we lean on, each behind one function.

Checked with torch 2.13.0. Each function says what is lost when its private name is missing, and
tests/engines/test_dynamo.py fails loudly when an upgrade of torch moves one.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bentoml_compile.listener import Compile
from bentoml_compile.report import GraphBreak

logger = logging.getLogger("bentoml_compile")


class GuardMiss(Exception):
    """A prepared shape met a guard that no compiled code satisfies; compiling it again would have cost seconds."""


class Gate:
    """Stands before Dynamo's compiler for one model: open while shapes are prepared, closed while serving.

    Dynamo asks it only for frames that no cached code fits. Closed, it raises GuardMiss instead of compiling, as
    `torch.compiler.set_stance("fail_on_recompile")` does, but for this model alone (a stance is global).

    Closed, it also takes `fullgraph` back, which could only fail a call that was right: torch 2.13.0 counts the frames
    that ran compiled code in one number for all threads, and each call of a whole graph begins it anew.
    """

    def __init__(self, compile_frame: Callable[..., Any], context: Any) -> None:
        self._torchdynamo_orig_backend = compile_frame  # Dynamo finds the backend's identity by following this name
        self._context = context
        self._fullgraph = getattr(context, "fullgraph", False)  # False: nothing is to be taken back
        self.open = True
        self._explanations = 0

    @property
    def open(self) -> bool:
        return self._open

    @open.setter
    def open(self, value: bool) -> None:
        self._open = value
        if self._fullgraph:
            self._context.fullgraph = value

    def __call__(self, frame: Any, cache_entry: Any, *args: Any, **kwargs: Any) -> Any:
        if self.open:
            return self._torchdynamo_orig_backend(frame, cache_entry, *args, **kwargs)
        if not _would_compile(frame):
            from torch._dynamo.types import ConvertFrameReturn

            return ConvertFrameReturn()
        raise GuardMiss(f"{_place(frame)}: {self._explain(frame)}")

    def _explain(self, frame: Any) -> str:
        """Which guards failed, in Dynamo's words. Only for the first few misses: it checks every guard again."""
        self._explanations += 1
        if self._explanations > _EXPLANATIONS:
            return "a guard failed"
        try:
            from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
            from torch._dynamo.guards import get_and_maybe_log_recompilation_reasons

            entries = _debug_get_cache_entry_list(frame.f_code)
            backend = _innermost(self)
            reasons = get_and_maybe_log_recompilation_reasons(entries, frame, backend, skip_logging=True)
        except (ImportError, TypeError, AttributeError):
            reasons = []
        return "; ".join(dict.fromkeys(map(str, reasons))) or "no compiled code fits (another branch, or a guard)"


_EXPLANATIONS = 20


def _place(frame: Any) -> str:
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def _innermost(backend: Any) -> Any:
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def _would_compile(frame: Any) -> bool:
    from torch._dynamo import convert_frame, trace_rules

    return not trace_rules.check(frame.f_code) and convert_frame.has_tensor_in_frame(frame)


def install_gate(compiled: Any) -> Gate | None:
    """Puts a Gate into what `torch.compile` returned. None (recompiles are then seen, not prevented) if it changed."""
    try:
        context: Any = compiled.dynamo_ctx if isinstance(compiled, torch.nn.Module) else _context_of(compiled)
        callback = context.callback
        gate = Gate(callback._torchdynamo_orig_backend, context)
        callback._torchdynamo_orig_backend = gate
    except (AttributeError, LookupError):
        logger.warning("torch %s: recompiles inside of requests cannot be prevented, only seen", torch.__version__)
        return None
    return gate


def _context_of(function: Callable[..., Any]) -> Any:
    """The _TorchDynamoContext that a compiled function closes over."""
    variables = inspect.getclosurevars(inspect.unwrap(function, stop=lambda f: hasattr(f, "_torchdynamo_wrapper_id")))
    return variables.nonlocals["self"]


@contextlib.contextmanager
def recorded_graph_breaks() -> Iterator[list[GraphBreak]]:
    """Collects the graph breaks of the compiles inside; filled at the end. Empty if torch's list is missing."""
    found: list[GraphBreak] = []
    try:
        from torch._dynamo.utils import graph_break_reasons
    except ImportError:
        yield found
        return
    before = len(graph_break_reasons)
    try:
        yield found
    finally:
        breaks = (graph_break(str(item.reason), item.user_stack) for item in graph_break_reasons[before:])
        found.extend(dict.fromkeys(breaks))  # Dynamo records a break again each time it restarts a frame


def graph_break(reason: str, stack: Any) -> GraphBreak:
    """From Dynamo's own text (sections "Explanation:" and "Hint:") and the user's stack, innermost frame last."""
    if reason.startswith("generic_jump"):  # the one reason that Dynamo records without its own explanation
        reason = _DATA_DEPENDENT_BRANCH
    frame = stack[-1] if stack else None
    sections: dict[str, list[str]] = {}
    for line in reason.splitlines():
        key, _, text = line.strip().partition(": ")
        if key in ("Explanation", "Hint"):
            sections.setdefault(key, []).append(text.strip())
    first = reason.strip().splitlines()[0].strip() if reason.strip() else "unknown"
    explanation = " ".join(sections.get("Explanation", ()))
    return GraphBreak(
        file=frame.filename if frame else "",
        line=(frame.lineno or 0) if frame else 0,
        source=(frame.line or "").strip() if frame else "",
        reason=f"{first}. {explanation}".strip() if explanation else first,
        hint=" ".join(sections.get("Hint", ())),
    )


_DATA_DEPENDENT_BRANCH = """Data-dependent branching
  Explanation: Which way this line goes depends on the value of a tensor.
  Hint: Use torch.where or torch.cond, or decide outside of the model."""


def cache_misses() -> int:
    """How many graphs Inductor had to compile in this process because its cache did not have them."""
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    return int(inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"])


@contextlib.contextmanager
def inductor_cache(directory: Path | None, *, self_contained: bool = True) -> Iterator[None]:
    """Inductor keeps what it compiles inside in `directory`; None: where it does anyway.

    Its in-memory caches are dropped on both ends: code that an earlier model left there would not be written again,
    and the directory would not be complete. If it is to be `self_contained`, that includes the small programs that
    find out the CPU's vector ISA, which take seconds to compile.
    """
    if directory is None:
        yield
        return
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
    _clear_inductor_memory()
    if self_contained:
        _clear_isa_memory()
    try:
        yield
    finally:
        _clear_inductor_memory()
        if before is None:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def _clear_inductor_memory() -> None:
    from torch._inductor.utils import clear_caches

    clear_caches()


def _clear_isa_memory() -> None:
    """Without these names a second model's first warm boot adds the programs to its artifact, which is resealed."""
    try:
        from torch._inductor import cpu_vec_isa

        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        for kind in {base for isa in cpu_vec_isa.supported_vec_isa_list for base in type(isa).__mro__}:
            for attribute in vars(kind).values():
                if hasattr(attribute, "cache_clear"):  # functools.cache, on methods that compile a probe
                    attribute.cache_clear()
    except (ImportError, AttributeError):
        logger.debug("torch %s keeps the CPU's vector ISA in another place", torch.__version__)


class CompileWatch(threading.local):
    """The Dynamo compiles of each thread since they were last taken, seen through Dynamo's own callbacks.

    Reading `compiles` is all that a call costs; the list stays empty until something compiles.
    """

    def __init__(self) -> None:
        self.compiles: list[Compile] = []
        self._started_ns: int | None = None

    def take(self) -> list[Compile]:
        taken, self.compiles = self.compiles, []
        return taken

    def on_start(self, _: Any) -> None:
        self._started_ns = time.time_ns()

    def on_end(self, args: Any) -> None:
        if self._started_ns is not None:
            self.compiles.append(Compile(self._started_ns, time.time_ns(), _recompile_reason(args)))
            self._started_ns = None


def _recompile_reason(args: Any) -> str:
    trigger = getattr(getattr(args, "callback_trigger", None), "name", "")
    if trigger and trigger != "DYNAMO":
        return trigger.lower()
    compile_id = str(getattr(args, "compile_id", ""))
    try:
        from torch._dynamo.utils import get_metrics_context

        reason = get_metrics_context()._metrics.get("recompile_reason")
    except (ImportError, AttributeError):
        reason = None
    return str(reason) if reason else f"first compile of frame {compile_id}"


watch = CompileWatch()


class _LimitWatch(logging.Filter):
    """Dynamo says in its log alone that it gives up on some code (torch 2.13: "hit config.recompile_limit (8)")."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str) and record.msg.startswith("torch._dynamo hit config."):
            name, limit = (*(record.args if isinstance(record.args, tuple) else ()), "a limit", "")[:2]
            now = time.time_ns()
            watch.compiles.append(Compile(now, now, f"{name} ({limit}) reached"))
        return True


_limit_watch = _LimitWatch()


def is_recompile_limit(compile_: Compile) -> bool:
    """Whether it stands for Dynamo giving up, and not for a compile."""
    return compile_.reason.endswith(" reached")


def start_watching() -> None:
    """Registers `watch` with Dynamo, if it is not. Without torch's callbacks recompiles are not counted.

    `torch._dynamo.reset()` forgets callbacks, so each new compiled model asks again. Where Dynamo is not imported
    nothing compiles, and importing it would cost a warm boot a second.
    """
    if "torch._dynamo" not in sys.modules:
        return
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_limit_watch)  # once, however often
    try:
        from torch._dynamo.callback import callback_handler

        if watch.on_start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(watch.on_start)
            callback_handler.register_end_callback(watch.on_end)
    except (ImportError, AttributeError):
        logger.warning("torch %s: recompiles inside of requests cannot be seen", torch.__version__)
