"""A worker that lives without a server, and what its models are asked meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import bentoml

from bentoml_compile.artifacts.artifact import Artifact
from bentoml_compile.artifacts.store import Store
from bentoml_compile.artifacts.uploads import uploads
from bentoml_compile.bento import settings
from bentoml_compile.compiled_model import CompiledModel, open_models

logger = logging.getLogger("bentoml_compile")

T = TypeVar("T")

NOBODY = "file:///not/served/while/warming"  # the address of another worker

_NO_VERSION = "not available"  # BentoML's word for the version of what is no Bento
_UPLOAD_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Warmed:
    """A worker that is ready.

    Attributes:
        models: in the order of its `compile_model` calls.
        bundle: where it looks for its Bento's artifacts; None: nowhere.
        all_shared: whether every upload that was to be is done.
        dependencies: the names by which the services that it depends on are warmed.
        bento: the tag of the Bento that it was loaded from; empty if it was loaded from a project's folder.
    """

    models: tuple[CompiledModel, ...]
    bundle: Path | None
    all_shared: bool
    dependencies: tuple[str, ...] = ()
    bento: str = ""


class Worker(Protocol):
    """One kind of process of a target, in which models may be compiled."""

    def warm(self, use: Callable[[Warmed], T]) -> T:
        """Make what the process is to serve, with its start-up hooks, and use it while it lives; once a process."""


def live(app: Any, use: Callable[[Warmed], T], *, bundle: Path | None, dependencies: tuple[str, ...] = ()) -> T:
    """The app's life without a server. Its uploads are waited for, and `startup: background` is as `block`."""

    async def run() -> T:
        async with app.router.lifespan_context(app):
            done = uploads.wait(_UPLOAD_SECONDS)
            if not done:
                logger.warning("uploads take longer than %g s, and are given up", _UPLOAD_SECONDS)
            all_shared = done and not uploads.failed
            return use(Warmed(tuple(open_models.values()), bundle, all_shared, dependencies, _bento()))

    with settings.blocking():
        return asyncio.run(run())


def note_bento(name: str, tag: bentoml.Tag | None) -> None:
    """What BentoML notes in a worker: the Bento that its service `name` was loaded from, if it was."""
    bentoml.server_context.bento_name = name if tag is None else tag.name
    bentoml.server_context.bento_version = _NO_VERSION if tag is None else str(tag.version)


def _bento() -> str:
    context = bentoml.server_context
    return "" if context.bento_version == _NO_VERSION else f"{context.bento_name}:{context.bento_version}"


def artifact_of(model: CompiledModel) -> Artifact | None:
    """What the model was stored as or loaded from; None if it was not kept."""
    return vars(model)["_artifacts"].get("")  # type: ignore[no-any-return]


def store_of(model: CompiledModel) -> Store:
    """This machine's, for that model."""
    return Store(vars(model)["_target"].config.artifacts.store or settings.bentoml_home() / "compile")
