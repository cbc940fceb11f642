"""Which engine compiles, and what is then known about it: ahead of time where the model exports, else torch.compile."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bentoml_compile.engines import dynamo, jit
from bentoml_compile.engines.aot import build as aot
from bentoml_compile.engines.build import Record, examine
from bentoml_compile.engines.eager import unchanged
from bentoml_compile.engines.failures import Failure
from bentoml_compile.engines.limits import time_limit
from bentoml_compile.errors import ConfigError, GraphBreakError
from bentoml_compile.fallbacks import Fallbacks
from bentoml_compile.keeping import Keeping, private_directory
from bentoml_compile.listener import Stage, Timeline, Value
from bentoml_compile.prepared import PreparedShape, Target
from bentoml_compile.report import GraphBreak, Rejection

logger = logging.getLogger("bentoml_compile")


compiling = threading.RLock()
"""One compile at a time in a process: torch.export and torch.compile are not made for two."""


@dataclass(eq=False)
class Compiler:
    """Gives the target's shapes code to run, new or loaded; `record` and the rest say what happened."""

    target: Target
    timeline: Timeline
    fallbacks: Fallbacks
    kept: Keeping | None = None

    compiled_now: bool = False
    whole: bool = True
    engine_reason: str = ""  # why torch.compile serves where the ahead-of-time engine was asked first
    record: Record = field(default_factory=Record)
    on_refused_export: Callable[[], None] = lambda: None  # what is made from here on does not leave the machine
    _in_work: Callable[[list[PreparedShape]], PreparedShape | None] = lambda shapes: None

    @property
    def in_work(self) -> PreparedShape | None:
        """The shape that is compiled or loaded now."""
        return self._in_work(self.target.shapes)

    def compile(self) -> None:
        """Whatever the compiler raises is the caller's to end in eager."""
        jit.check_backend(self.target.config, where=f"model {self.target.name!r}")
        self._say_compiling()
        if self._wants_export():
            self._compile_ahead()
        if left := [shape for shape in self.target.shapes if shape.run is None]:
            self._compile_by_jit(left)

    def load(self, cache: Path, kept_eager: Mapping[PreparedShape, str]) -> None:
        """Opens what an artifact has. Under torch.compile that is all of its shapes, whoever serves them: which of them
        were traced before decides what Dynamo makes dynamic.
        """
        aot.load(self.target, directory=cache, leave_out=kept_eager)
        by_jit = [shape for shape in self.target.shapes if shape.compiled_by == "jit"]
        if not kept_eager.keys() >= set(by_jit):
            misses = dynamo.cache_misses()
            with unchanged(self.target.model), time_limit(self.target.config.time_limit):
                self._build(by_jit, cache, fullgraph=self.whole)
            self.compiled_now = dynamo.cache_misses() > misses
        for shape, reason in kept_eager.items():
            shape.serve_eagerly(reason)
        if self.compiled_now:
            logger.warning(
                "model %r: the artifact lacked some compiled code, which was compiled again", self.target.name
            )

    def has_wrong_export(self) -> bool:
        """Whether code made ahead of time did not verify, and torch.compile may be asked instead."""
        wrong = self._wrong()
        return wrong is not None and self.may_trace_instead(wrong)

    def replace_wrong_export(self) -> None:
        """All of the shapes: the model is one that export gets wrong."""
        wrong = self._wrong()
        assert wrong is not None
        self._give_up_export(f"{wrong.label}: {wrong.reason}")
        self._compile_by_jit(self.target.shapes)

    def _wrong(self) -> PreparedShape | None:
        return next((shape for shape in self.target.shapes if shape.reason.startswith("verification")), None)

    def may_trace_instead(self, shape: PreparedShape) -> bool:
        return shape.compiled_by == "aot" and self.target.config.engine == "auto" and self.compiled_now

    @property
    def engine(self) -> str:
        """What an artifact of this boot is: "aot" only if all of it travels."""
        return "jit" if any(shape.compiled_by == "jit" for shape in self.target.shapes) else "aot"

    def decisions(self) -> dict[str, Any]:
        """What an artifact keeps beside the code; plain JSON types."""
        return {
            "whole": self.whole,
            "engine_reason": self.engine_reason,
            "graph_breaks": [dataclasses.asdict(item) for item in self.record.breaks],
            "shapes": {shape.label: shape.decisions() for shape in self.target.shapes},
        }

    def decide_as(self, decisions: Mapping[str, Any]) -> None:
        """Takes over what an earlier boot found out."""
        self.whole, self.engine_reason = decisions["whole"], decisions["engine_reason"]
        self.record.breaks = tuple(GraphBreak(**item) for item in decisions["graph_breaks"])
        asked = {shape.label: shape for shape in self.target.shapes}
        self.target.shapes[:] = [asked[item["asked"]].decided(item) for item in decisions["shapes"].values()]

    def forget(self) -> None:
        self.whole, self.record, self.engine_reason = True, Record(self.record.phases), ""
        self.target.forget()

    def _say_compiling(self) -> None:
        rejected: list[Rejection] = self.kept.rejected[:2] if self.kept is not None else []
        why = "; ".join(f"{item.artifact}: {item.reason}" for item in rejected) or "nothing is stored for it"
        if self.target.config.artifacts.refresh:
            why = "artifacts.refresh is set"
        shapes, limit = len(self.target.shapes), self.target.config.time_limit
        logger.info(
            "model %r: compiling %d shapes, within %g s (no artifact fits: %s)", self.target.name, shapes, limit, why
        )

    # ahead of time

    def _wants_export(self) -> bool:
        config = self.target.config
        if config.engine == "aot" and not config.makes_one_graph:
            raise ConfigError(
                f"model {self.target.name!r}: torch_compile.engine='aot' makes one whole graph of fixed sizes or given "
                f"ranges by Inductor, and not what fullgraph={config.fullgraph!r}, dynamic={config.dynamic!r} and "
                f"backend={config.backend!r} ask for together; set engine to 'jit'"
            )
        return config.may_export

    def _compile_ahead(self) -> None:
        """Every shape, or none where the model cannot be exported; the report says why."""
        self._open_draft(path_with_space=True)
        self._in_work = _last_examined
        refused = left = ""
        try:
            with self._directory_for_code() as directory:
                left = aot.build(self.target, directory=directory, record=self.record)
        except aot.NotExportable as reason:
            if self.target.config.engine == "aot":
                raise ConfigError(
                    f"model {self.target.name!r}: torch_compile.engine is 'aot', but the model cannot be exported: "
                    f"{reason}. Set engine to 'auto' to have it compiled by torch.compile."
                ) from reason
            refused = str(reason)
        finally:
            self._tell_phases(0)
        if refused:
            self._give_up_export(refused)
            return
        self.compiled_now = True
        if left:
            self.engine_reason = left
            logger.info("model %r: some shapes are compiled by torch.compile: %s", self.target.name, left)

    def _give_up_export(self, reason: str) -> None:
        logger.info("model %r: compiled by torch.compile, not ahead of time: %s", self.target.name, reason)
        if self.kept is not None:
            self.kept.discard_draft()
        self.forget()
        self.engine_reason = reason
        self.on_refused_export()

    # torch.compile

    def _compile_by_jit(self, shapes: list[PreparedShape]) -> None:
        self._refuse_changing_buffers(shapes)
        self.compiled_now = True
        if self.kept is None or not self.kept.has_draft:
            self._open_draft(path_with_space=False)
        with self._directory_for_code(path_with_space=False) as cache:
            if self.target.config.fullgraph == "allow_breaks":
                self._build(shapes, cache, fullgraph=False)
                return
            try:
                self._build(shapes, cache, fullgraph=True)
            except jit.GraphBroken as error:
                self._graph_is_broken(error)
                self._build(shapes, cache, fullgraph=False)

    def _refuse_changing_buffers(self, shapes: list[PreparedShape]) -> None:
        """torch.compile tries the model itself, beside its requests."""
        target = self.target
        if target.rehearsal is None:
            return
        before = {name: buffer.clone() for name, buffer in target.rehearsal.named_buffers()}
        for shape in shapes:
            examine(target, shape, self.record)
        after = dict(target.rehearsal.named_buffers())
        changed = next((name for name, buffer in before.items() if not torch.equal(buffer, after[name])), None)
        if changed is not None:
            raise RuntimeError(
                f"forward changes buffer {changed!r}: torch.compile in the background would disturb it; set "
                "torch_compile.startup to 'block'"
            )

    def _build(self, shapes: list[PreparedShape], cache: Path, *, fullgraph: bool) -> None:
        told = len(self.record.phases)
        self._in_work = _first_without_code
        try:
            jit.build(
                self.target,
                shapes,
                cache=cache,
                fullgraph=fullgraph,
                record=self.record,
                on_failure=self.fallbacks.shape,
            )
        finally:
            self._tell_phases(told)
        self.whole = not self.record.breaks
        if self.record.breaks:
            self._say_partial()

    def _graph_is_broken(self, error: jit.GraphBroken) -> None:
        target = self.target
        if target.config.fullgraph != "require":
            return
        examples = [shape.example for shape in target.shapes]
        breaks = jit.find_graph_breaks(target.model, target.method, examples)
        breaks = breaks or (jit.break_from(error.__cause__ or error),)
        listing = "\n".join(f"  {number}. {item}" for number, item in enumerate(breaks, 1))
        message = (
            f"model {target.name!r} does not compile as one graph, and fullgraph is 'require'. "
            f"{len(breaks)} graph break(s):\n{listing}\n"
            "Change these lines, or set torch_compile.fullgraph to 'prefer' to compile the parts between them."
        )
        if self.kept is not None:
            self.kept.remember_refusal(message, breaks, self.record.sources)
        raise GraphBreakError(message, breaks) from error.__cause__

    def _say_partial(self) -> None:
        breaks = self.record.breaks
        places = "; ".join(f"{item.file}:{item.line}: {item.reason}" for item in breaks[:3])
        logger.warning(
            "model %r: compiled in parts, %d graph break(s): %s (`bentoml-compile explain` lists all)",
            self.target.name,
            len(breaks),
            places,
        )
        for item in breaks:
            self.timeline.event("graph_break", file=item.file, line=item.line, reason=item.reason)

    # both

    def _open_draft(self, *, path_with_space: bool) -> None:
        try:
            if self.kept is not None:
                self.kept.open_draft(path_with_space=path_with_space)
        except Exception as error:
            self.fallbacks.none(Failure("store_failed", f"nothing will be kept for the next boot: {error}"), error)

    def _directory_for_code(self, *, path_with_space: bool = True) -> contextlib.AbstractContextManager[Path]:
        if self.kept is None:
            return private_directory()
        return self.kept.directory_for_code(path_with_space=path_with_space)

    def _tell_phases(self, first: int) -> None:
        """As spans, each below the phase that it happened in."""
        stages: dict[int, Stage] = {}
        for number, phase in enumerate(self.record.phases[first:], first):
            parent = self.timeline.current if phase.parent is None else stages[phase.parent]
            about: dict[str, Value] = {"shape": phase.shape} if phase.shape and phase.parent is None else {}
            stages[number] = self.timeline.past(
                f"phase.{phase.name}", parent, phase.started_ns, phase.ended_ns, **about
            )


# in work is, by what the engines leave on the shapes


def _last_examined(shapes: list[PreparedShape]) -> PreparedShape | None:
    """Ahead of time: each shape is examined, then compiled."""
    return next((shape for shape in reversed(shapes) if shape.bounds is not None), None)


def _first_without_code(shapes: list[PreparedShape]) -> PreparedShape | None:
    """Under torch.compile: all are examined, then compiled in their order."""
    return next((shape for shape in shapes if shape.run is None and not shape.reason), None)
