"""/readyz answers 503 while a model of the service is compiled in the background, as its `ready_when` says.

`follow` is told of each model. A service none of whose models is compiled in the background is left as it is. Where a
service calls another one in a process of its own, BentoML asks that one's /readyz, too.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

from starlette.exceptions import HTTPException

from bentoml_compile.bento import settings
from bentoml_compile.bento.settings import MODELS
from bentoml_compile.compiled_model import CompiledModel, open_models

logger = logging.getLogger("bentoml_compile")

_Models = WeakKeyDictionary[CompiledModel, None]  # no WeakSet: a thread may add to it while another one reads it

_CHAINED = "__bentoml_compile__"  # of a method that asks for them

_changing = threading.Lock()  # a service may compile its models in threads


def follow(model: CompiledModel) -> None:
    """Makes the service not ready until the model is, or is closed, or gone.

    The service is the one whose instance is being constructed, else the one of this worker (a model that is compiled in
    another thread, in a start-up hook or by a request). Outside of both, as in a script, nothing is done.
    """
    if model.is_ready:  # it stays so
        return
    worker, construction = settings.worker_service(), settings.current_construction()
    while construction is not None:  # a dependency made in the same process has a /readyz that nobody asks
        construction.models[model] = None
        if construction.service is not None:
            _ask_before_ready(construction.service.inner)
        else:
            _ask_runners()
        if construction.service is worker:
            worker = None
        construction = construction.outer
    if worker is not None:  # in development, its dependencies are made after it
        _of_worker(worker.inner)[model] = None
        _ask_before_ready(worker.inner)


@functools.cache
def _ask_runners() -> None:
    """Makes legacy runners not ready while their models are not: in a process of their own, and in an API worker's.

    `LocalRunnerRef` and `RunnerAppFactory` are private; checked with BentoML 1.4.40. Where they are missing, a runner
    is ready as soon as its `__init__` is over.
    """
    try:
        from bentoml._internal.runner.runner_handle.local import LocalRunnerRef
        from bentoml._internal.server.runner_app import RunnerAppFactory

        local, app = LocalRunnerRef.is_ready, RunnerAppFactory.readyz
    except (ImportError, AttributeError) as error:
        logger.warning("readiness: this BentoML's runners are ready before their models are: %s", error)
        return

    @functools.wraps(local)
    async def is_ready(self: Any, timeout: int) -> bool:
        return _are_ready(self._runnable) and await local(self, timeout)

    @functools.wraps(app)
    async def readyz(self: Any, request: Any) -> Any:
        if not await self.runner.runner_handle_is_ready():
            raise HTTPException(503, f"Runner {self.runner.name} is not ready.")
        return await app(self, request)

    LocalRunnerRef.is_ready = is_ready  # type: ignore[method-assign]
    RunnerAppFactory.readyz = readyz  # type: ignore[method-assign,assignment]


def _of_worker(cls: type) -> _Models:
    """Kept by the class, since the instance may not be made yet."""
    with _changing:
        if MODELS not in vars(cls):
            setattr(cls, MODELS, _Models())
    return vars(cls)[MODELS]  # type: ignore[no-any-return]


def _are_ready(instance: Any) -> bool:
    return all(
        model.is_ready or open_models.get(model.report.model) is not model  # then it is closed
        for models in (vars(instance).get(MODELS), getattr(type(instance), MODELS, None))
        for reference in (() if models is None else models.keyrefs())
        if (model := reference()) is not None
    )


def _ask_before_ready(cls: Any) -> None:
    """Chains the models to the service class's own `__is_ready__`, if it has one; once a class."""
    with _changing:
        own = inspect.getattr_static(cls, "__is_ready__", None)
        if not hasattr(own, _CHAINED):
            runs_in_thread = own is not None and not _is_async(cls.__is_ready__)
            cls.__is_ready__ = _chained(own) if runs_in_thread else _chained_async(own)
            setattr(cls.__is_ready__, _CHAINED, True)


def _chained(own: Any) -> Callable[[Any], Any]:
    def is_ready(self: Any) -> Any:
        return _are_ready(self) and own.__get__(self, type(self))()

    return is_ready


def _chained_async(own: Any) -> Callable[[Any], Awaitable[Any]]:
    async def is_ready(self: Any) -> Any:
        return _are_ready(self) and (own is None or await own.__get__(self, type(self))())

    return is_ready


def _is_async(function: Any) -> bool:
    """As BentoML finds out, of the service's own and of what takes its place."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)
