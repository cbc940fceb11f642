"""What fails on the way to compiled code ends here: a log line, an event on the span, a metric; and eager serves."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from bentoml_compile.engines.failures import Failure
from bentoml_compile.listener import Timeline
from bentoml_compile.prepared import PreparedShape

logger = logging.getLogger("bentoml_compile")


@dataclass(frozen=True, slots=True)
class Fallbacks:
    """Of one model's boot."""

    model: str
    timeline: Timeline

    def whole_model(self, failure: Failure, error: BaseException | None) -> None:
        """The caller serves all shapes eagerly."""
        logger.error("model %r: served eagerly: %s", self.model, failure)
        self._tell(failure, error)

    def shape(self, shape: PreparedShape, failure: Failure) -> None:
        """From here on eager serves this shape."""
        logger.error("model %r: %s is served eagerly: %s", self.model, shape.label, failure)
        self._tell(failure)
        shape.serve_eagerly(str(failure))

    def slower(self, shape: PreparedShape) -> None:
        """Compiled code was right, but eager is faster and serves."""
        logger.warning("model %r: %s is served eagerly: %s", self.model, shape.label, shape.reason)
        self._tell(Failure("slower", f"{shape.label}: {shape.reason}"))

    def none(self, failure: Failure, error: BaseException | None) -> None:
        """Something failed that compiled serving does not depend on: the next boot may be slow."""
        logger.warning("model %r: %s", self.model, failure)
        self._tell(failure, error)

    def _tell(self, failure: Failure, error: BaseException | None = None) -> None:
        if error is not None:
            logger.debug("model %r: the error behind it", self.model, exc_info=error)
        self.timeline.event("fallback", reason=failure.reason, message=failure.message)
        self.timeline.listeners.tell("fallback", self.model, failure.reason)
