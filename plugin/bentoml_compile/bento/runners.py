"""Which legacy runner a model belongs to, what config it has, and where its Bento's artifacts are.

A runner's `torch_compile` section is that of its Runnable class, then that of its `runnable_init_params`, then that of
`services.<runner name>` in BentoML's config (which refuses unknown keys under `runners`); the later one overrides, key
by key. `install` has it checked where the runner is defined, and gives it to the models that the Runnable compiles.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bentoml

from bentoml_compile.bento import settings
from bentoml_compile.bento.settings import Construction
from bentoml_compile.config import SECTION, ServiceSection, parse_service_section

logger = logging.getLogger("bentoml_compile")

# Of the legacy service that this process has defined last. Global because a process of BentoML's serves one.
_places: list[str] = []


def written_section(runnable: type, given: Any, name: str) -> Any:
    """What the code says: the section of the class with that of `runnable_init_params`; None if it says nothing.

    Raises:
        ConfigError: a key in it is not text.
    """
    own = getattr(runnable, SECTION, None)
    section = own if given is None else given if own is None else settings.laid(own, given)
    settings.refuse_keys_that_are_no_text(section, f"runner {name!r}")
    return section


def section_of(runnable: type, given: Any, name: str) -> ServiceSection:
    """The whole section of a runner of that name.

    Raises:
        ConfigError: it holds what cannot be used.
    """
    section = settings.overridden(written_section(runnable, given, name), name)
    return parse_service_section(section, service=name, kind="runner")


def section_of_runner(runner: Any) -> ServiceSection:
    """As `section_of`."""
    return section_of(runner.runnable_class, given_section(runner), runner.name)


def runners_of(service: Any) -> list[Any]:
    """Of a legacy service, those that run in Python; one of Triton's does not."""
    return [runner for runner in service.runners if isinstance(runner, bentoml.legacy.Runner)]


def construction_of(runnable: type, given: Any = None) -> Construction:
    """The construction that an instance of a Runnable belongs to: its runner's, its service's, else one of its own.

    Args:
        given: the `torch_compile` argument of its `__init__`.
    """
    current = settings.current_construction()
    if current is None or current.cls is not runnable:
        name = runnable.__name__.lower()  # as the Runner would call itself
        return Construction(name, runnable, section_of(runnable, given, name))
    if current.service is None:
        current.section = section_of(runnable, given, current.name)
    return current


def bundle_root() -> Path | None:
    """Where the artifacts of the legacy service's Bento lie, for its runners and in its workers; else None.

    As of other services (`settings.bundle_root_of`): in the directory in which the service was imported, if Python
    imported from there at that time, else beside its module.
    """
    if (construction := settings.current_construction()) is not None:
        belongs = construction.service is None
    else:
        belongs = bentoml.server_context.service_name is not None and settings.worker_service() is None
    return bundle_of_service() if belongs else None


def bundle_of_service() -> Path | None:
    """Of the legacy service that this process has defined last."""
    return settings.bundle_in(_places)


@functools.cache
def install() -> None:
    """Check and follow every legacy runner and service from now on; a second call does nothing.

    `LocalRunnerRef`, which makes a runner's Runnable in whichever process it runs, is private; checked with BentoML
    1.4.40. Where it is missing, a runner has its config only in a process of its own.
    """
    try:
        from bentoml._internal.runner.runner_handle.local import LocalRunnerRef

        make, define = LocalRunnerRef.__init__, bentoml.legacy.Runner.__init__
        define_service = bentoml.legacy.Service.__init__
    except (ImportError, AttributeError) as error:
        logger.warning("this BentoML makes its runners in another way: torch_compile may not apply to them: %s", error)
        return

    @functools.wraps(define)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        define(self, *args, **kwargs)
        section_of_runner(self)

    @functools.wraps(make)
    def followed(self: Any, runner: Any) -> None:
        def runnable() -> Any:
            make(self, runner)
            return self._runnable

        Construction(runner.name, runner.runnable_class, section_of_runner(runner)).run(runnable)

    @functools.wraps(define_service)
    def placed(self: Any, *args: Any, **kwargs: Any) -> None:
        define_service(self, *args, **kwargs)
        _places[:] = settings.places_of(os.getcwd(), sys._getframe(1).f_globals["__name__"])

    bentoml.legacy.Service.__init__ = placed  # type: ignore[method-assign]
    bentoml.legacy.Runner.__init__ = checked  # type: ignore[method-assign]
    LocalRunnerRef.__init__ = followed  # type: ignore[method-assign]


def given_section(runner: Any) -> Mapping[str, Any] | None:
    """That of the runner's `runnable_init_params`."""
    return runner.runnable_init_params.get(SECTION)  # type: ignore[no-any-return]
