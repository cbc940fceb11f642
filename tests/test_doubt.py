"""Artifacts of models that depend on what cannot be compared with what it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bentoml_compile.model import CompiledModel, compile_model

CONFIG = {
    "engine": "aot",
    "keep_eager_if_slower": False,
    "verify": False,
    "options": {"cpp.simdlen": 1, "aot_inductor.compile_wrapper_opt_level": "O0"},  # the compiler's least
}
X = torch.ones(2, 4)


class Reading(type):
    """Cannot be looked into."""

    def __getattribute__(cls, name: str) -> Any:
        if name == "__module__":
            raise RuntimeError("it is not to be read")
        return SCALES[-1] if name == "scale" else super().__getattribute__(name)


class Hidden(metaclass=Reading): ...


SCALES = [2.0] * 2000  # more than a setting has


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * Hidden.scale


@pytest.fixture(scope="module")
def boot(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], CompiledModel]:
    store = tmp_path_factory.mktemp("store")
    return lambda: compile_model(Scaled().eval(), example_inputs=[(X,)], name="m", config=CONFIG, default_store=store)


@pytest.fixture(autouse=True)
def scale_as_before() -> Any:
    yield
    SCALES[-1] = 2.0


def test_an_artifact_in_doubt_is_loaded_only_if_it_gives_what_the_model_gives(
    boot: Callable[[], CompiledModel], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "bentoml_compile")
    for scale, outcome in ((2.0, "compiled"), (2.0, "loaded"), (3.0, "eager")):
        SCALES[-1] = scale
        caplog.clear()
        with contextlib.closing(boot()) as model:
            assert model.report.outcome == outcome
            torch.testing.assert_close(model(X), torch.tanh(X) * scale)
        said = [line for line in caplog.messages if "cannot be compared" in line and "Hidden" in line]
        assert len(said) == (outcome != "compiled")
        monkeypatch.setattr("bentoml_compile.engines.aot.build.build", lambda *_, **__: 1 / 0)  # nothing else compiles
    assert "does not give what the model gives now" in model.report.rejected[0].reason
