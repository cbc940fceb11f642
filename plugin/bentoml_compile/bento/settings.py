"""Which service a model belongs to, and what that service's config says about compiling it.

BentoML merges a service's config by itself (decorator < BENTOML_CONFIG < BENTOML_CONFIG_OVERRIDES <
BENTOML_CONFIG_OPTIONS) and keeps keys that it does not know. `install` adds two things to `bentoml.Service`. Right
after that merge, each service's `torch_compile` section is checked, so that `bentoml serve` and `bentoml build` refuse
a wrong one before there is a worker or a model. And while an instance is constructed, `settings_for` knows whose it is.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bentoml

from bentoml_compile.config import SECTION, CompileConfig, ServiceSection, merged, nearest, parse_service_section
from bentoml_compile.errors import ConfigError

logger = logging.getLogger("bentoml_compile")


@dataclass(slots=True, eq=False)
class _Construction:
    """An instance of a service that is being made, maybe inside of another one's construction."""

    service: bentoml.Service[Any]
    section: ServiceSection
    used: set[str] = field(default_factory=set)


_construction: ContextVar[_Construction | None] = ContextVar("bentoml_compile_construction", default=None)

# The service of this worker. Global because a worker serves one, and its threads do not inherit context variables.
_worker_service: bentoml.Service[Any] | None = None


def settings_for(model_name: str) -> CompileConfig:
    """The merged config for a model of the current service, and note that this name is in use.

    The current service is the one whose instance is being constructed, else the worker's own. In a legacy runner's
    process it is `services.<runner name>.torch_compile`. In a plain script: the defaults.

    Raises:
        ConfigError: the section holds what cannot be used.
    """
    construction = _construction.get()
    if construction is not None:
        construction.used.add(model_name)
        return construction.section.for_model(model_name)
    return _section_outside_construction().for_model(model_name)


def current_service() -> bentoml.Service[Any] | None:
    """The service whose instance is being constructed here, else the one that this worker serves, else None."""
    construction = _construction.get()
    return _worker_service if construction is None else construction.service


def bentoml_home() -> Path:
    """BentoML's home by BentoML's rule ($BENTOML_HOME, else ~/bentoml), without creating it as BentoML's own does."""
    home = os.environ.get("BENTOML_HOME", os.path.join("~", "bentoml"))
    return Path(os.path.expandvars(os.path.expanduser(home)))


@functools.cache
def install() -> None:
    """Check and follow every service from now on; a second call does nothing."""
    service_class = _service_class()
    if service_class is not None:
        service_class.inject_config = _checking(service_class.inject_config)
        service_class.__call__ = _following(service_class.__call__)


def _service_class() -> Any | None:
    """`bentoml.Service`, of which `inject_config`, `all_services` and `__call__` are no documented API.

    Checked with BentoML 1.4.40. If one is missing, a wrong config is found only by the first `compile_model`, and a
    service's config is found by the worker's `server_context.service_name` alone.
    """
    missing = {"inject_config", "all_services", "__call__"} - vars(bentoml.Service).keys()
    if missing:
        logger.warning("this BentoML has no Service.%s: torch_compile is not checked before start-up", min(missing))
        return None
    return bentoml.Service


def _merged_services() -> Mapping[str, Any]:
    """BentoML's merged config by service name. Private; checked with BentoML 1.4.40.

    If it is missing, only the decorators' config applies, and that is logged.
    """
    try:
        from bentoml._internal.configuration.containers import BentoMLContainer

        return BentoMLContainer.config.get().get("services", {})  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        logger.warning("BentoML's merged config was not found (%s): overrides of torch_compile do not apply", error)
        return {}


def _checking(inject: Callable[[bentoml.Service[Any]], None]) -> Callable[[bentoml.Service[Any]], None]:
    @functools.wraps(inject)
    def inject_config(self: bentoml.Service[Any]) -> None:
        services = self.all_services().values()
        for service in services:
            _refuse_keys_that_are_no_text(service)
        inject(self)
        for service in services:
            _checked_section(service)
        if _in_worker():
            global _worker_service
            _worker_service = self

    return inject_config


def _following(construct: Callable[[bentoml.Service[Any]], Any]) -> Callable[[bentoml.Service[Any]], Any]:
    @functools.wraps(construct)
    def call(self: bentoml.Service[Any]) -> Any:
        if _construction.get() is None and not _in_worker():
            self.inject_config()  # a worker has done so; here, e.g. in a test, nobody else does
        construction = _Construction(self, _checked_section(self))
        token = _construction.set(construction)
        try:
            instance = construct(self)
        finally:
            _construction.reset(token)
        _warn_of_unused(construction)
        return instance

    return call


def _in_worker() -> bool:
    return bentoml.server_context.service_name is not None


def _section_outside_construction() -> ServiceSection:
    if _worker_service is not None:
        return _checked_section(_worker_service)
    runner = bentoml.server_context.service_name
    if runner is None:
        return parse_service_section(None, service="")
    return parse_service_section((_merged_services().get(runner) or {}).get(SECTION), service=runner)


def _checked_section(service: bentoml.Service[Any]) -> ServiceSection:
    section = service.config.get(SECTION)
    overridden = _merged_services().get(service.name) or {}
    if SECTION in overridden:
        # It holds the decorator's keys only if BentoML has merged this service: as the entry or a dependency of it.
        override = overridden[SECTION]
        both = isinstance(section, Mapping) and isinstance(override, Mapping)
        section = merged(section, override) if both else override
    return parse_service_section(section, service=service.name)


def _refuse_keys_that_are_no_text(service: bentoml.Service[Any]) -> None:
    # BentoML's merge would end in "'int' object is not iterable".
    for path, key in _other_keys(service.config.get(SECTION), SECTION):
        raise ConfigError(f"service {service.name!r}: {path}: the key {key!r} is not text; write {str(key)!r}")


def _other_keys(value: object, path: str) -> list[tuple[str, object]]:
    if not isinstance(value, Mapping):
        return []
    here = [(path, key) for key in value if not isinstance(key, str)]
    return here + [found for key, inner in value.items() for found in _other_keys(inner, f"{path}.{key}")]


def _warn_of_unused(construction: _Construction) -> None:
    for name in construction.section.unused(construction.used):
        logger.warning(
            "service %r: %s.models.%s is not used%s: the models compiled with the service's config are: %s",
            construction.service.name,
            SECTION,
            name,
            nearest(name, construction.used),
            ", ".join(sorted(construction.used)) or "none",
        )
