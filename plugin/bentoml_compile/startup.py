"""One boot of one model, step by step: lookup, then load or compile, verify, measure, store.

Whatever fails in here ends in eager serving with a log line, a span event and a metric. Only what the config asked
for stops a boot: GraphBreakError, VerificationError, ConfigError.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from bentoml_compile.artifacts.fingerprint import fingerprint
from bentoml_compile.artifacts.store import Artifact, Store
from bentoml_compile.config import CompileConfig, VerifyConfig
from bentoml_compile.engines import dynamo, jit
from bentoml_compile.engines.aot import build as aot
from bentoml_compile.engines.build import Record
from bentoml_compile.engines.eager import unchanged
from bentoml_compile.engines.failures import Failure, classify
from bentoml_compile.engines.limits import TimeLimitReached, time_limit
from bentoml_compile.engines.phases import seconds_by_phase
from bentoml_compile.errors import ConfigError, GraphBreakError, VerificationError
from bentoml_compile.keeping import Keeping, private_directory
from bentoml_compile.listener import Stage, Timeline
from bentoml_compile.prepared import PreparedShape
from bentoml_compile.report import CompileReport, GraphBreak, Outcome
from bentoml_compile.trial import Trial

logger = logging.getLogger("bentoml_compile")


@dataclass(eq=False)
class Startup:
    """State of a boot. `run()` fills it; afterwards `shapes` serve and `report()` tells."""

    model: torch.nn.Module
    method: str
    name: str
    config: CompileConfig
    names: tuple[str, ...]  # of the method's positional parameters
    shapes: list[PreparedShape]
    timeline: Timeline
    default_store: Path | None = None

    _kept: Keeping | None = None
    _compiled_now: bool = False
    _engine: Literal["jit", "aot"] = "jit"
    _engine_reason: str = ""
    _whole: bool = True
    _record: Record = field(default_factory=Record)
    _failure: str = ""

    def run(self) -> None:
        """The story of a boot."""
        if not self.config.enabled:
            reason = "compiling is switched off (enabled: false, or TORCH_COMPILE_DISABLE=1)"
            logger.info("model %r: served eagerly: %s", self.name, reason)
            self._serve_all_eagerly(reason)
            return
        found = self._lookup()
        if found is None or not self._load(found):
            self._compile()
        self._verify()
        if self._exported_wrongly():
            with self._running("compile"), self._ending_in_eager():
                self._compile_by_jit()
            self._verify()
        self._measure()
        self._keep()

    @contextlib.contextmanager
    def _running(self, name: str) -> Iterator[Stage]:
        """A stage that runs the model, which is afterwards as it was."""
        with self.timeline.stage(name) as stage, unchanged(self.model):
            yield stage

    @contextlib.contextmanager
    def _ending_in_eager(self) -> Iterator[None]:
        """What fails inside, or takes too long, ends in eager serving, but for what the config asked to stop."""
        try:
            with time_limit(self.config.time_limit):
                yield
        except TimeLimitReached:
            self._time_is_up()
        except (ConfigError, GraphBreakError):
            raise
        except Exception as error:
            self._fall_back(classify(error), error)

    # lookup

    def _lookup(self) -> Artifact | None:
        with self.timeline.stage("lookup", outcome="disabled") as stage:
            try:
                labels = [shape.label for shape in self.shapes]
                wanted = fingerprint(self.model, method=self.method, config=self.config, shapes=labels)
                root = self.config.artifacts.store or self.default_store
                store = Store(root) if root is not None else None
                self._kept = Keeping(self.name, wanted, store, self.config.artifacts.write)
                if store is None:
                    return None
                if self.config.artifacts.refresh:
                    stage.attributes["outcome"] = "miss"
                    return None
                return self._look_into(self._kept, stage.attributes)
            except GraphBreakError:
                raise
            except Exception as error:
                self._keep_going(Failure("lookup_failed", f"{type(error).__name__}: {error}"), error)
                return None

    def _look_into(self, kept: Keeping, attributes: dict[str, Any]) -> Artifact | None:
        refusal = kept.refusal() if self.config.fullgraph == "require" else None
        if refusal is not None:
            attributes["outcome"] = "hit"
            raise GraphBreakError(refusal.message, refusal.breaks)
        artifact = kept.look_up()
        attributes["outcome"] = "hit" if artifact else "rejected" if kept.rejected else "miss"
        return artifact

    # load or compile

    def _load(self, artifact: Artifact) -> bool:
        """Whether the boot is decided; if not, the artifact is among the rejected ones and the model is compiled."""
        assert self._kept is not None
        with self.timeline.stage("load") as stage:
            try:
                kept_eager = self._decide_as(artifact.decisions)
                if not self.config.keep_eager_if_slower:
                    kept_eager = {}
                if len(kept_eager) < len(self.shapes):
                    self._load_by_engine(artifact)
                    for shape, reason in kept_eager.items():
                        shape.serve_eagerly(reason)
            except TimeLimitReached:
                self._time_is_up()
                return True
            except Exception as error:
                reason = f"could not be loaded: {classify(error)}"
                self._kept.reject(artifact, reason)
                stage.attributes["rejected"] = reason
                self._forget()
                return False
        self._kept.artifact = artifact
        if self._compiled_now:
            logger.warning("model %r: the artifact lacked some compiled code, which was compiled again", self.name)
        return True

    def _load_by_engine(self, artifact: Artifact) -> None:
        """All shapes: which of them were traced before decides what Dynamo makes dynamic."""
        if artifact.engine == "aot":
            self._engine = "aot"
            aot.load(self.model, self.method, self.shapes, directory=artifact.cache)
            return
        misses = dynamo.cache_misses()
        with unchanged(self.model), time_limit(self.config.time_limit):
            self._build(artifact.cache, fullgraph=self._whole)
        self._compiled_now = dynamo.cache_misses() > misses

    def _decide_as(self, decisions: dict[str, Any]) -> dict[PreparedShape, str]:
        """Takes over what an earlier boot found out; the shapes that it served eagerly, and why."""
        self._whole, self._engine_reason = decisions["whole"], decisions["engine_reason"]
        self._record.breaks = tuple(GraphBreak(**item) for item in decisions["graph_breaks"])
        for shape in self.shapes:
            shape.decide_as(decisions["shapes"][shape.label])
        return {shape: shape.reason for shape in self.shapes if shape.engine == "eager"}

    def _forget(self) -> None:
        self._whole, self._record = True, Record()
        for shape in self.shapes:
            shape.forget()

    def _compile(self) -> None:
        with self._running("compile") as stage, self._ending_in_eager():
            jit.check_backend(self.config, where=f"model {self.name!r}")
            self._say_compiling()
            if not self._wants_export() or not self._compile_ahead():
                self._compile_by_jit()
            stage.attributes["engine"] = self._engine

    def _say_compiling(self) -> None:
        rejected = self._kept.rejected[:2] if self._kept is not None else []
        why = "; ".join(f"{item.artifact}: {item.reason}" for item in rejected) or "none is stored"
        shapes, limit = len(self.shapes), self.config.time_limit
        logger.info("model %r: compiling %d shapes, within %g s (no artifact fits: %s)", self.name, shapes, limit, why)

    def _wants_export(self) -> bool:
        config = self.config
        possible = config.fullgraph != "allow_breaks" and config.backend == "inductor" and config.dynamic is not True
        if config.engine == "aot" and not possible:
            raise ConfigError(
                f"model {self.name!r}: torch_compile.engine='aot' makes one whole graph of fixed sizes by Inductor, "
                f"and not what fullgraph={config.fullgraph!r}, dynamic={config.dynamic!r} and "
                f"backend={config.backend!r} ask for together; set engine to 'jit'"
            )
        return possible and config.engine != "jit"

    def _compile_ahead(self) -> bool:
        """Whether the model could be exported; if not, the report says why."""
        self._open_draft(path_with_space=True)
        try:
            with self._directory_for_code() as directory:
                aot.build(
                    self.model,
                    self.method,
                    self.config,
                    self.names,
                    self.shapes,
                    directory=directory,
                    record=self._record,
                )
        except aot.NotExportable as reason:
            if self.config.engine == "aot":
                raise ConfigError(
                    f"model {self.name!r}: torch_compile.engine is 'aot', but the model cannot be exported: {reason}. "
                    "Set engine to 'auto' to have it compiled by torch.compile."
                ) from reason
            self._engine_reason = str(reason)
        finally:
            self._tell_phases(0)
        if self._engine_reason:
            self._give_up_export(self._engine_reason)
            return False
        self._engine, self._compiled_now = "aot", True
        return True

    def _give_up_export(self, reason: str) -> None:
        logger.info("model %r: compiled by torch.compile, not ahead of time: %s", self.name, reason)
        if self._kept is not None:
            self._kept.discard_draft()
        self._forget()
        self._engine, self._engine_reason = "jit", reason

    def _exported_wrongly(self) -> bool:
        """Under auto, code made ahead of time that does not verify is replaced by torch.compile's."""
        if not self._may_trace_instead():
            return False
        wrong = next((shape for shape in self.shapes if shape.reason.startswith("verification")), None)
        if wrong is None:
            return False
        self._give_up_export(f"{wrong.label}: {wrong.reason}")
        return True

    def _may_trace_instead(self) -> bool:
        return self._engine == "aot" and self.config.engine == "auto" and self._compiled_now

    def _compile_by_jit(self) -> None:
        self._engine, self._compiled_now = "jit", True
        self._open_draft(path_with_space=False)
        with self._directory_for_code() as cache:
            if self.config.fullgraph == "allow_breaks":
                self._build(cache, fullgraph=False)
                return
            try:
                self._build(cache, fullgraph=True)
            except jit.GraphBroken as error:
                self._graph_is_broken(error)
                self._build(cache, fullgraph=False)

    def _open_draft(self, *, path_with_space: bool) -> None:
        try:
            if self._kept is not None:
                self._kept.open_draft(path_with_space=path_with_space)
        except Exception as error:
            self._keep_going(Failure("store_failed", f"nothing will be kept for the next boot: {error}"), error)

    def _directory_for_code(self) -> contextlib.AbstractContextManager[Path]:
        return self._kept.directory_for_code() if self._kept is not None else private_directory()

    def _build(self, cache: Path, *, fullgraph: bool) -> None:
        told = len(self._record.phases)
        try:
            jit.build(
                self.model,
                self.method,
                self.config,
                self.names,
                self.shapes,
                cache=cache,
                fullgraph=fullgraph,
                record=self._record,
                on_failure=self._shape_falls_back,
            )
        finally:
            self._tell_phases(told)
        self._whole = not self._record.breaks
        if self._record.breaks:
            self._say_partial()

    def _tell_phases(self, first: int) -> None:
        """As spans, each below the phase that it happened in."""
        stages: list[Stage] = []
        for phase in self._record.phases[first:]:
            parent = self.timeline.current if phase.parent is None else stages[phase.parent]
            stages.append(self.timeline.past(f"phase.{phase.name}", parent, phase.started_ns, phase.ended_ns))

    def _graph_is_broken(self, error: jit.GraphBroken) -> None:
        if self.config.fullgraph != "require":
            return
        examples = [shape.example for shape in self.shapes]
        breaks = jit.find_graph_breaks(self.model, self.method, examples) or (jit.break_from(error.__cause__ or error),)
        listing = "\n".join(f"  {number}. {item}" for number, item in enumerate(breaks, 1))
        message = (
            f"model {self.name!r} does not compile as one graph, and fullgraph is 'require'. "
            f"{len(breaks)} graph break(s):\n{listing}\n"
            "Change these lines, or set torch_compile.fullgraph to 'prefer' to compile the parts between them."
        )
        if self._kept is not None:
            self._kept.remember_refusal(message, breaks, self._record.sources)
        raise GraphBreakError(message, breaks) from error.__cause__

    def _say_partial(self) -> None:
        breaks = self._record.breaks
        places = "; ".join(f"{item.file}:{item.line}: {item.reason}" for item in breaks[:3])
        logger.warning(
            "model %r: compiled in parts, %d graph break(s): %s (`bentoml-compile explain` lists all)",
            self.name,
            len(breaks),
            places,
        )
        for item in breaks:
            self.timeline.event("graph_break", file=item.file, line=item.line, reason=item.reason)

    # verify, measure, keep

    def _verify(self) -> None:
        # without Inductor's cache nothing would tell that a warm boot has traced another graph than the cold one
        trusted = self._is_loaded() and (self._engine == "aot" or self.config.backend == "inductor")
        if self.config.verify is False or not self._compiled_shapes() or (trusted and not self.config.verify.on_load):
            return
        with self._running("verify"):
            for shape in self._compiled_shapes():
                self._verify_shape(shape, self.config.verify)

    def _verify_shape(self, shape: PreparedShape, config: VerifyConfig) -> None:
        failure = Trial(self.model, self.method, self.names).verify(shape, config)
        if failure is None:
            return
        if config.strict and not self._may_trace_instead():
            raise VerificationError(
                f"model {self.name!r}, shape ({shape.label}): {failure.message}. Compiled code was not served. Raise "
                "verify.rtol/atol if this difference is acceptable, or set verify.strict to false to serve eagerly."
            )
        self._shape_falls_back(shape, failure)

    def _measure(self) -> None:
        """Also of an artifact that was made without measuring."""
        to_measure = [shape for shape in self._compiled_shapes() if shape.speedup is None]
        if not self.config.keep_eager_if_slower or not to_measure:
            return
        with self._running("measure"):
            for shape in to_measure:
                failure = Trial(self.model, self.method, self.names).measure(shape)
                if failure is not None:
                    self._shape_falls_back(shape, failure)
                elif shape.run is None:
                    logger.warning("model %r: %s is served eagerly: %s", self.name, shape.label, shape.reason)
                    self._tell_fallback(Failure("slower", f"{shape.label}: {shape.reason}"))

    def _keep(self) -> None:
        """Completes the artifact, if this boot's result is one that the next may rely on."""
        if self._kept is None:
            return
        complete = all(shape.run is not None or shape.speedup is not None for shape in self.shapes)
        try:
            if complete and self._kept.is_behind(decisions := self._decisions()):
                with self.timeline.stage("store"):
                    self._kept.seal(decisions, self._record, self._engine)
        except Exception as error:
            self._keep_going(Failure("store_failed", f"the artifact was not kept: {error}"), error)
        finally:
            self._kept.discard_draft()

    def _decisions(self) -> dict[str, Any]:
        return {
            "whole": self._whole,
            "engine_reason": self._engine_reason,
            "graph_breaks": [dataclasses.asdict(item) for item in self._record.breaks],
            "shapes": {shape.label: shape.decisions() for shape in self.shapes},
        }

    # falling back

    def _time_is_up(self) -> None:
        limit = f"compiling took longer than time_limit ({self.config.time_limit:g} s)"
        self._fall_back(Failure("time_limit", f"{limit}; raise torch_compile.time_limit or prepare fewer shapes"), None)

    def _fall_back(self, failure: Failure, error: BaseException | None) -> None:
        logger.error("model %r: served eagerly: %s", self.name, failure)
        self._tell_fallback(failure, error)
        self._serve_all_eagerly(str(failure))

    def _shape_falls_back(self, shape: PreparedShape, failure: Failure) -> None:
        logger.error("model %r: %s is served eagerly: %s", self.name, shape.label, failure)
        self._tell_fallback(failure)
        shape.serve_eagerly(str(failure))

    def _keep_going(self, failure: Failure, error: BaseException) -> None:
        """Something failed that compiled serving does not depend on."""
        logger.warning("model %r: %s", self.name, failure)
        self._tell_fallback(failure, error)

    def _tell_fallback(self, failure: Failure, error: BaseException | None = None) -> None:
        if error is not None:
            logger.debug("model %r: the error behind it", self.name, exc_info=error)
        self.timeline.event("fallback", reason=failure.reason, message=failure.message)
        self.timeline.listeners.tell("fallback", self.name, failure.reason)

    def _serve_all_eagerly(self, reason: str) -> None:
        self._failure = reason
        self._compiled_now = False
        if self._kept is not None:
            self._kept.artifact = None
        for shape in self.shapes:
            shape.serve_eagerly(reason)

    # the result

    def report(self, seconds: float) -> CompileReport:
        compiled = self._compiled_shapes()
        outcome: Outcome = "compiled" if self._compiled_now else "loaded" if self._is_loaded() else "eager"
        return CompileReport(
            model=self.name,
            engine=compiled[0].engine if 2 * len(compiled) > len(self.shapes) else "eager",
            outcome=outcome,
            seconds=seconds,
            fingerprint=self._kept.fingerprint.id if self._kept is not None else "",
            mode=self.config.mode,
            fullgraph=self._whole and bool(compiled),
            phases={**seconds_by_phase(self._record.phases), **self._seconds_of_steps()},
            shapes=tuple(shape.report() for shape in self.shapes),
            graph_breaks=self._record.breaks,
            rejected=tuple(self._kept.rejected) if self._kept is not None else (),
            fallback=self._failure,
            engine_reason=self._engine_reason,
        )

    def _seconds_of_steps(self) -> dict[str, float]:
        """The steps beside the compiler's phases; a boot may spend most of its time in them."""
        steps = self.timeline.ended
        return {name: steps[name] for name in ("lookup", "verify", "measure", "store") if name in steps}

    @property
    def artifact(self) -> Artifact | None:
        """What the compiled model holds while it lives."""
        return self._kept.artifact if self._kept is not None else None

    def _is_loaded(self) -> bool:
        return self.artifact is not None and not self._compiled_now

    def _compiled_shapes(self) -> list[PreparedShape]:
        return [shape for shape in self.shapes if shape.engine != "eager"]
