"""Compiled code on trial: what cannot be compared is a failure, and raises nothing."""

from __future__ import annotations

import torch
from torch import nn

from bentoml_compile.config import CompileConfig, VerifyConfig
from bentoml_compile.prepared import Target
from bentoml_compile.shapes import ExampleInput
from bentoml_compile.trial import Trial


class Model(nn.Module):
    is_broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_broken:
            raise ValueError("broken")
        return x


def test_eager_that_raises_when_it_is_asked_again_is_a_failure() -> None:
    model = Model()
    target = Target(model, "forward", "model", CompileConfig(), ("x",), (ExampleInput((torch.ones(2),), {}),))
    [shape] = target.shapes

    def wrong(x: torch.Tensor) -> torch.Tensor:
        model.is_broken = True
        return x + 1

    shape.run = wrong
    failure = Trial(target).verify(shape, VerifyConfig())
    assert failure is not None
    assert failure.reason == "verification"
    assert failure.message == "could not be compared: ValueError: broken"
