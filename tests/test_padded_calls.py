"""`pad` in a compiled model: calls of sizes between the prepared ones run at the next of them, with eager's result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bentoml_compile.compiled_model import CompiledModel
from bentoml_compile.errors import ConfigError, UnpreparedInputError
from bentoml_compile.listener import Call, Listener
from bentoml_compile.model import compile_model
from tests.models import classifier, ids

PAD = {"ids": {"0": "repeat", "1": 0}, "mask": {"0": "repeat", "1": 0}}
CONFIG = {"backend": "eager", "keep_eager_if_slower": False, "pad": PAD, "on_unprepared": "reject"}
BATCHES, LENGTHS = (1, 4, 16), (8, 16)


class Masked(nn.Module):
    """A mean over the tokens that the mask leaves, and the tokens themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.inner.embedding(ids) * mask.unsqueeze(-1)
        return {"tokens": hidden, "pooled": hidden.sum(1) / mask.sum(1, keepdim=True)}


class Mixing(Masked):
    """Rows that see each other."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(ids, mask)
        return {**found, "pooled": found["pooled"].softmax(0)}


class Calls(Listener):
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.fallbacks: list[str] = []

    def called(self, call: Call) -> None:
        self.calls.append(call)

    def fallback(self, model: str, reason: str) -> None:
        self.fallbacks.append(reason)


def inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"ids": ids(batch, length), "mask": torch.ones(batch, length)}


EXAMPLES = [inputs(batch, length) for batch in BATCHES for length in LENGTHS]


def compiled(model: nn.Module, store: Path, **config: Any) -> tuple[CompiledModel, Calls]:
    calls = Calls()
    made = compile_model(
        model, example_inputs=EXAMPLES, config={**CONFIG, **config}, listeners=[calls], default_store=store
    )
    return made, calls


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def masked(store: Path) -> Iterator[tuple[CompiledModel, Masked, Calls]]:
    model = Masked().eval()
    made, calls = compiled(model, store)
    yield made, model, calls
    made.close()


def test_batches_of_every_size_run_on_the_prepared_ones(masked: tuple[CompiledModel, Masked, Calls]) -> None:
    made, model, calls = masked
    for batch in range(1, 17):
        for length in (1, 5, 8, 13):
            given = inputs(batch, length)
            torch.testing.assert_close(made(**given), model(**given))
            size = next(size for size in BATCHES if size >= batch)
            longer = next(size for size in LENGTHS if size >= length)
            call = calls.calls[-1]
            assert call.executable.label == f"ids: int64[{size}, {longer}], mask: float32[{size}, {longer}]"
            assert (call.engine, call.fallback) == ("jit", None)
            if (size, longer) == (batch, length):
                assert call.padding_ratio is None
            else:
                assert call.padding_ratio == pytest.approx(1 - batch * length / (size * longer))
    assert made.recompiles == 0


def test_what_no_prepared_shape_is_large_enough_for_is_not_padded(masked: tuple[CompiledModel, Masked, Calls]) -> None:
    with pytest.raises(UnpreparedInputError):
        masked[0](**inputs(17, 8))


def test_padding_goes_on_with_new_weights(masked: tuple[CompiledModel, Masked, Calls]) -> None:
    made, model, _ = masked
    other = Masked().eval()
    with torch.no_grad():
        other.inner.embedding.weight.mul_(2)
    made.update_weights(other.state_dict())
    torch.testing.assert_close(made(**inputs(3, 5)), other(**inputs(3, 5)))
    torch.testing.assert_close(model(**inputs(3, 5)), other(**inputs(3, 5)))


def test_a_model_whose_rows_mix_is_not_padded_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, calls = compiled(Mixing().eval(), tmp_path)
    with pytest.raises(UnpreparedInputError):
        made(**inputs(3, 8))
    assert "padding changes the model's result" in caplog.text
    assert "padding" in calls.fallbacks
    made.close()


class Odd(nn.Module):
    """Something else for three rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2 if x.shape[0] == 3 else 1)


def test_a_size_that_is_not_padded_to_one_shape_is_not_padded_to_a_larger_one(tmp_path: Path) -> None:
    made = compile_model(
        Odd().eval(),
        example_inputs=[(torch.rand(4, 5),), (torch.rand(8, 5),)],
        config={**CONFIG, "pad": {"x": {"0": "repeat"}}, "on_unprepared": "eager"},
        default_store=tmp_path,
    )
    x = torch.rand(3, 5)
    torch.testing.assert_close(made(x), x * 2)
    made.close()


class Largest(nn.Module):
    """A fill value of 0 wins where all real ones are below it."""

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return t.amax(1)


def test_a_fill_value_that_some_inputs_would_feel_is_found(tmp_path: Path) -> None:
    examples = [(torch.randint(1, 50, (4, length)),) for length in (4, 8)]
    config = {**CONFIG, "pad": {"t": {"1": 0}}, "on_unprepared": "eager"}
    made = compile_model(Largest().eval(), example_inputs=examples, config=config, default_store=tmp_path)
    t = torch.randint(-50, -1, (4, 3))
    torch.testing.assert_close(made(t), t.amax(1))
    made.close()


def test_a_pad_that_the_examples_have_nothing_to_do_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch_compile\.pad\.idz"):
        compiled(Masked().eval(), tmp_path, pad={"idz": {"0": "repeat"}})
