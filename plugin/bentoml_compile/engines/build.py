"""What every engine does with a shape, and what a build leaves behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bentoml_compile.engines.bounds import Indexing, find_indexing
from bentoml_compile.engines.failures import Failure, classify, out_of_memory
from bentoml_compile.engines.phases import Phase
from bentoml_compile.engines.sources import watched_sources
from bentoml_compile.errors import ConfigError
from bentoml_compile.prepared import PreparedShape, Target
from bentoml_compile.report import GraphBreak
from bentoml_compile.shapes import ExampleInput, describe

OnFailure = Callable[[PreparedShape, Failure], None]


@dataclass(eq=False)
class Record:
    """Filled by a build also when it fails: the trace, the report and the artifact need it."""

    phases: list[Phase] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)  # with their hashes when the eager run ended, see sources.py
    breaks: tuple[GraphBreak, ...] = ()

    def took(self, phases: Iterable[Phase], shape: str = "") -> None:
        """Adds the phases of one stretch of the build."""
        before = len(self.phases)
        for phase in phases:
            parent = None if phase.parent is None else phase.parent + before
            self.phases.append(dataclasses.replace(phase, parent=parent, shape=shape))


def examine(target: Target, shape: PreparedShape, record: Record) -> None:
    """Finds what eager does with the shape's inputs by running it, unless an artifact has told.

    Raises:
        ConfigError: the model cannot run this example, or one at the corners of its ranges, at all.
    """
    if shape.bounds is not None:
        return
    found: list[Indexing] = []
    for example in shape.inputs():
        inputs = example.clone()
        try:
            with watched_sources() as sources:
                found.append(find_indexing(target.trial, inputs, target.names))
        except Exception as error:
            if out_of_memory(error):
                raise
            raise _cannot_run(target, shape, example, error) from error
        record.sources = {**sources, **record.sources}
        shape.writes_inputs = shape.writes_inputs or not inputs.equals(example)
    # a bound that changes with the sizes cannot be checked before a call: such code must stand a wrong index
    everywhere = set(found[0].bounds).intersection(*(one.bounds for one in found))
    shape.bounds = tuple(bound for bound in found[0].bounds if bound in everywhere)
    shape.computes_indices = any(one.computed or set(one.bounds) != everywhere for one in found)


def _cannot_run(target: Target, shape: PreparedShape, example: ExampleInput, error: Exception) -> ConfigError:
    given = describe(example, target.names)
    what, where = "the example input", "example_inputs"
    # e.g. an index that is out of range where there are fewer rows to pick from
    if example is not shape.example:
        what, where = f"the example's values at an end of the range {shape.label}, ", "dynamic, example_inputs"
    return ConfigError(
        f"model {target.name!r}: the model itself, not compiled, raises for {what} ({given}): "
        f"{type(error).__name__}: {error}. Correct {where} or the model."
    )


def shape_failure(error: Exception) -> Failure:
    """The failure of one shape, served eagerly from here on; raises it again if no other shape will fare better."""
    failure = classify(error)
    if failure.reason == "no_compiler":
        raise error
    return failure
