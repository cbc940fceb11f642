"""What every engine does with a shape, and what a build leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bentoml_compile.engines.bounds import find_indexing
from bentoml_compile.engines.failures import Failure, classify, out_of_memory
from bentoml_compile.engines.phases import Phase
from bentoml_compile.engines.sources import watched_sources
from bentoml_compile.errors import ConfigError
from bentoml_compile.prepared import PreparedShape
from bentoml_compile.report import GraphBreak

OnFailure = Callable[[PreparedShape, Failure], None]


@dataclass(eq=False)
class Record:
    """Filled by a build also when it fails: the trace, the report and the artifact need it."""

    phases: list[Phase] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)  # see engines/sources.py
    breaks: tuple[GraphBreak, ...] = ()


def examine(shape: PreparedShape, eager: Callable[..., Any], names: tuple[str, ...], record: Record) -> None:
    """Finds what eager does with the shape's inputs by running it once, unless an artifact has told.

    Raises:
        ConfigError: the model cannot run this example at all.
    """
    if shape.bounds is not None:
        return
    inputs = shape.example.clone()
    try:
        with watched_sources() as sources:
            indexing = find_indexing(eager, inputs, names)
    except Exception as error:
        if out_of_memory(error):
            raise
        raise ConfigError(
            f"model {shape.model!r}: the model itself, not compiled, raises for the example input ({shape.label}): "
            f"{type(error).__name__}: {error}. Correct example_inputs or the model."
        ) from error
    shape.bounds, shape.computes_indices = indexing.bounds, indexing.computed
    record.sources |= sources
    shape.writes_inputs = not inputs.equals(shape.example)


def shape_failure(error: Exception) -> Failure:
    """The failure of one shape, served eagerly from here on; raises it again if no other shape will fare better."""
    failure = classify(error)
    if failure.reason == "no_compiler":
        raise error
    return failure
