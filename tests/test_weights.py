"""Other weights for a model that serves: all of them at once, tied ones alike, and nothing is compiled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bentoml_compile.listener import Call, Listener
from bentoml_compile.model import CompiledModel, compile_model
from bentoml_compile.serving import Serving
from tests.waiting import wait_for

JIT = {"backend": "eager", "keep_eager_if_slower": False}
AOT = {"engine": "aot", "keep_eager_if_slower": False}
WIDTH = 48


class Tied(nn.Module):
    """Every weight has the same value: a result of two values has seen half of a change."""

    scale: torch.Tensor
    kept: torch.Tensor

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("kept", torch.full((1,), 1.0), persistent=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)
            self.scale.fill_(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = self.last(self.other(self.first(x))) / WIDTH**3
        return x * self.scale * self.kept


def answer(value: float) -> float:
    """What Tied gives for a one, whatever the place."""
    return float(value) ** 25


class Engines(Listener):
    def __init__(self) -> None:
        self.served: list[str] = []

    def called(self, call: Call) -> None:
        self.served.append(call.engine)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled once, then loaded."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(params=["jit", "aot"])
def tied(request: pytest.FixtureRequest, store: Path) -> Iterator[tuple[CompiledModel, Tied, Engines]]:
    model, engines = Tied().eval(), Engines()
    made = compile_model(
        model,
        example_inputs=[(torch.ones(2, WIDTH),)],
        config=AOT if request.param == "aot" else JIT,
        listeners=[engines],
        default_store=store if request.param == "aot" else None,
    )
    assert made.report.engine == request.param
    yield made, model, engines
    made.close()


def test_all_calls_that_follow_see_the_new_weights_and_nothing_is_compiled(
    tied: tuple[CompiledModel, Tied, Engines],
) -> None:
    made, model, engines = tied
    one = torch.ones(2, WIDTH)
    assert made(one).unique().tolist() == [answer(1)]
    made.update_weights(Tied(1.5).state_dict())
    torch.testing.assert_close(made(one), torch.full_like(one, answer(1.5)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        made(torch.ones(3, WIDTH)), torch.full((3, WIDTH), answer(1.5)), rtol=1e-5, atol=1e-5
    )  # eagerly
    torch.testing.assert_close(model(one), torch.full_like(one, answer(1.5)), rtol=1e-5, atol=1e-5)
    assert model.last.weight is model.first.weight
    assert model.kept.item() == 1
    assert made.recompiles == 0
    with torch.no_grad():
        model.scale.fill_(1)  # in place, as before
    torch.testing.assert_close(made(one), torch.full_like(one, 1.5**24))
    assert engines.served == [made.report.engine, made.report.engine, "eager", made.report.engine]


def test_no_call_sees_some_of_the_old_weights_and_some_of_the_new(tied: tuple[CompiledModel, Tied, Engines]) -> None:
    made, _, engines = tied
    values = (0.5, 1.0, 2.0)
    states = [Tied(value).state_dict() for value in values]
    allowed = {answer(value) for value in values}
    seen: set[float] = set()
    errors: list[BaseException] = []
    stop = threading.Event()

    def call(rows: int) -> None:
        one = torch.ones(rows, WIDTH)
        try:
            while not stop.is_set():
                seen.update(made(one).unique().tolist())
        except BaseException as error:
            errors.append(error)

    def wait_for_call(value: float) -> None:
        wait_for(lambda: answer(value) in seen or bool(errors))

    threads = [threading.Thread(target=call, args=(rows,)) for rows in (2, 2, 2, 3)]  # 3 rows: eagerly
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: made.report.engine in engines.served or bool(errors))
        for round_ in range(60):
            made.update_weights(states[round_ % 3])
            if round_ < len(values):  # else all rounds may be over before a call begins
                wait_for_call(values[round_])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors
    assert seen <= allowed
    assert len(seen) > 1
    assert made.report.engine in engines.served


def test_of_names_that_are_one_tensor_one_is_enough_and_two_values_are_refused(
    tied: tuple[CompiledModel, Tied, Engines],
) -> None:
    made, _, _ = tied
    state = Tied(1.5).state_dict()
    del state["last.weight"]
    made.update_weights(state)
    assert made(torch.ones(2, WIDTH))[0, 0].item() == pytest.approx(answer(1.5), rel=1e-4)
    with pytest.raises(ValueError, match=r"first\.weight, last\.weight share memory.*different values"):
        made.update_weights({**state, "last.weight": torch.zeros(WIDTH, WIDTH)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("other.weight"), r"missing: other\.weight"),
        (lambda state: state.update(more=torch.ones(1)), "unknown: more"),
        (lambda state: state.update(scale=torch.ones(2)), r"of other sizes: scale \[2\] instead of \[1\]"),
        (lambda state: state.update(scale=torch.ones(1) * 1j), r"complex for real: scale torch\.complex64"),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(
    tied: tuple[CompiledModel, Tied, Engines], change: Any, words: str
) -> None:
    made, _, _ = tied
    state = Tied(3).state_dict()
    change(state)
    with pytest.raises(ValueError, match=words):
        made.update_weights(state)
    assert made(torch.ones(2, WIDTH)).unique().tolist() == [1]


def test_a_value_that_is_no_tensor_is_a_type_error(tied: tuple[CompiledModel, Tied, Engines]) -> None:
    with pytest.raises(TypeError, match="'scale'"):
        tied[0].update_weights({**Tied().state_dict(), "scale": 2.0})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="mapping"):
        tied[0].update_weights(None)  # type: ignore[arg-type]


def test_other_dtypes_are_cast_as_load_state_dict_does(tied: tuple[CompiledModel, Tied, Engines]) -> None:
    made, model, _ = tied
    made.update_weights({name: value.half() for name, value in Tied(1.5).state_dict().items()})
    assert model.scale.dtype == torch.float32
    assert made(torch.ones(2, WIDTH))[0, 0].item() == pytest.approx(answer(1.5), rel=1e-4)


def test_a_model_of_inference_tensors_gets_new_values_too(store: Path) -> None:
    with torch.inference_mode():
        model = Tied().eval()
    made = compile_model(model, example_inputs=[(torch.ones(2, WIDTH),)], config=JIT, name="inference")
    made.update_weights(Tied(1.5).state_dict())
    torch.testing.assert_close(made(torch.ones(2, WIDTH)), torch.full((2, WIDTH), answer(1.5)), rtol=1e-5, atol=1e-5)
    made.close()


def test_code_with_its_weights_built_in_refuses_others() -> None:
    made = compile_model(
        Tied().eval(),
        example_inputs=[(torch.ones(2, WIDTH),)],
        config={"engine": "jit", "options": {"freezing": True}, "keep_eager_if_slower": False},
        name="frozen",
    )
    with pytest.raises(ValueError, match="freezing"):
        made.update_weights(Tied(2).state_dict())
    made.close()


def test_a_closed_model_takes_no_weights(tied: tuple[CompiledModel, Tied, Engines]) -> None:
    tied[0].close()
    with pytest.raises(RuntimeError, match="closed"):
        tied[0].update_weights(Tied().state_dict())


def test_calls_of_earlier_tables_are_waited_for() -> None:
    """A learned shape switches tables without waiting; weights must not be replaced under a call that began before."""
    first = Serving(lambda: None, [], (), {})
    first.calls.append(None)
    third = first.with_shapes([], first.eager).with_shapes([], first.eager)
    drained = threading.Thread(target=third.drain, daemon=True)
    drained.start()
    drained.join(0.2)
    assert drained.is_alive()
    first.calls.pop()
    drained.join(60)
    assert not drained.is_alive()
