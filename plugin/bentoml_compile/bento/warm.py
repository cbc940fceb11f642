"""A target made as its workers make it, without a server: its models are compiled, or loaded, and kept.

def reports(worker):
    return worker.warm(lambda warmed: [model.report for model in warmed.models])

[of_its_worker] = warm("service:Embedder", reports)
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import bentoml
from bentoml._internal.configuration.containers import BentoMLContainer

from bentoml_compile.bento import settings
from bentoml_compile.bento.legacy_worker import in_each_worker
from bentoml_compile.bento.live import NOBODY, Warmed, Worker, live, note_bento
from bentoml_compile.bento.own_process import in_own_process
from bentoml_compile.errors import CompileError

T = TypeVar("T")


def warm(target: str, do: Callable[[Worker], T]) -> list[T]:
    """What `do` returns with the first worker of each kind: a service's own; of a legacy one its runners' and its API.

    A worker whose environment is not this process's (threads, GPUs, the service's `envs`) is made in a process of its
    own, and so is each one of a legacy service. Dependencies are not made: each has workers of its own, and is warmed
    by its own name, "service:Entry.dependency".

    Args:
        target: what `bentoml serve` takes: "service:Name", a Bento's tag or a folder.
        do: to be pickled, like its result. Called with one worker at a time, of which it warms this one.

    Raises:
        CompileError: it cannot be made in a process of its own; or what `compile_model` raises.
        bentoml.exceptions.BentoMLException: it cannot be loaded. Whatever the service's own code raises.
    """
    environment, folder = dict(os.environ), os.getcwd()
    service: Any = _load(target)
    if not isinstance(service, bentoml.Service):
        return in_each_worker(do, service, target, environment=environment, folder=folder)
    added = _environment_of(service)
    if added.items() <= os.environ.items():
        return [do(_ServiceWorker(target, service))]
    environment |= added
    job = partial(do, _ServiceWorker(target))
    return [in_own_process(job, f"service {service.name!r}", environment=environment, folder=folder)]


def ask(target: str, do: Callable[[Worker], T]) -> list[T]:
    """As `warm`, where nothing is compiled; what is no boot is not traced as one."""
    os.environ["OTEL_SDK_DISABLED"] = "true"
    return warm(target, do)


@dataclass(frozen=True, slots=True)
class _ServiceWorker:
    """Attributes:
    service: as it was loaded in this process; None: `warm` loads it.
    """

    target: str
    service: bentoml.Service[Any] | None = None

    def warm(self, use: Callable[[Warmed], T]) -> T:
        service = self.service or _load(self.target)
        with _worker_of(service):
            own = service.dependencies.items()
            dependencies = tuple(f"{service.import_string}.{field}" for field, other in own if other.on is not None)
            return live(service.to_asgi(), use, bundle=settings.bundle_root_of(service), dependencies=dependencies)


def _load(target: str) -> Any:
    bentoml.server_context.worker_index = 1  # an import that fails inside of bentoml.importing() is an error
    return bentoml.load(target, standalone_load=True)  # standalone: the working folder stays the service's


@contextlib.contextmanager
def _worker_of(service: bentoml.Service[Any]) -> Iterator[None]:
    """What BentoML's `_bentoml_impl.worker.service` and `server.serving` set up. Checked with BentoML 1.4.40.

    Calls of a dependency fail: the address that is given for it is nobody's.
    """
    service.inject_config()
    others = service.all_services().keys() - {service.name}
    BentoMLContainer.remote_runner_mapping.set(dict.fromkeys(others, NOBODY))
    context = bentoml.server_context
    context.service_type, context.service_name = "entry_service", service.name
    note_bento(service.name, None if service.bento is None else service.bento.tag)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = directory
        yield


def _environment_of(service: bentoml.Service[Any]) -> dict[str, str]:
    """What BentoML sets for a service's first worker: its `envs`, and its GPUs.

    The worker of a dependency has the `envs` of the entry service, too. They win over its own, which win over this
    process's environment, which wins over the entry's.
    """
    from _bentoml_impl.server.allocator import ResourceAllocator  # type: ignore[import-untyped]

    service.inject_config()
    entry = settings.entry_of(service)
    found = {name: _value(entry, name, os.environ.get(name, value)) for name, value in _asked_by(entry)}
    for name, value in _asked_by(service):
        if name not in found:
            found[name] = _value(service, name, value or os.environ.get(name))
    _, gpus = ResourceAllocator().get_worker_env(service)
    return {**found, **gpus}


def _asked_by(service: bentoml.Service[Any]) -> Iterator[tuple[str, str | None]]:
    return ((variable.name, variable.value or None) for variable in service.envs if variable.stage != "build")


def _value(service: bentoml.Service[Any], name: str, value: str | None) -> str:
    if value is None:
        raise CompileError(f"service {service.name!r} needs the environment variable {name}; set it")
    return str(value)
