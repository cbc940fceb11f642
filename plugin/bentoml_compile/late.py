"""What is compiled while a model serves: a boot in the background, and shapes that its calls ask for.

A late shape is a small boot of its own, with its own artifact: one that an earlier worker has learned is loaded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bentoml_compile.artifacts.places import Places
from bentoml_compile.background import background
from bentoml_compile.compiler import compiling
from bentoml_compile.engines import dynamo
from bentoml_compile.engines.limits import ProcessEnds
from bentoml_compile.listener import Compile, Listeners, Timeline, Value
from bentoml_compile.prepared import Target
from bentoml_compile.report import in_words
from bentoml_compile.shapes import ExampleInput, Signature
from bentoml_compile.startup import Startup

logger = logging.getLogger("bentoml_compile")

_MOST_SEEN = 1024  # signatures that are counted at a time
_MOST_BY_JIT = 128  # late compiles of a process: Dynamo keeps its code for them as long as the class lives (torch 2.13)


def complete_late(startup: Startup) -> BaseException | None:
    """Finishes a boot while the model serves. What would have stopped it ends in eager serving, and is returned."""
    try:
        if not startup.find():
            startup.target.rehearse()
        startup.complete()
    except ProcessEnds:
        raise
    except BaseException as error:
        startup.give_up(error)
        return error
    finally:
        startup.target.rehearsal = None
        dynamo.watch.take()  # these were no call's
    return None


@dataclass(eq=False)
class LateShapes:
    """What one model learns from its calls. `install` gives a finished boot's shapes to the model."""

    target: Target
    listeners: Listeners
    places: Places
    install: Callable[[Startup], None]
    _seen: dict[Signature, int] = field(default_factory=dict)
    _asked: set[Signature] = field(default_factory=set)  # also what could not be compiled: asked for once
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def saw(self, signature: Signature | None, inputs: ExampleInput) -> None:
        """Counts a call that was not prepared; the one that makes it `prepare_after` has it compiled."""
        wanted = self.target.config.prepare_after
        if signature is None or wanted is None or signature in self._asked:
            return
        with self._lock:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            seen = self._seen[signature] = self._seen.get(signature, 0) + 1
            if seen < wanted or not self._ask(signature):
                return
        example = self._copied(inputs)
        if example is not None:
            background.run(lambda: self._prepare(example))

    def prepare_now(self, signature: Signature | None, inputs: ExampleInput) -> Compile | None:
        """Compiles in the caller's thread, which waits for it; None if this signature was asked for before.

        Other calls of the same signature wait, too, and then find what the first one has prepared.
        """
        if signature is None:
            return None
        with compiling:
            with self._lock:
                if not self._ask(signature):
                    return None
            started = time.time_ns()
            example = self._copied(inputs)
            if example is None:
                return None
            label = self._prepare(example)
            return Compile(started, time.time_ns(), f"shape was not prepared: {label}")

    def forget(self, signature: Signature | None) -> None:
        """It was dropped, and may be asked for again."""
        with self._lock:
            if signature is not None:
                self._asked.discard(signature)

    def _ask(self, signature: Signature) -> bool:
        self._seen.pop(signature, None)
        if signature in self._asked or _jit_compiles >= _MOST_BY_JIT:
            return False
        if len(self._asked) >= _MOST_SEEN:
            self._asked.clear()
        self._asked.add(signature)
        return True

    def _copied(self, inputs: ExampleInput) -> ExampleInput | None:
        """None where none can be made, as of a class that refuses it: eager needs no copy."""
        try:
            return inputs.clone()
        except Exception as error:
            logger.warning("model %r: not prepared: a call's input cannot be copied: %s", self.target.name, error)
            return None

    def _prepare(self, example: ExampleInput) -> str:
        target = self.target.of_examples((example,))
        label, config = target.shapes[0].label, target.config
        timeline = Timeline(self.listeners)
        attributes: dict[str, Value] = {"mode": config.mode, "fullgraph": config.fullgraph, "late": True}
        with timeline.stage("startup", model=target.name, **attributes):
            startup = Startup(target, timeline, self.places, is_in_background=True, is_late=True)
            complete_late(startup)
            report = startup.end()
        if any(shape.compiled_by == "jit" for shape in target.shapes):
            _count_jit_compile(target.name)
        for shape in target.shapes:
            shape.learned, shape.example = True, shape.example.without_values()  # a client's data is not kept
        self.install(startup)
        logger.info("model %r: prepared late: %s: %s; %s", target.name, label, report.outcome, in_words(report.shapes))
        return label


_jit_compiles = 0


def _count_jit_compile(model: str) -> None:
    global _jit_compiles
    _jit_compiles += 1
    if _jit_compiles == _MOST_BY_JIT:
        logger.error(
            "model %r: torch.compile was asked for %d late shapes in this process, and is not asked again: set"
            " torch_compile.dynamic or torch_compile.pad for sizes that vary",
            model,
            _MOST_BY_JIT,
        )
