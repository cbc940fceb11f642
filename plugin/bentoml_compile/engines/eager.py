"""The model as it is: what compiled code is compared with, and what serves when there is none."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bentoml_compile.shapes import ExampleInput, tensor_leaves


def eager_callable(model: torch.nn.Module, method: str) -> Callable[..., Any]:
    """What a caller would call without us: the module itself for `forward`, so that its hooks run."""
    function: Callable[..., Any] = model if method == "forward" else getattr(model, method)
    return function


def call(function: Callable[..., Any], inputs: ExampleInput) -> Any:
    """The function's result for an example, under inference mode as in serving."""
    with torch.inference_mode():
        return function(*inputs.args, **inputs.kwargs)


def call_as_traced(function: Callable[..., Any], inputs: ExampleInput) -> Any:
    """The function's result, without gradients and with nothing compiled on the way.

    Run at the sizes of a trace that is to follow, eager fills what the model's code keeps by size outside of its
    modules (a global dict, an `lru_cache`) with real tensors. A trace would leave fake ones there.
    """
    with torch.compiler.set_stance("force_eager"), torch.inference_mode(False), torch.no_grad():
        return function(*inputs.args, **inputs.kwargs)


@contextlib.contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """A boot runs the model many times; its buffers and the random state are afterwards what they were."""
    saved = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = [device.index or 0] if (device := device_of(model)).type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in saved:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
                module._buffers[name] = buffer


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer; the CPU for a model without any."""
    return next((tensor.device for tensor in itertools.chain(model.parameters(), model.buffers())), torch.device("cpu"))


def device_of_call(model: torch.nn.Module, inputs: ExampleInput) -> torch.device:
    """The model's; for one without parameters and buffers that of the first tensor in the call."""
    tensors = (tensor for _, tensor in tensor_leaves((inputs.args, inputs.kwargs)))
    first = next(itertools.chain(model.parameters(), model.buffers(), tensors), None)
    return first.device if first is not None else torch.device("cpu")
