"""One boot of one model, step by step: lookup, then load or compile, verify, measure, store.

Whatever fails in here ends in eager serving with a log line, a span event and a metric. Only what the config asked
for stops a boot: GraphBreakError, VerificationError, ConfigError.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from bentoml_compile.artifacts.fingerprint import Fingerprint, fingerprint
from bentoml_compile.artifacts.hashing import hash_sources
from bentoml_compile.artifacts.store import Artifact, Draft, Refusal, Store
from bentoml_compile.config import CompileConfig, VerifyConfig
from bentoml_compile.engines import dynamo, jit
from bentoml_compile.engines.aot import build as aot
from bentoml_compile.engines.build import Record
from bentoml_compile.engines.eager import unchanged
from bentoml_compile.engines.failures import Failure, classify
from bentoml_compile.engines.limits import TimeLimitReached, time_limit
from bentoml_compile.engines.phases import seconds_by_phase
from bentoml_compile.errors import ConfigError, GraphBreakError, VerificationError
from bentoml_compile.listener import Stage, Timeline
from bentoml_compile.prepared import PreparedShape
from bentoml_compile.report import CompileReport, GraphBreak, Outcome, Rejection
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

    artifact: Artifact | None = None
    _fingerprint: Fingerprint | None = None
    _store: Store | None = None
    _draft: Draft | None = None
    _compiled_now: bool = False
    _engine: Literal["jit", "aot"] = "jit"
    _engine_reason: str = ""
    _whole: bool = True
    _record: Record = field(default_factory=Record)
    _rejected: list[Rejection] = field(default_factory=list)
    _failure: str = ""

    def run(self) -> None:
        """The story of a boot."""
        if not self.config.enabled:
            self._serve_all_eagerly("compiling is switched off (enabled: false, or TORCH_COMPILE_DISABLE=1)")
            return
        with unchanged(self.model):
            found = self._lookup()
            with self._ending_in_eager():
                if found is None or not self._load(found):
                    self._compile()
            self._verify()
            if self._exported_wrongly():
                with self._ending_in_eager():
                    self._compile_by_jit()
                self._verify()
            self._measure()
            self._keep()

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
                self._fingerprint = fingerprint(
                    self.model, method=self.method, config=self.config, shapes=[shape.label for shape in self.shapes]
                )
                root = self.config.artifacts.store or self.default_store
                if root is None:
                    return None
                self._store = Store(root)
                if self.config.artifacts.refresh:
                    stage.attributes["outcome"] = "miss"
                    return None
                return self._look_into(self._store, self._fingerprint, stage.attributes)
            except GraphBreakError:
                raise
            except Exception as error:
                self._keep_going(Failure("lookup_failed", f"{type(error).__name__}: {error}"), error)
                return None

    def _look_into(self, store: Store, wanted: Fingerprint, attributes: dict[str, Any]) -> Artifact | None:
        refusal = store.refusal(self.name, wanted) if self.config.fullgraph == "require" else None
        if refusal is not None:
            attributes["outcome"] = "hit"
            raise GraphBreakError(refusal.message, refusal.breaks)
        lookup = store.lookup(self.name, wanted)
        self._rejected += lookup.rejected
        for rejection in lookup.rejected:
            logger.info("model %r: artifact %s passed over: %s", self.name, rejection.artifact, rejection.reason)
        attributes["outcome"] = "hit" if lookup.artifact else "rejected" if lookup.rejected else "miss"
        return lookup.artifact

    # load or compile

    def _load(self, artifact: Artifact) -> bool:
        """Whether the artifact could be used; if not, it is among the rejected ones and the model is compiled."""
        with self.timeline.stage("load") as stage:
            try:
                artifact.hold()
                kept_eager = self._decide_as(artifact.decisions)
                if not self.config.keep_eager_if_slower:
                    kept_eager = {}
                if len(kept_eager) < len(self.shapes):
                    self._load_by_engine(artifact)
                    for shape, reason in kept_eager.items():
                        shape.serve_eagerly(reason)
            except Exception as error:
                reason = f"could not be loaded: {classify(error)}"
                logger.warning("model %r: artifact %s %s", self.name, artifact.path.name, reason)
                stage.attributes["rejected"] = reason
                self._rejected.append(Rejection(artifact.path.name, reason))
                artifact.release()
                self._forget()
                return False
        self.artifact = artifact
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
        jit.check_backend(self.config, where=f"model {self.name!r}")
        self._say_compiling()
        if not self._wants_export() or not self._compile_ahead():
            self._compile_by_jit()

    def _say_compiling(self) -> None:
        why = "; ".join(f"{item.artifact}: {item.reason}" for item in self._rejected[:2]) or "none is stored"
        logger.info(
            "model %r: compiling %d shapes, within %g s (no artifact fits: %s)",
            self.name,
            len(self.shapes),
            self.config.time_limit,
            why,
        )

    def _wants_export(self) -> bool:
        possible = self.config.fullgraph != "allow_breaks" and self.config.backend == "inductor"
        if self.config.engine == "aot" and not possible:
            raise ConfigError(
                f"model {self.name!r}: torch_compile.engine='aot' makes one graph by Inductor, which fullgraph="
                f"{self.config.fullgraph!r} with backend={self.config.backend!r} do not ask for; set engine to 'jit'"
            )
        return possible and self.config.engine != "jit"

    def _compile_ahead(self) -> bool:
        """Whether the model could be exported; if not, the report says why."""
        with self.timeline.stage("compile", engine="aot") as stage:
            self._open_draft()
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
                        f"model {self.name!r}: torch_compile.engine is 'aot', but the model cannot be exported: "
                        f"{reason}. Set engine to 'auto' to have it compiled by torch.compile."
                    ) from reason
                self._give_up_export(str(reason))
                stage.attributes["reason"] = self._engine_reason
                return False
            finally:
                self._tell_phases(0)
        self._engine, self._compiled_now = "aot", True
        return True

    @contextlib.contextmanager
    def _directory_for_code(self) -> Iterator[Path]:
        """The draft's; without one a private temporary directory, since code that is loaded needs its files no longer.

        Never Inductor's own: that lies at a name that anybody can foresee, and what is in it would not be new.
        """
        if self._draft is not None:
            yield self._draft.cache
            return
        with tempfile.TemporaryDirectory(prefix="torch_compile_", ignore_cleanup_errors=True) as directory:
            yield Path(directory)

    def _give_up_export(self, reason: str) -> None:
        logger.info("model %r: compiled by torch.compile, not ahead of time: %s", self.name, reason)
        if self._draft is not None:
            self._draft.discard()
            self._draft = None
        self._forget()
        self._engine, self._engine_reason = "jit", reason

    def _exported_wrongly(self) -> bool:
        """Under auto, code made ahead of time that does not verify is replaced by torch.compile's."""
        if self._engine != "aot" or self.config.engine != "auto":
            return False
        wrong = next((shape for shape in self.shapes if shape.reason.startswith("verification")), None)
        if wrong is None:
            return False
        self._give_up_export(f"{wrong.label}: {wrong.reason}")
        return True

    def _compile_by_jit(self) -> None:
        with self.timeline.stage("compile", engine="jit"):
            self._engine, self._compiled_now = "jit", True
            self._open_draft()
            with self._directory_for_code() as cache:
                if self.config.fullgraph == "allow_breaks":
                    self._build(cache, fullgraph=False)
                    return
                try:
                    self._build(cache, fullgraph=True)
                except jit.GraphBroken as error:
                    self._graph_is_broken(error)
                    self._build(cache, fullgraph=False)

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
        self._remember_refusal(message, breaks)
        raise GraphBreakError(message, breaks) from error.__cause__

    def _remember_refusal(self, message: str, breaks: tuple[GraphBreak, ...]) -> None:
        """So that the worker that BentoML starts again fails at once, with the same words."""
        if self._store is None or self._fingerprint is None or not self.config.artifacts.write:
            return
        try:
            sources = hash_sources({*self._record.sources, *(item.file for item in breaks if item.file)})
            self._store.remember_refusal(self.name, self._fingerprint, Refusal(message, breaks, sources))
        except Exception as error:
            logger.warning("model %r: the graph breaks could not be remembered: %s", self.name, error)

    def _open_draft(self) -> None:
        if self._store is None or self._fingerprint is None or not self.config.artifacts.write:
            return
        try:
            if any(character.isspace() for character in str(self._store.root)):
                raise ValueError(
                    f"the store's path {str(self._store.root)!r} has a space, with which Inductor's compiler commands "
                    "do not work; set torch_compile.artifacts.store or BENTOML_HOME to one without"
                )
            self._draft = self._store.draft(self.name, self._fingerprint)
        except Exception as error:
            self._keep_going(Failure("store_failed", f"nothing will be kept for the next boot: {error}"), error)

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
        loaded = self.artifact is not None and not self._compiled_now
        # without Inductor's cache nothing would tell that a warm boot has traced another graph than the cold one
        trusted = loaded and (self._engine == "aot" or self.config.backend == "inductor")
        if self.config.verify is False or not self._compiled_shapes() or (trusted and not self.config.verify.on_load):
            return
        with self.timeline.stage("verify"):
            for shape in self._compiled_shapes():
                self._verify_shape(shape, self.config.verify)

    def _verify_shape(self, shape: PreparedShape, config: VerifyConfig) -> None:
        failure = Trial(self.model, self.method, self.names).verify(shape, config)
        if failure is None:
            return
        if config.strict:
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
        with self.timeline.stage("measure"):
            for shape in to_measure:
                failure = Trial(self.model, self.method, self.names).measure(shape)
                if failure is not None:
                    self._shape_falls_back(shape, failure)
                elif shape.run is None:
                    logger.warning("model %r: %s is served eagerly: %s", self.name, shape.label, shape.reason)
                    self._tell_fallback(Failure("slower", f"{shape.label}: {shape.reason}"))

    def _keep(self) -> None:
        """Completes the artifact, if this boot's result is one that the next may rely on."""
        complete = all(shape.run is not None or shape.speedup is not None for shape in self.shapes)
        try:
            if self._draft is not None and complete:
                with self.timeline.stage("store"):
                    sources = hash_sources(self._record.sources)
                    self.artifact = self._draft.seal(self._decisions(), sources, self._engine)
            elif self.artifact is not None and complete and self._artifact_is_behind(self.artifact):
                with self.timeline.stage("store"):
                    self.artifact.reseal(self._decisions())
        except Exception as error:
            self._keep_going(Failure("store_failed", f"the artifact was not kept: {error}"), error)
        finally:
            if self._draft is not None and self.artifact is None:
                with contextlib.suppress(OSError):
                    self._draft.discard()

    def _artifact_is_behind(self, artifact: Artifact) -> bool:
        measured = {shape.label: shape.speedup for shape in self.shapes}
        known = {label: row["speedup"] for label, row in artifact.decisions["shapes"].items()}
        return self._compiled_now or measured != known or artifact.grown()

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
        self._compiled_now, self.artifact = False, None
        for shape in self.shapes:
            shape.serve_eagerly(reason)

    # the result

    def report(self, seconds: float) -> CompileReport:
        compiled = self._compiled_shapes()
        outcome: Outcome = "compiled" if self._compiled_now else "loaded" if self.artifact is not None else "eager"
        return CompileReport(
            model=self.name,
            engine=compiled[0].engine if 2 * len(compiled) > len(self.shapes) else "eager",
            outcome=outcome,
            seconds=seconds,
            fingerprint=self._fingerprint.id if self._fingerprint else "",
            mode=self.config.mode,
            fullgraph=self._whole and bool(compiled),
            phases={**seconds_by_phase(self._record.phases), **self._seconds_of_steps()},
            shapes=tuple(shape.report() for shape in self.shapes),
            graph_breaks=self._record.breaks,
            rejected=tuple(self._rejected),
            fallback=self._failure,
            engine_reason=self._engine_reason,
        )

    def _seconds_of_steps(self) -> dict[str, float]:
        """The steps beside the compiler's phases; a boot may spend most of its time in them."""
        steps = self.timeline.ended
        return {name: steps[name] for name in ("lookup", "verify", "measure", "store") if name in steps}

    def _compiled_shapes(self) -> list[PreparedShape]:
        return [shape for shape in self.shapes if shape.engine != "eager"]
