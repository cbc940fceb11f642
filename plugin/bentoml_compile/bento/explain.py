"""Where a service's models break the graph, found by making the service without compiling or serving anything."""

from __future__ import annotations

from bentoml_compile.bento.live import Worker
from bentoml_compile.bento.warm import ask
from bentoml_compile.model import explaining
from bentoml_compile.report import GraphBreak

Breaks = list[tuple[str, tuple[GraphBreak, ...]]]


def explain(target: str) -> Breaks:
    """Load a service as its worker would, construct it, and collect each model's graph breaks.

    Models of its dependencies belong to those services: name one as "service:Entry.dependency".

    Args:
        target: what `bentoml serve` takes: "service:Name", a Bento's tag or a folder.

    Returns:
        Model name and graph breaks, in the order of the service's `compile_model` calls; of a legacy service, those of
        one runner after another.

    Raises:
        As `warm`.
    """
    return [model for models in ask(target, _of_worker) for model in models]


def _of_worker(worker: Worker) -> Breaks:
    with explaining() as found:
        worker.warm(lambda warmed: None)
    return list(found)
