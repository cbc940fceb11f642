"""Where a service's models break the graph, found by making the service without compiling or serving anything."""

from __future__ import annotations

import bentoml

from bentoml_compile.errors import CompileError
from bentoml_compile.model import explaining
from bentoml_compile.report import GraphBreak


def explain(target: str) -> list[tuple[str, tuple[GraphBreak, ...]]]:
    """Load a service as its worker would, construct it, and collect each model's graph breaks.

    Models of its dependencies belong to those services: name one as "service:Entry.dependency".

    Args:
        target: what `bentoml serve` takes: "service:Name", a Bento's tag or a folder.

    Returns:
        Model name and graph breaks, in the order of the service's `compile_model` calls.

    Raises:
        CompileError: the target is a legacy service. ConfigError: its torch_compile section cannot be used.
        bentoml.exceptions.BentoMLException: it cannot be loaded. Whatever the service's `__init__` raises.
    """
    service = bentoml.load(target, standalone_load=True)  # standalone: the working folder stays the service's
    if not isinstance(service, bentoml.Service):
        raise CompileError(f"{target} is a legacy service; explain needs a class decorated with @bentoml.service")
    with explaining() as found:
        service()
    return list(found)
