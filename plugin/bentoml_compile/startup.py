"""One boot of one model, step by step: lookup, then load or compile, verify, measure, store. Of several workers that
boot at once, one compiles and the others wait for its artifact.

Whatever fails in here ends in eager serving with a log line, a span event and a metric. Only what the config asked
for stops a boot: GraphBreakError, VerificationError, ConfigError.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bentoml_compile.artifacts.hashing import unseen
from bentoml_compile.artifacts.places import NO_PLACES, Places
from bentoml_compile.artifacts.store import Artifact
from bentoml_compile.collecting import without_collecting
from bentoml_compile.compiler import Compiler, compiling
from bentoml_compile.config import VerifyConfig
from bentoml_compile.engines.eager import unchanged
from bentoml_compile.engines.failures import Failure, classify
from bentoml_compile.engines.limits import TimeLimitReached, time_limit
from bentoml_compile.engines.phases import seconds_by_phase
from bentoml_compile.errors import ConfigError, GraphBreakError, VerificationError
from bentoml_compile.fallbacks import Fallbacks
from bentoml_compile.listener import Stage, Timeline
from bentoml_compile.padding import Padding
from bentoml_compile.padding_trial import verify_padding
from bentoml_compile.prepared import PreparedShape, Target
from bentoml_compile.progress import Place, Progress
from bentoml_compile.report import CompileReport, Outcome
from bentoml_compile.search import Search
from bentoml_compile.trial import Trial

logger = logging.getLogger("bentoml_compile")


@dataclass(eq=False)
class Startup:
    """State of a boot. `run()` fills it; afterwards the target's shapes serve and `report()` tells."""

    target: Target
    timeline: Timeline
    places: Places = NO_PLACES
    _failure: str = ""
    padding: Padding | None = None
    _has_looked: bool = False
    _decided: bool = False
    is_in_background: bool = False
    is_late: bool = False  # for a shape that a call has asked for
    _found: Artifact | None = None
    is_over: bool = False  # nothing is compiled any more
    _refusal: BaseException | None = None
    _on_trial: PreparedShape | None = None
    _stored: Mapping[str, Any] = field(default_factory=dict)  # what an artifact has decided

    def __post_init__(self) -> None:
        self._config = self.target.config
        self._fallbacks = Fallbacks(self.target.name, self.timeline)
        self._search = Search(self.target, self.timeline, self._fallbacks, self.places, self.is_late)
        self._compiler = Compiler(
            self.target, self.timeline, self._fallbacks, on_refused_export=self._search.release_shared
        )
        self._progress = Progress(self.target.name, self.timeline, self._place)

    def run(self) -> None:
        """The story of a boot."""
        self.find()
        self.complete()

    def find(self) -> bool:
        """Whether the boot is decided in milliseconds: nothing is to be compiled, or what is stored was loaded.

        Looks once: a second look would find this boot's own lease held.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._has_looked:
            return self._decided
        self._has_looked = True
        if not self._config.enabled:
            reason = "compiling is switched off (enabled: false, or TORCH_COMPILE_DISABLE=1)"
            logger.info("model %r: served eagerly: %s", self.target.name, reason)
            self._serve_all_eagerly(reason)
            self._decided = True
            return True
        try:
            with self._progress.said():
                while not self._decided and (found := self._looked_up()) is not None:
                    if found.engine == "jit" and self.is_in_background:
                        self._found = found  # torch.compile traces again: for seconds, which are not this caller's
                        break
                    self._decided = self._load(found)
        except BaseException as error:
            self._search.while_leased.close()
            self._refusal = error
            raise
        return self._decided

    def complete(self) -> None:
        """Compiles what `find` did not decide. Only what is right and faster serves, and the next boot finds it."""
        if self._config.enabled:
            self._complete()
        self.is_over = True

    def _complete(self) -> None:
        with self._search.while_leased, self._progress.said():
            if not self._decided:
                self._wait_or_compile()
            with self._present_weights():
                self._verify()
            if self._replaced_wrong_export():
                with self._present_weights():
                    self._verify()
            with self._present_weights():
                self._measure()
                self._allow_padding()
            self._keep()

    @contextlib.contextmanager
    def _present_weights(self) -> Iterator[None]:
        """They may be replaced beside a boot in the background, but not while code is compared with the model."""
        with self.target.weights.lock:
            if self.target.read_present_weights() and self.target.rehearsal is not None:
                self.target.rehearse()  # buffers may have been replaced, too
            yield

    def _wait_or_compile(self) -> None:
        found = self._found or self._search.wait()
        if found is None or not self._load(found):
            self._compile()

    def give_up(self, error: BaseException) -> None:
        """In the background, what would stop a boot leaves eager serving."""
        self._fall_back(classify(error), error)
        if self._search.kept is not None:
            self._search.kept.discard_draft()

    @contextlib.contextmanager
    def _running(self, name: str) -> Iterator[Stage]:
        """A stage that runs the model, which is afterwards as it was."""
        with self.timeline.stage(name) as stage, self._unchanged():
            yield stage

    def _unchanged(self) -> contextlib.AbstractContextManager[None]:
        """In the background a copy is run, while the model itself serves and may change."""
        return contextlib.nullcontext() if self.target.rehearsal is not None else unchanged(self.target.model)

    @contextlib.contextmanager
    def _ending_in_eager(self) -> Iterator[None]:
        """What fails inside, or takes too long, ends in eager serving, but for what the config asked to stop."""
        try:
            with time_limit(self._config.time_limit):
                yield
        except TimeLimitReached:
            self._time_is_up()
        except (ConfigError, GraphBreakError):
            raise
        except Exception as error:
            self._fall_back(classify(error), error)

    # progress

    def _place(self) -> Place | None:
        shape, shapes = self._on_trial or self._compiler.in_work, list(self.target.shapes)
        return Place(shape.label, shapes.index(shape) + 1, len(shapes)) if shape in shapes else None

    def _one_by_one(self, shapes: Iterable[PreparedShape]) -> Iterator[PreparedShape]:
        for self._on_trial in shapes:
            yield self._on_trial
        self._on_trial = None

    # load or compile

    def _looked_up(self) -> Artifact | None:
        try:
            with without_collecting():
                return self._search.look_up()
        finally:
            self._compiler.kept = self._search.kept

    def _load(self, artifact: Artifact) -> bool:
        """Whether the boot is decided; if not, the artifact is among the rejected ones and the model is compiled."""
        assert self._search.kept is not None
        with self.timeline.stage("load") as stage:
            try:
                self._stored = artifact.decisions
                self._compiler.decide_as(artifact.decisions)
                with without_collecting() if artifact.engine == "aot" else contextlib.nullcontext():
                    self._compiler.load(artifact.cache, self._eager_by_decision())
            except TimeLimitReached:
                self._time_is_up()
                return True
            except Exception as error:
                stage.attributes["rejected"] = reason = f"could not be loaded: {classify(error)}"
                self._reject(artifact, reason)
                return False
        failure = self._failure_in_doubt(artifact)
        if failure is not None:
            self._reject(artifact, f"does not give what the model gives now: {failure}")
            return False
        self._search.kept.artifact = artifact
        return True

    def _reject(self, artifact: Artifact, reason: str) -> None:
        assert self._search.kept is not None
        self._search.kept.reject(artifact, reason)
        self._stored = {}
        self._compiler.forget()

    def _failure_in_doubt(self, artifact: Artifact) -> Failure | None:
        """Where an artifact depends on what cannot be compared, its code is, whatever `verify` says. torch.compile's is
        not in doubt: it has just been traced again.
        """
        assert self._search.kept is not None
        doubts = sorted({*self._search.kept.fingerprint.doubts, *unseen(artifact.sources)})
        shapes = [shape for shape in self.target.compiled_shapes() if shape.compiled_by == "aot"]
        if not doubts or not shapes:
            return None
        logger.info(
            "model %r: loaded code is verified, as the model depends on what cannot be compared with what it was: %s",
            self.target.name,
            ", ".join(doubts),
        )
        config = self._config.verify or VerifyConfig()
        with self._present_weights(), self._running("verify"):
            failures = [Trial(self.target).verify(shape, config) for shape in self._one_by_one(shapes)]
        return next(filter(None, failures), None)

    def _eager_by_decision(self) -> dict[PreparedShape, str]:
        if not self._config.keep_eager_if_slower:
            return {}
        return {shape: shape.reason for shape in self.target.shapes if shape.engine == "eager"}

    def _compile(self) -> None:
        with self._turn(), self._running("compile") as stage, self._ending_in_eager():
            self._compiler.compile()
            stage.attributes["engine"] = self._compiler.engine

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One model of a process after the other."""
        if not compiling.acquire(blocking=False):
            with self.timeline.stage("wait", outcome="queued"):
                logger.info("model %r: waits until another compile of this process is over", self.target.name)
                compiling.acquire()
        try:
            yield
        finally:
            compiling.release()

    # verify, measure, keep

    def _verify(self) -> None:
        compiled = self.target.compiled_shapes()
        # without Inductor's cache nothing would tell that a warm boot has traced another graph than the cold one
        trusted = self._is_loaded() and (self._compiler.engine == "aot" or self._config.backend == "inductor")
        if self._config.verify is False or not compiled or (trusted and not self._config.verify.on_load):
            return
        with self._running("verify"):
            for shape in self._one_by_one(compiled):
                self._verify_shape(shape, self._config.verify)

    def _verify_shape(self, shape: PreparedShape, config: VerifyConfig) -> None:
        failure = Trial(self.target).verify(shape, config)
        if failure is None:
            return
        if self._compiler.may_trace_instead(shape):
            logger.warning(
                "model %r: code made ahead of time for %s is wrong: %s", self.target.name, shape.label, failure
            )
            self.timeline.event("wrong_export", shape=shape.label, message=failure.message)
            shape.serve_eagerly(str(failure))
            return
        if config.strict:
            raise VerificationError(
                f"model {self.target.name!r}, shape ({shape.label}): {failure.message}. Compiled code was not served. "
                "Raise verify.rtol/atol if this difference is acceptable, or set verify.strict to false to serve "
                "eagerly."
            )
        self._fallbacks.shape(shape, failure)

    def _replaced_wrong_export(self) -> bool:
        if not self._compiler.has_wrong_export():
            return False
        with self._turn(), self._running("compile"), self._ending_in_eager():
            self._compiler.replace_wrong_export()
        return True

    def _measure(self) -> None:
        """Also of an artifact that was made without measuring."""
        to_measure = [shape for shape in self.target.compiled_shapes() if shape.speedup is None]
        if not self._config.keep_eager_if_slower or not to_measure:
            return
        with self._running("measure"):
            for shape in self._one_by_one(to_measure):
                failure = Trial(self.target).measure(shape)
                if failure is not None:
                    self._fallbacks.shape(shape, failure)
                elif shape.run is None:
                    self._fallbacks.slower(shape)

    def _allow_padding(self) -> None:
        """Also of an artifact that was made with another `pad`."""
        if not self._config.pad:
            return
        self.padding = padding = Padding(self._config.pad, self.target.shapes, self.target.names)
        stored = self._stored.get("padding", {})
        unknown = [
            shape
            for shape in self.target.compiled_shapes()
            if shape.label not in stored or not padding.decide_as(shape, stored[shape.label])
        ]
        if unknown:
            with self._running("verify"):
                self._try_padding(padding, unknown)

    def _try_padding(self, padding: Padding, shapes: Iterable[PreparedShape]) -> None:
        try:
            with time_limit(self._config.time_limit):
                for shape in self._one_by_one(shapes):
                    failure = verify_padding(self.target, shape, padding, self._config.verify or VerifyConfig())
                    if failure is not None:
                        self._fallbacks.none(failure, None)
        except TimeLimitReached:
            self._fallbacks.none(
                Failure("time_limit", "padding was not tried to the end, and is used as far as it was"), None
            )

    def _decisions(self) -> dict[str, Any]:
        decisions = self._compiler.decisions()
        if self.padding is not None:
            shapes = self.target.compiled_shapes()
            decisions["padding"] = {shape.label: self.padding.decision(shape) for shape in shapes}
        elif "padding" in self._stored:
            decisions["padding"] = self._stored["padding"]
        return decisions

    def _keep(self) -> None:
        """Completes the artifact, if this boot's result is one that the next may rely on."""
        if self._search.kept is None:
            return
        complete = all(shape.run is not None or shape.speedup is not None for shape in self.target.shapes)
        try:
            if complete and self._search.kept.is_behind(decisions := self._decisions()):
                with self.timeline.stage("store"):
                    self._search.kept.seal(decisions, self._compiler.record, self._compiler.engine)
            if complete:
                self._search.publish()
        except Exception as error:
            self._fallbacks.none(Failure("store_failed", f"the artifact was not kept: {error}"), error)
        finally:
            self._search.kept.discard_draft()

    # falling back

    def _time_is_up(self) -> None:
        limit = f"compiling took longer than time_limit ({self._config.time_limit:g} s)"
        self._fall_back(Failure("time_limit", f"{limit}; raise torch_compile.time_limit or prepare fewer shapes"), None)

    def _fall_back(self, failure: Failure, error: BaseException | None) -> None:
        self._fallbacks.whole_model(failure, error)
        self._serve_all_eagerly(str(failure))

    def _serve_all_eagerly(self, reason: str) -> None:
        self._failure = reason
        self._compiler.compiled_now = False
        if self._search.kept is not None:
            self._search.kept.artifact = None
        for shape in self.target.shapes:
            shape.serve_eagerly(reason)

    # the result

    def end(self) -> CompileReport:
        """The report of a boot that is over, also on its span, which is about to end."""
        report = self.report()
        self.timeline.root.attributes.update(
            engine=report.engine,
            outcome=report.outcome,
            fingerprint=report.fingerprint,
            graph_breaks=len(report.graph_breaks),
        )
        return report

    def report(self) -> CompileReport:
        """As things stand; while the startup's span is open."""
        shapes, compiled, record = self.target.shapes, self.target.compiled_shapes(), self._compiler.record
        compiled_now = self._compiler.compiled_now and any(shape.compiled_by for shape in shapes)
        outcome: Outcome = "compiled" if compiled_now else "loaded" if self._is_loaded() else "eager"
        return CompileReport(
            model=self.target.name,
            engine=compiled[0].engine if 2 * len(compiled) > len(shapes) else "eager",
            outcome=outcome,
            seconds=(time.time_ns() - self.timeline.root.started_ns) / 1e9,
            fingerprint=self._search.kept.fingerprint.id if self._search.kept is not None else "",
            mode=self._config.mode,
            fullgraph=self._compiler.whole and bool(compiled),
            phases={**seconds_by_phase(record.phases), **self._seconds_of_steps()},
            shapes=tuple(shape.report() for shape in shapes),
            graph_breaks=record.breaks,
            rejected=tuple(self._search.kept.rejected) if self._search.kept is not None else (),
            fallback=self._failure,
            engine_reason=self._compiler.engine_reason,
            place=self._search.kept.found_in if self._search.kept is not None and outcome == "loaded" else "",
        )

    def _seconds_of_steps(self) -> dict[str, float]:
        """The steps beside the compiler's phases; a boot may spend most of its time in them."""
        steps = self.timeline.ended
        return {name: steps[name] for name in ("lookup", "wait", "verify", "measure", "store") if name in steps}

    @property
    def artifact(self) -> Artifact | None:
        """What the compiled model holds while it lives."""
        return self._search.kept.artifact if self._search.kept is not None else None

    def _is_loaded(self) -> bool:
        return self.artifact is not None and not self._compiler.compiled_now
