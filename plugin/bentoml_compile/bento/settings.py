"""Which service a model belongs to, and what that service's config says about compiling it.

BentoML merges a service's config by itself (decorator < BENTOML_CONFIG < BENTOML_CONFIG_OVERRIDES <
BENTOML_CONFIG_OPTIONS) and keeps keys that it does not know. `install` adds two things to `bentoml.Service`. Right
after that merge, each service's `torch_compile` section is checked, so that `bentoml serve` and `bentoml build` refuse
a wrong one before there is a worker or a model. And while an instance is constructed, `settings_for` knows whose it is.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import bentoml

from bentoml_compile.config import (
    SECTION,
    CompileConfig,
    ServiceSection,
    merged,
    nearest,
    parse_config,
    parse_service_section,
)
from bentoml_compile.errors import ConfigError

logger = logging.getLogger("bentoml_compile")

T = TypeVar("T")

MODELS = "__bentoml_compile_models__"  # of an instance
BUNDLE = "compiled"  # the folder of a Bento's artifacts


@dataclass(slots=True, eq=False)
class Construction:
    """An instance of a service or of a legacy runner that is being made, maybe inside of another one's construction.

    Attributes:
        name: of the service or the runner.
        cls: of the instance.
        service: None if it is a runner.
        outer: that other one.
        models: its compiled models that may not be ready; the instance keeps them as MODELS.
    """

    name: str
    cls: type
    section: ServiceSection
    service: bentoml.Service[Any] | None = None
    outer: Construction | None = None
    used: set[str] = field(default_factory=set)
    models: WeakKeyDictionary[Any, None] = field(default_factory=WeakKeyDictionary)

    def run(self, make: Callable[[], T]) -> T:
        """The instance, which `make` constructs as this construction's own."""
        self.outer = _construction.get()
        token = _construction.set(self)
        try:
            instance = make()
        finally:
            _construction.reset(token)
        self._warn_of_unused()
        setattr(instance, MODELS, self.models)
        return instance

    def _warn_of_unused(self) -> None:
        for name in self.section.unused(self.used):
            logger.warning(
                "%s: %s.models.%s is not used%s: the models compiled with its config are: %s",
                self.section.where,
                SECTION,
                name,
                nearest(name, self.used),
                ", ".join(sorted(self.used)) or "none",
            )


_construction: ContextVar[Construction | None] = ContextVar("bentoml_compile_construction", default=None)

_blocks = False  # nothing is served here: a compile in the background would be waited for

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


def config_of(model_name: str, given: CompileConfig | Mapping[str, Any] | None) -> CompileConfig:
    """The config that counts for a model: the one that its `compile_model` call gives, else that of `settings_for`.

    Raises:
        ConfigError: it holds what cannot be used.
    """
    where = f"compile_model(name={model_name!r})"
    config = settings_for(model_name) if given is None else parse_config(given, where=where)
    return config.model_copy(update={"startup": "block"}) if _blocks else config


@contextlib.contextmanager
def blocking() -> Iterator[None]:
    """Inside, `startup: background` is as `block`."""
    global _blocks
    _blocks = True
    try:
        yield
    finally:
        _blocks = False


def current_construction() -> Construction | None:
    """Of the service instance that is being made here, if one is."""
    return _construction.get()


def current_service() -> bentoml.Service[Any] | None:
    """The service whose instance is being constructed here, else the one that this worker serves, else None."""
    construction = _construction.get()
    return _worker_service if construction is None else construction.service


def worker_service() -> bentoml.Service[Any] | None:
    """The service that this worker serves, also while another one's instance is made in the same process."""
    return _worker_service


def entry_of(service: bentoml.Service[Any]) -> bentoml.Service[Any]:
    """Itself, or of "service:Entry.dependency" the first; `bentoml.load` notes there what it was asked for."""
    module, _, names = service.import_string.partition(":")
    entry = getattr(sys.modules.get(module), names.partition(".")[0], service)
    return entry if isinstance(entry, bentoml.Service) else service


def section_of(service: bentoml.Service[Any]) -> ServiceSection:
    """The service's section as it is in a worker that serves it.

    Raises:
        ConfigError: the section holds what cannot be used.
    """
    service.inject_config()
    return _checked_section(service)


def refuse_keys_that_are_no_text(section: object, where: str) -> None:
    """For a section that is written in code: a deployment's would not override such keys.

    BentoML's merge of a service's config would end in "'int' object is not iterable".
    """
    for path, key in _other_keys(section, SECTION):
        raise ConfigError(f"{where}: {path}: the key {key!r} is not text; write {str(key)!r}")


