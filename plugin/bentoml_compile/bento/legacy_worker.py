"""The processes of a legacy service: one for each runner, with its own threads and GPU, and that of the API.

What is set up here is what `bentoml.serving`, `bentoml_cli.worker.runner` and `bentoml_cli.worker.http_api_server` set
up. All of it is private; checked with BentoML 1.4.40.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import bentoml
from bentoml._internal.configuration.containers import BentoMLContainer

from bentoml_compile.bento import runners
from bentoml_compile.bento.live import NOBODY, Warmed, Worker, live, note_bento
from bentoml_compile.bento.own_process import in_own_process

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LegacyWorker:
    """A runner's first worker, or the API's, in which embedded runners live; for a process of its own.

    Attributes:
        target: what `bentoml serve` takes; a folder by its whole path.
        runner: its name; empty: the API's.
    """

    target: str
    runner: str = ""

    def __str__(self) -> str:
        return f"runner {self.runner!r}" if self.runner else "the API worker"

    def warm(self, use: Callable[[Warmed], T]) -> T:
        """See Worker. The process's environment and working directory are to be the worker's."""
        context: Any = bentoml.server_context
        context.worker_index = 1
        context.service_type = "runner" if self.runner else "api_server"
        context.service_name = self.runner or None
        service: Any = bentoml.load(self.target, working_dir=os.getcwd())
        context.service_name = self.runner or service.name
        note_bento(service.name, service.tag)
        return live(self._app(service), use, bundle=runners.bundle_root())

    def _app(self, service: Any) -> Any:
        if self.runner:
            from bentoml._internal.server.runner_app import RunnerAppFactory

            [runner] = [each for each in service.runners if each.name == self.runner]
            return RunnerAppFactory(runner, worker_index=1)()
        BentoMLContainer.worker_index.set(1)
        BentoMLContainer.development_mode.set(False)  # in which it would have all runners
        BentoMLContainer.remote_runner_mapping.set({each.name: NOBODY for each in service.runners if not each.embedded})
        return service.asgi_app


def in_each_worker(
    do: Callable[[Worker], T], service: Any, target: str, *, environment: Mapping[str, str], folder: str
) -> list[T]:
    """What `do` returns with each of a legacy service's workers, in a process of its own.

    Args:
        service: the target, as it was loaded in this process.
        environment, folder: of this process before that.

    Raises:
        CompileError: as `in_own_process`. BentoMLException: a runner asks for what this machine does not have.
    """
    path = os.path.join(folder, os.path.expanduser(target))
    if os.path.isdir(path):
        target = folder = os.path.realpath(path)
    return [
        in_own_process(partial(do, worker), str(worker), environment={**environment, **added}, folder=folder)
        for worker, added in _workers_of(service, target)
    ]


def _workers_of(service: Any, target: str) -> Iterator[tuple[LegacyWorker, dict[str, str]]]:
    """With what BentoML adds to each one's environment."""
    made_here = runners.runners_of(service)
    for runner in made_here:
        if not runner.embedded:
            added = runner.scheduled_worker_env_map[0]
            yield LegacyWorker(target, runner.name), {name: str(value) for name, value in added.items()}
    if service.startup_hooks or any(runner.embedded for runner in made_here):
        yield LegacyWorker(target), {}
