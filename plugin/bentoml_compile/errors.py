"""Everything this package raises on purpose. Each message ends with what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bentoml.exceptions import BentoMLConfigException, BentoMLException, UnprocessableEntity

if TYPE_CHECKING:
    from bentoml_compile.report import GraphBreak

__all__ = [
    "ArtifactRejected",
    "CompileError",
    "ConfigError",
    "GraphBreakError",
    "UnpreparedInputError",
    "VerificationError",
]


class CompileError(BentoMLException):
    """Base of every error of this package."""


class ConfigError(CompileError, BentoMLConfigException):
    """A `torch_compile` setting that cannot be used: names the service, the key, the value and what is allowed."""


class GraphBreakError(CompileError):
    """`fullgraph: require` met a model that does not compile as one graph.

    Attributes:
        breaks: every graph break that was found, in the order of execution.
    """

    def __init__(self, message: str, breaks: Sequence[GraphBreak] = ()) -> None:
        super().__init__(message)
        self.breaks = tuple(breaks)


class UnpreparedInputError(CompileError, UnprocessableEntity):
    """`on_unprepared: reject` met an input whose signature was not prepared. HTTP 422 in a service."""


class VerificationError(CompileError):
    """`verify: {strict: true}` met a compiled result that differs from the eager one."""


class ArtifactRejected(CompileError):
    """A stored artifact that must not be loaded; the message says why. Never stops a boot by itself."""
