"""Fake tensors that a trace has left where the live model finds them again.

Only the model's modules are copied for a trace (shadow.py). What its code keeps elsewhere, in a global, a class, a
default argument or an `lru_cache`, is the live model's too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # private; torch 2.13.0
from torch.utils import _pytree as pytree

from bentoml_compile.engines.aot.errors import NotExportable
from bentoml_compile.engines.eager import call_as_traced
from bentoml_compile.engines.failures import out_of_memory
from bentoml_compile.shapes import ExampleInput, describe
from bentoml_compile.words import first_line

logger = logging.getLogger("bentoml_compile")

_OF_A_TRACE = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)


class FakesLeft(NotExportable):
    """The model itself is no longer what it was before it was traced."""


def refuse_leftovers(eager: Callable[..., Any], example: ExampleInput, names: tuple[str, ...]) -> None:
    """Runs the live model once at the sizes that were traced.

    Raises:
        FakesLeft: it meets what the trace has left, or raises.
    """
    if (what := _meets(eager, example)) is None:
        return
    reason = (
        f"since it was traced, the model itself {what} for ({describe(example, names)}), also where it serves eagerly: "
        "its code keeps what tracing gave it outside of its modules (in a global, a class, a cache). Have it keep "
        "nothing while torch.compiler.is_compiling(), or set torch_compile.engine to 'jit'"
    )
    logger.error("%s", reason)
    raise FakesLeft(reason)


def _meets(eager: Callable[..., Any], example: ExampleInput) -> str | None:
    try:
        output = call_as_traced(eager, example.clone())
    except Exception as error:
        if out_of_memory(error):
            raise
        return f"raises {type(error).__name__}: {first_line(error)[:200]}"
    fake = any(isinstance(leaf, _OF_A_TRACE) for leaf in pytree.tree_leaves(output))
    return "returns fake tensors" if fake else None
