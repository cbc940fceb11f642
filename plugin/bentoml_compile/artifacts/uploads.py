"""Uploads beside serving: one after the other in a thread that never holds up the interpreter's end."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from bentoml_compile.errors import CompileError
from bentoml_compile.words import one_line

if TYPE_CHECKING:
    from bentoml_compile.artifacts.artifact import Artifact
    from bentoml_compile.artifacts.remote import Remote

logger = logging.getLogger("bentoml_compile")

Told = Callable[["Exception | None"], object]


class Uploads:
    """A queue of uploads.

    Args:
        attempts: of each upload, until it counts as failed.
        pause: seconds before the second one; each further pause is twice as long.
        longest: seconds of the longest pause.

    Attributes:
        failed: how many have failed for good.
    """

    def __init__(self, *, attempts: int = 5, pause: float = 1.0, longest: float = 60.0) -> None:
        self._attempts = attempts
        self._pause = pause
        self._longest = longest
        self._waiting: deque[tuple[Remote, Artifact, Told]] = deque()
        self.failed = 0
        self._unfinished = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, remote: Remote, artifact: Artifact, told: Told = lambda error: None) -> None:
        """Upload an artifact when its turn comes; a failure is a warning in the log.

        Args:
            artifact: held until it is over.
            told: called when it is over, in the thread of the uploads: with None, or the error of the last attempt.
        """
        with self._changed:
            self._waiting.append((remote, artifact, told))
            self._unfinished += 1
            if self._thread is None or not self._thread.is_alive():  # none, or in the parent of a forked process
                self._thread = threading.Thread(target=self._work, name="bentoml-compile-uploads", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def refuse(self) -> None:
        """Count an upload that cannot even begin."""
        with self._changed:
            self.failed += 1

    def wait(self, seconds: float) -> bool:
        """Until every upload is over, one way or the other; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished == 0, seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                remote, artifact, told = self._waiting.popleft()
            error = self._upload(remote, artifact)
            try:
                told(error)
            except Exception:
                logger.exception("model %r: what is to follow its upload failed", artifact.model)
            with self._changed:
                self.failed += error is not None
                self._unfinished -= 1
                self._changed.notify_all()

    def _upload(self, remote: Remote, artifact: Artifact) -> Exception | None:
        for attempt in range(1, self._attempts + 1):
            try:
                sent = remote.upload(artifact)
                words = "uploaded to" if sent else "is as it should be at"
                logger.info("model %r: artifact %s %s", artifact.model, words, remote.uri)
                return None
            except Exception as error:
                failure = error
                if isinstance(error, (CompileError, ValueError, ImportError)):  # will be so again
                    break
                logger.debug("model %r: upload, attempt %d: %s", artifact.model, attempt, error)
            if attempt < self._attempts:
                time.sleep(min(self._pause * 2 ** (attempt - 1), self._longest) * random.uniform(0.5, 1.0))
        kind, text = type(failure).__name__, one_line(failure)
        logger.warning("model %r: artifact not uploaded to %s: %s: %s", artifact.model, remote.uri, kind, text)
        return failure


uploads = Uploads()  # of this process: whoever ends it may want to wait for all of them
