"""Where a service's models break the graph, found by making the service without compiling or serving anything."""

from __future__ import annotations

from dataclasses import dataclass

from bentoml_compile.bento.live import Worker
from bentoml_compile.bento.warm import ask
from bentoml_compile.model import explaining
from bentoml_compile.report import GraphBreak


@dataclass(frozen=True, slots=True)
class Explained:
    """A service without compiling it.

    Attributes:
        models: name and graph breaks, in the order of the `compile_model` calls; of a legacy service, those of one
            runner after another.
        dependencies: the names by which the services that it depends on are explained.
    """

    models: tuple[tuple[str, tuple[GraphBreak, ...]], ...]
    dependencies: tuple[str, ...]


def explain(target: str) -> Explained:
    """Load a service as its worker would, construct it, and collect each model's graph breaks.

    Models of its dependencies belong to those services: name one as "service:Entry.dependency".

    Args:
        target: what `bentoml serve` takes: "service:Name", a Bento's tag or a folder.

    Raises:
        As `warm`.
    """
    workers = ask(target, _of_worker)
    return Explained(
        tuple(model for worker in workers for model in worker.models),
        tuple(name for worker in workers for name in worker.dependencies),
    )


def _of_worker(worker: Worker) -> Explained:
    with explaining() as found:
        dependencies = worker.warm(lambda warmed: warmed.dependencies)
    return Explained(tuple(found), dependencies)
