"""The model as it is: what compiled code is compared with, and what serves when there is none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch


def eager_callable(model: torch.nn.Module, method: str) -> Callable[..., Any]:
    """What a caller would call without us: the module itself for `forward`, so that its hooks run."""
    function: Callable[..., Any] = model if method == "forward" else getattr(model, method)
    return function


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer; the CPU for a model without any."""
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    return tensor.device if tensor is not None else torch.device("cpu")
