"""One boot of one model, step by step: lookup, then load or compile, verify, measure, store.

Whatever fails in here ends in eager serving with a log line, a span event and a metric. Only what the config asked
for stops a boot: GraphBreakError, VerificationError, ConfigError.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bentoml_compile.artifacts.fingerprint import Fingerprint, fingerprint, hash_files
from bentoml_compile.artifacts.store import Artifact, Draft, Refusal, Store
from bentoml_compile.config import CompileConfig, VerifyConfig
from bentoml_compile.engines import dynamo, jit
from bentoml_compile.engines.bounds import Bound, find_bounds
from bentoml_compile.engines.eager import device_of, eager_callable
from bentoml_compile.engines.failures import Failure, classify, out_of_memory
from bentoml_compile.engines.limits import TimeLimitReached, time_limit
from bentoml_compile.engines.measure import measure
from bentoml_compile.engines.phases import Phase, recorded_phases, seconds_by_phase
from bentoml_compile.engines.verify import compare, in_higher_precision
from bentoml_compile.errors import ConfigError, GraphBreakError, VerificationError
from bentoml_compile.listener import Stage, Timeline
from bentoml_compile.report import CompileReport, Engine, GraphBreak, Outcome, Rejection, ShapeReport
from bentoml_compile.shapes import ExampleInput, Signature

logger = logging.getLogger("bentoml_compile")


@dataclass(eq=False, slots=True)
class PreparedShape:
    """One example input and what serves its signature; implements listener.Executable."""

    model: str
    label: str
    signature: Signature | None
    example: ExampleInput
    engine: Engine = "eager"
    bounds: tuple[Bound, ...] | None = None  # None: not looked for yet
    speedup: float | None = None
    max_error: float | None = None
    reason: str = ""
    prepared: bool = True

    def report(self) -> ShapeReport:
        return ShapeReport(self.label, self.engine, self.speedup, self.max_error, self.reason)

    def serve_eagerly(self, reason: str) -> None:
        self.engine, self.reason = "eager", reason


@dataclass(eq=False)
class Startup:
    """State of a boot. `run()` fills it; afterwards `shapes` and `program` serve, `report()` tells."""

    model: torch.nn.Module
    method: str
    name: str
    config: CompileConfig
    names: tuple[str, ...]
    shapes: list[PreparedShape]
    timeline: Timeline
    default_store: Path | None = None

    program: jit.JitProgram | None = None
    artifact: Artifact | None = None
    _fingerprint: Fingerprint | None = None
    _store: Store | None = None
    _draft: Draft | None = None
    _compiled_now: bool = False
    _whole: bool = True
    _breaks: tuple[GraphBreak, ...] = ()
    _rejected: list[Rejection] = field(default_factory=list)
    _phases: list[Phase] = field(default_factory=list)
    _sources: set[str] = field(default_factory=set)
    _failure: str = ""

    def run(self) -> None:
        """The story of a boot."""
        if not self.config.enabled:
            self._serve_all_eagerly("compiling is switched off (enabled: false or TORCH_COMPILE_DISABLE)")
            return
        with _unchanged(self.model):
            found = self._lookup()
            try:
                with time_limit(self.config.time_limit):
                    if found is None or not self._load(found):
                        self._compile()
            except TimeLimitReached:
                self._time_is_up()
            except (ConfigError, GraphBreakError):
                raise
            except Exception as error:
                self._fall_back(classify(error), error)
            self._verify()
            self._measure()
            self._keep()

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
                return self._look_into(self._store, stage.attributes)
            except GraphBreakError:
                raise
            except Exception as error:
                self._fall_back(Failure("lookup_failed", f"{type(error).__name__}: {error}"), error, whole=False)
                return None

    def _look_into(self, store: Store, attributes: dict[str, Any]) -> Artifact | None:
        assert self._fingerprint is not None
        refusal = store.refusal(self.name, self._fingerprint) if self.config.fullgraph == "require" else None
        if refusal is not None:
            attributes["outcome"] = "hit"
            raise GraphBreakError(refusal.message, refusal.breaks)
        lookup = store.lookup(self.name, self._fingerprint)
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
                self._decide_as(artifact.decisions)
                misses = dynamo.cache_misses()
                if any(shape.engine != "eager" for shape in self.shapes):
                    self._prepare(artifact.cache, fullgraph=self._whole)
                self._compiled_now = dynamo.cache_misses() > misses
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

    def _decide_as(self, decisions: dict[str, Any]) -> None:
        """What an earlier boot found out: no verifying and measuring again."""
        rows = {row["signature"]: row for row in decisions["shapes"]}
        for shape in self.shapes:
            row = ShapeReport(**rows[shape.label])
            shape.bounds = tuple(Bound(**item) for item in decisions["bounds"][shape.label])
            shape.engine, shape.speedup, shape.max_error, shape.reason = (
                row.engine,
                row.speedup,
                row.max_error,
                row.reason,
            )
        self._whole = decisions["whole"]
        self._breaks = tuple(GraphBreak(**item) for item in decisions["graph_breaks"])

    def _forget(self) -> None:
        self.program, self._whole, self._breaks = None, True, ()
        for shape in self.shapes:
            shape.engine, shape.speedup, shape.max_error, shape.reason = "eager", None, None, ""

    def _compile(self) -> None:
        with self.timeline.stage("compile"):
            self._compiled_now = True
            jit.check_backend(self.config, where=f"model {self.name!r}")
            self._open_draft()
            cache = self._draft.cache if self._draft else None
            for shape in self.shapes:
                shape.engine = "jit"
            if self.config.fullgraph == "allow_breaks":
                self._prepare(cache, fullgraph=False)
                return
            try:
                self._prepare(cache, fullgraph=True)
            except jit.GraphBroken as error:
                self._graph_is_broken(error)
                self._prepare(cache, fullgraph=False)

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
            sources = hash_files({*self._sources, *(item.file for item in breaks if item.file)})
            self._store.remember_refusal(self.name, self._fingerprint, Refusal(message, breaks, sources))
        except Exception as error:
            logger.warning("model %r: the graph breaks could not be remembered: %s", self.name, error)

    def _open_draft(self) -> None:
        if self._store is None or self._fingerprint is None or not self.config.artifacts.write:
            return
        try:
            self._draft = self._store.draft(self.name, self._fingerprint)
        except Exception as error:
            logger.warning("model %r: nothing will be kept for the next boot: %s", self.name, error)
            self.timeline.event("fallback", reason="store_failed", message=str(error))
            self.timeline.listeners.tell("fallback", self.name, "store_failed")

    def _prepare(self, cache: Path | None, *, fullgraph: bool) -> None:
        """Compiles (or loads from `cache`) every shape. Each that fails is served eagerly."""
        self.program = jit.JitProgram(self.model, self.method, self.config, fullgraph=fullgraph)
        self._whole = fullgraph
        try:
            with (
                dynamo.inductor_cache(cache),
                dynamo.recorded_sources() as sources,
                recorded_phases() as phases,
                dynamo.recorded_graph_breaks() as breaks,
                self.program.preparing(len(self.shapes)),
            ):
                for shape in self.shapes:
                    self._prepare_shape(self.program, shape)
        finally:
            self._sources |= sources
            self._add_phases(phases)
            if not fullgraph:
                self._breaks = tuple(dict.fromkeys((*self._breaks, *breaks)))
                self._whole = not self._breaks
        if self._breaks:
            self._say_partial()

    def _prepare_shape(self, program: jit.JitProgram, shape: PreparedShape) -> None:
        try:
            if shape.bounds is None:
                shape.bounds = self._find_bounds(shape)
            program.prepare(shape.example)
        except (jit.GraphBroken, ConfigError):
            raise
        except Exception as error:
            failure = classify(error)
            if failure.reason == "no_compiler":  # no other shape will fare better
                raise
            logger.debug("model %r: compiling failed", self.name, exc_info=error)
            self._shape_falls_back(shape, failure)

    def _find_bounds(self, shape: PreparedShape) -> tuple[Bound, ...]:
        try:
            return find_bounds(self._eager(), shape.example.clone(), self.names)
        except Exception as error:
            if out_of_memory(error):
                raise
            raise ConfigError(
                f"model {self.name!r}: the example input ({shape.label}) fails without compiling: "
                f"{type(error).__name__}: {error}. Fix example_inputs."
            ) from error

    def _shape_falls_back(self, shape: PreparedShape, failure: Failure) -> None:
        shape.serve_eagerly(str(failure))
        logger.error("model %r: %s is served eagerly: %s", self.name, shape.label, failure)
        self._tell_fallback(failure)

    def _add_phases(self, phases: list[Phase]) -> None:
        self._phases += phases
        stages: list[Stage] = []
        for phase in phases:
            parent = self.timeline.current if phase.parent is None else stages[phase.parent]
            stages.append(self.timeline.past(f"phase.{phase.name}", parent, phase.started_ns, phase.ended_ns))

    def _say_partial(self) -> None:
        places = "; ".join(f"{item.file}:{item.line}: {item.reason}" for item in self._breaks[:3])
        logger.warning(
            "model %r: compiled in parts, %d graph break(s): %s (`bentoml-compile explain` lists all)",
            self.name,
            len(self._breaks),
            places,
        )
        for item in self._breaks:
            self.timeline.event("graph_break", file=item.file, line=item.line, reason=item.reason)

    # verify, measure, keep

    def _verify(self) -> None:
        loaded = self.artifact is not None and not self._compiled_now
        if self.config.verify is False or not self._served_by_jit() or (loaded and not self.config.verify.on_load):
            return
        with self.timeline.stage("verify"):
            for shape in self._served_by_jit():
                self._verify_shape(shape, self.config.verify)

    def _verify_shape(self, shape: PreparedShape, config: VerifyConfig) -> None:
        assert self.program is not None
        eager = self._eager()
        try:
            expected, actual = _call(eager, shape.example.clone()), _call(self.program, shape.example.clone())
            comparison = compare(
                expected,
                actual,
                config=config,
                reference=lambda: _call(lambda *a, **k: in_higher_precision(self.model, self.method, shape.example)),
            )
        except Exception as error:
            self._shape_falls_back(shape, Failure("verification", f"could not be compared: {error}"))
            return
        shape.max_error = comparison.max_error
        if not comparison.problem:
            return
        failure = Failure("verification", f"compiled differs from eager: {comparison.problem}")
        if config.strict:
            raise VerificationError(
                f"model {self.name!r}, shape ({shape.label}): {failure.message}. Compiled code was not served. Raise "
                "verify.rtol/atol if this difference is acceptable, or set verify.strict to false to serve eagerly."
            )
        self._shape_falls_back(shape, failure)

    def _measure(self) -> None:
        to_measure = [shape for shape in self._served_by_jit() if shape.speedup is None]
        if not self.config.keep_eager_if_slower or not to_measure:
            return
        with self.timeline.stage("measure"):
            for shape in to_measure:
                self._measure_shape(shape)

    def _measure_shape(self, shape: PreparedShape) -> None:
        program, eager = self.program, self._eager()
        assert program is not None
        inputs = shape.example.clone()
        try:
            speedup = measure(
                lambda: program(*inputs.args, **inputs.kwargs), lambda: _call(eager, inputs), device_of(self.model)
            )
        except Exception as error:
            self._shape_falls_back(shape, classify(error))
            return
        shape.speedup = speedup.ratio
        if speedup.slower:
            shape.serve_eagerly(
                f"compiled is slower: {speedup.ratio:.2f} of eager's speed in {speedup.pairs} runs of each"
            )
            logger.warning("model %r: %s is served eagerly: %s", self.name, shape.label, shape.reason)
            self.timeline.event("kept_eager", shape=shape.label, speedup=speedup.ratio)

    def _keep(self) -> None:
        """Completes the artifact, if this boot's result is one that the next may rely on."""
        complete = all(shape.engine != "eager" or shape.speedup is not None for shape in self.shapes)
        try:
            if self._draft is not None and complete:
                with self.timeline.stage("store"):
                    self.artifact = self._draft.seal(self._decisions(), hash_files(self._sources))
                    self.artifact.hold()
            elif self.artifact is not None and complete and (self._compiled_now or self.artifact.grown()):
                with self.timeline.stage("store"):
                    self.artifact.reseal(self._decisions())
        except Exception as error:
            self._fall_back(Failure("store_failed", f"the artifact was not kept: {error}"), error, whole=False)
        finally:
            if self._draft is not None and self.artifact is None:
                with contextlib.suppress(OSError):
                    self._draft.discard()

    def _decisions(self) -> dict[str, Any]:
        return {
            "whole": self._whole,
            "graph_breaks": [dataclasses.asdict(item) for item in self._breaks],
            "shapes": [dataclasses.asdict(shape.report()) for shape in self.shapes],
            "bounds": {shape.label: [_as_json(bound) for bound in shape.bounds or ()] for shape in self.shapes},
        }

    # falling back

    def _time_is_up(self) -> None:
        failure = Failure(
            "time_limit",
            f"compiling took longer than time_limit ({self.config.time_limit:g} s); raise torch_compile.time_limit or "
            "prepare fewer shapes",
        )
        self._fall_back(failure)

    def _fall_back(self, failure: Failure, error: BaseException | None = None, *, whole: bool = True) -> None:
        logger.error("model %r: %s%s", self.name, "served eagerly: " if whole else "", failure)
        if error is not None:
            logger.debug("model %r: the error behind it", self.name, exc_info=error)
        self._tell_fallback(failure)
        if whole:
            self._serve_all_eagerly(str(failure))

    def _tell_fallback(self, failure: Failure) -> None:
        self.timeline.event("fallback", reason=failure.reason, message=failure.message)
        self.timeline.listeners.tell("fallback", self.name, failure.reason)

    def _serve_all_eagerly(self, reason: str) -> None:
        self._failure = reason
        self.program, self._compiled_now, self.artifact = None, False, None
        for shape in self.shapes:
            shape.serve_eagerly(reason)

    # the result

    def report(self, seconds: float) -> CompileReport:
        outcome: Outcome = "compiled" if self._compiled_now else "loaded" if self.artifact is not None else "eager"
        return CompileReport(
            model=self.name,
            engine="jit" if 2 * len(self._served_by_jit()) > len(self.shapes) else "eager",
            outcome=outcome,
            seconds=seconds,
            fingerprint=self._fingerprint.id if self._fingerprint else "",
            mode=self.config.mode,
            fullgraph=self._whole and bool(self._served_by_jit()),
            phases=seconds_by_phase(self._phases),
            shapes=tuple(shape.report() for shape in self.shapes),
            graph_breaks=self._breaks,
            rejected=tuple(self._rejected),
            fallback=self._failure,
        )

    def _served_by_jit(self) -> list[PreparedShape]:
        return [shape for shape in self.shapes if shape.engine == "jit"]

    def _eager(self) -> Callable[..., Any]:
        return eager_callable(self.model, self.method)


def _call(function: Callable[..., Any], inputs: ExampleInput | None = None) -> Any:
    with torch.inference_mode():
        return function(*inputs.args, **inputs.kwargs) if inputs is not None else function()


@contextlib.contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """A boot runs the model many times; its buffers and the random state are afterwards what they were."""
    saved = [
        (module, name, b, b.clone())
        for module in model.modules()
        for name, b in module._buffers.items()
        if b is not None
    ]
    devices = [device.index or 0] if (device := device_of(model)).type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in saved:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
                module._buffers[name] = buffer


def _as_json(bound: Bound) -> dict[str, Any]:
    return {**dataclasses.asdict(bound), "path": list(bound.path)}