def overridden(section: Any, name: str) -> Any:
    """The section that is written in code, with what BentoML's config has for `services.<name>` laid on it."""
    own: Any = _merged_services().get(name)
    return laid(section, own[SECTION]) if _has(own) else section


def sections_beside(names: Collection[str]) -> dict[str, str]:
    """The sections in BentoML's config that no service or runner of these names reads: name and path."""
    services = _merged_services()
    found = {name: f"services.{name}.{SECTION}" for name, own in services.items() if name not in names and _has(own)}
    return {**found, "": f"services.{SECTION}"} if SECTION in services and SECTION not in names else found


def _has(own: Any) -> bool:
    return isinstance(own, Mapping) and SECTION in own


def laid(section: Any, over: Any) -> Any:
    """`section` with `over` laid on it, mapping by mapping; what is no mapping is replaced."""
    return merged(section, over) if isinstance(section, Mapping) and isinstance(over, Mapping) else over


def bentoml_home() -> Path:
    """BentoML's home by BentoML's rule ($BENTOML_HOME, else ~/bentoml), without creating it as BentoML's own does."""
    home = os.environ.get("BENTOML_HOME", os.path.join("~", "bentoml"))
    return Path(os.path.expandvars(os.path.expanduser(home)))


def bundle_root() -> Path | None:
    """Where the artifacts of the current service's Bento lie, if it has any; None outside of a service."""
    service = current_service()
    return None if service is None else bundle_root_of(service)


def bundle_root_of(service: bentoml.Service[Any]) -> Path | None:
    """`compiled/` in the service's working directory or, if that has none, beside the module that defines its class.

    If neither has one, where it is to be made; None where there is no place for it.

    The working directory is the one in which the service was imported: `src` of a served Bento (which BentoML makes
    its workers' own), else the directory that `bentoml serve` has been given or was started in. It counts only where
    Python imports from it: who can write there can run code in the service anyway.
    """
    working = getattr(service, "working_dir", None)  # of bentoml.Service; checked with BentoML 1.4.40
    return bundle_in(places_of(working, service.inner.__module__))


def places_of(working: str | None, module: str) -> list[str]:
    """Where artifacts may lie for what was defined in that working directory by that module; maybe nowhere."""
    places = [working] if working is not None and _is_imported_from(working) else []
    file = getattr(sys.modules.get(module), "__file__", None)
    return places + ([os.path.dirname(os.path.realpath(file))] if file is not None else [])


def bundle_in(places: Sequence[str]) -> Path | None:
    """The first `compiled/` that is there, else where it is to be made."""
    roots = [Path(place, BUNDLE) for place in places]
    return next((root for root in roots if os.path.isdir(root)), roots[0] if roots else None)


def _is_imported_from(directory: str) -> bool:
    entries = (os.path.realpath(entry) for entry in sys.path if isinstance(entry, str))
    return os.path.realpath(directory) in entries


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

        return BentoMLContainer.config.get().get("services") or {}
    except (ImportError, AttributeError) as error:
        logger.warning("BentoML's merged config was not found (%s): overrides of torch_compile do not apply", error)
        return {}


def _checking(inject: Callable[[bentoml.Service[Any]], None]) -> Callable[[bentoml.Service[Any]], None]:
    @functools.wraps(inject)
    def inject_config(self: bentoml.Service[Any]) -> None:
        services = self.all_services().values()
        for service in services:
            refuse_keys_that_are_no_text(service.config.get(SECTION), f"service {service.name!r}")
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
        outer = _construction.get()
        if outer is None and not _in_worker():
            self.inject_config()  # a worker has done so; here, e.g. in a test, nobody else does
        construction = Construction(self.name, self.inner, _checked_section(self), self)
        return construction.run(lambda: construct(self))

    return call


def _in_worker() -> bool:
    return bentoml.server_context.service_name is not None


def _section_outside_construction() -> ServiceSection:
    if _worker_service is not None:
        return _checked_section(_worker_service)
    runner = bentoml.server_context.service_name
    return parse_service_section(None if runner is None else overridden(None, runner), service=runner or "")


def _checked_section(service: bentoml.Service[Any]) -> ServiceSection:
    # BentoML's config holds the decorator's keys only if it has merged this service: as entry or dependency.
    return parse_service_section(overridden(service.config.get(SECTION), service.name), service=service.name)


def _other_keys(value: object, path: str) -> list[tuple[str, object]]:
    if not isinstance(value, Mapping):
        return []
    here = [(path, key) for key in value if not isinstance(key, str)]
    return here + [found for key, inner in value.items() for found in _other_keys(inner, f"{path}.{key}")]
