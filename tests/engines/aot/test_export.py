"""What is refused before anything is compiled, with the reason, and what tracing leaves behind: nothing."""

from __future__ import annotations

import collections
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from bentoml_compile.engines.aot import export
from bentoml_compile.engines.aot.dynamic import each_of_its_own, tracing_of
from bentoml_compile.engines.aot.errors import NotExportable
from bentoml_compile.engines.aot.package import Package
from bentoml_compile.engines.aot.shadow import shadow
from bentoml_compile.ranges import Place, free_sizes
from bentoml_compile.shapes import ExampleInput
from tests.architectures import make


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is refused never gets there, and of the others only the description is looked at."""
    monkeypatch.setattr(export, "compile_program", lambda *_, **__: "library.so")


class Model(nn.Module):
    """Some state to misuse; forward is each test's own."""

    def __init__(self, body: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(1))
        self.count = 0
        self.settings = {"count": 0}
        self.seen: list[Any] = []
        self.plain = torch.ones(6)
        self.body = body
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def exported(
    model: nn.Module | Callable[[Any, torch.Tensor], Any], x: torch.Tensor | None = None, **how: Any
) -> Package:
    model = model if isinstance(model, nn.Module) else Model(model)
    example = ExampleInput((torch.rand(5, 6) if x is None else x,), {})
    if ranges := how.pop("dynamic", None):
        how["sizes"] = free_sizes(ranges, [example], ("x",))
    return export.export_package(model, "forward", example, how.pop("directory"), mode="default", options={}, **how)


def set_(model: Any, name: str, value: Any) -> Any:
    setattr(model, name, value)
    return value


def tick(holder: dict[str, int]) -> int:
    holder["count"] += 1
    return 1


WRONG: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "a buffer in place": (lambda m, x: x + m.calls.add_(1), "changes buffer 'calls'"),
    "a buffer replaced": (lambda m, x: set_(m, "calls", x + 1), "changes 'calls'"),
    "a parameter": (lambda m, x: x + m.linear.bias.add_(1), "changes parameter 'linear.bias'"),
    "an input": (lambda m, x: x.add_(1), "changes input 'x'"),
    "a plain tensor": (lambda m, x: x + m.plain.add_(1), "plain is mutated"),
    "a counter": (lambda m, x: x * set_(m, "count", m.count + 1), "changes 'count'"),
    "a tensor kept for later": (lambda m, x: set_(m, "count", x + 1), "changes 'count'"),
    "an entry of a dict": (lambda m, x: x * tick(m.settings), r"changes 'settings\['count'\]'"),
    "a list": (lambda m, x: m.seen.append(1) or x, "changes 'seen'"),
    "rand": (lambda m, x: x + torch.rand(6), "random numbers in forward .aten.rand"),
    "multinomial": (lambda m, x: torch.multinomial(x, 1), "random numbers in forward .aten.multinomial"),
    "dropout": (lambda m, x: m.dropout.train()(x), "random numbers|training"),
    "attention with dropout": (
        lambda m, x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
        "random numbers in forward .aten.*attention",
    ),
    "random numbers in a branch": (
        lambda m, x: torch.cond(x.sum() > 0, lambda y: y + torch.rand(5, 6), lambda y: -y, (x,)),
        "random numbers in forward .aten.rand",
    ),
    "Python's random": (lambda m, x: x * random.random(), "Python's or NumPy's random"),
    "NumPy's random": (lambda m, x: x * float(np.random.rand()), "Python's or NumPy's random"),
    "a branch on values": (lambda m, x: x if x.sum() > 0 else -x, "torch.export: .*data-dependent"),
    "a number from values": (lambda m, x: (x, x.sum().item()), "returns a number that depends"),
    "a sparse result": (lambda m, x: x.to_sparse(), "layout torch.sparse_coo"),
    "no tensor": (lambda m, x: 1, "returns no tensor"),
    "an object": (lambda m, x: (x, object()), "returns a object"),
    # mypy takes a namedtuple that is made inside of a lambda for a plain tuple
    "a namedtuple": (lambda m, x: collections.namedtuple("Pair", "a b")(x, x), "cannot be written down"),  # type: ignore[call-arg]
    "a dict with odd keys": (lambda m, x: {(1, 2): x}, "neither strings nor numbers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_compiled_code_would_do_differently_is_refused(case: str, tmp_path: Path) -> None:
    body, words = WRONG[case]
    with pytest.raises(NotExportable, match=words):
        exported(body, directory=tmp_path)


RIGHT: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "attention without dropout": lambda m, x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "dropout in eval mode": lambda m, x: m.dropout(x),
    "a list replaced by an equal one": lambda m, x: set_(m, "seen", []) or x,
    "a tensor that is changed in place but its own": lambda m, x: torch.zeros(5, 6).add_(x),
    "a size that is fixed": lambda m, x: (x, x.shape),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_only_looks_like_a_hazard_is_exported(case: str, tmp_path: Path) -> None:
    assert exported(RIGHT[case], directory=tmp_path).inputs


def test_a_model_in_training_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotExportable, match="eval mode"):
        exported(nn.Sequential(nn.Linear(6, 6), nn.Dropout()), directory=tmp_path)
    with pytest.raises(NotExportable, match="changes buffer 'running_mean'"):
        exported(nn.BatchNorm1d(6), directory=tmp_path)


_collected: list[Any] = []


def test_a_hook_that_collects_into_a_list_is_refused(tmp_path: Path) -> None:
    local: list[Any] = []
    for hook in (lambda m, i, o: local.append(1), lambda m, i, o: _collected.append(1)):
        model = Model(lambda m, x: m.linear(x))
        model.linear.register_forward_hook(hook)
        with pytest.raises(NotExportable, match="forward changes"):
            exported(model, directory=tmp_path)


def test_weights_that_are_reached_around_the_modules_are_refused(tmp_path: Path) -> None:
    model = Model(lambda m, x: x)
    model.forward = lambda x: model.linear(x)  # type: ignore[method-assign]  # the live model, not the one traced
    with pytest.raises(NotExportable, match=r"reads 'linear\.weight' in another way"):
        exported(model, directory=tmp_path)
    other = nn.Linear(6, 6)
    with pytest.raises(NotExportable, match="no part of the model"):
        exported(lambda m, x: other(x), directory=tmp_path)


def test_literals_and_plain_attributes_are_kept_as_constants(tmp_path: Path) -> None:
    package = exported(lambda m, x: x * torch.tensor([1.0, 2, 3, 4, 5, 6]) + m.plain, directory=tmp_path)
    kept = load_file(tmp_path / "constants.safetensors")
    assert set(kept) == set(package.constants)
    assert sorted(value.sum().item() for value in kept.values()) == [6.0, 21.0]


def test_numbers_that_another_thread_draws_are_not_the_model_s(tmp_path: Path) -> None:
    """A server draws the ids of its requests' spans while a model is compiled in the background."""

    def elsewhere(m: Any, x: torch.Tensor) -> torch.Tensor:
        before = random.getstate()
        other = threading.Thread(target=random.random)
        other.start()
        other.join()
        assert random.getstate() != before
        return m.linear(x)

    package = exported(elsewhere, directory=tmp_path)
    assert {"model.linear.weight", "model.linear.bias"} <= set(package.weights)


def test_a_model_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    model = Model(lambda m, x: x)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(NotExportable, match=r"cannot be copied for tracing: .*lock"):
        exported(model, directory=tmp_path)


def test_a_cache_object_is_refused_with_what_to_do(tmp_path: Path) -> None:
    model, inputs = make("gpt2_with_cache")
    with pytest.raises(NotExportable, match="returns a DynamicCache; pass use_cache=False"):
        export.export_package(model, "forward", ExampleInput((), inputs), tmp_path, mode="default", options={})


# dynamic ranges


def test_layers_that_export_shows_as_proxies_are_not_taken_for_changed(tmp_path: Path) -> None:
    model, inputs = make("maskformer")
    package = export.export_package(model, "forward", ExampleInput((), inputs), tmp_path, mode="default", options={})
    assert package.library == "library.so"


def test_dimensions_of_one_size_and_range_are_one_symbol(tmp_path: Path) -> None:
    leaf = exported(lambda m, x: x @ x, torch.rand(5, 5), dynamic={"x": {0: (2, 8), 1: (2, 8)}}, directory=tmp_path)
    assert leaf.inputs[0].sizes[0] == leaf.inputs[0].sizes[1]
    assert list(leaf.ranges.values()) == [(2, 8)]


def test_dimensions_that_may_not_be_one_get_symbols_of_their_own(tmp_path: Path) -> None:
    """Export refuses the shared one: this model takes a square for a special case."""
    body = lambda m, x: x.sum(0) if x.shape[0] == x.shape[1] and x.shape[0] > 3 else x.sum(1)  # noqa: E731
    with pytest.raises(NotExportable, match=r"x.shape"):
        exported(body, torch.rand(5, 5), dynamic={"x": {0: (2, 8), 1: (2, 8)}}, directory=tmp_path)


def test_an_example_of_size_one_is_traced_at_two_or_more(tmp_path: Path) -> None:
    package = exported(lambda m, x: m.linear(x), torch.rand(1, 6), dynamic={"x": {0: (1, 8)}}, directory=tmp_path)
    symbol = package.inputs[0].sizes[0]
    assert isinstance(symbol, str)
    assert package.ranges == {symbol: (1, 8)}


def test_a_relation_that_sizes_alone_do_not_say_is_refused_in_the_words_of_the_model(tmp_path: Path) -> None:
    body = lambda m, x: x + 1 if x.shape[0] != x.shape[1] else x  # noqa: E731
    with pytest.raises(NotExportable, match=r"holds only where x\.shape\[0\] != x\.shape\[1\]"):
        exported(body, dynamic={"x": {0: (1, 8), 1: (2, 9)}}, directory=tmp_path)


def test_a_range_that_the_model_splits_is_refused_in_the_words_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(NotExportable, match=r"x\.shape\[0\]"):
        exported(lambda m, x: x if x.shape[0] > 3 else -x, dynamic={"x": {0: (1, 8)}}, directory=tmp_path)


def test_strides_of_a_range_are_those_of_the_example_at_other_sizes(tmp_path: Path) -> None:
    package = exported(
        lambda m, x: x + 1, torch.rand(6, 5).t(), dynamic={"x": {0: (1, 8), 1: (2, 9)}}, directory=tmp_path
    )
    rows, columns = package.inputs[0].sizes
    assert package.inputs[0].strides_at({str(rows): 3, str(columns): 4}) == torch.empty(4, 3).t().stride()


def test_sizes_to_trace_with_are_in_range_and_differ_where_the_dimensions_do() -> None:
    example = ExampleInput((torch.rand(1, 1), torch.rand(1, 1)), {})
    sizes = free_sizes({"x": {0: (1, 8), 1: (1, 9)}, "y": {0: (1, 8), 1: (1, 9)}}, [example], ("x", "y"))
    places = [Place("x", (), 0), Place("y", (), 0)]
    x, y = tracing_of(example, ("x", "y"), sizes, places).example.args
    assert x.shape == y.shape
    assert len(set(x.shape)) == 2
    apart = tracing_of(example, ("x", "y"), each_of_its_own(sizes), places)
    traced = [size for tensor in apart.example.args for size in tensor.shape]
    assert len(set(traced)) == 4
    assert all(2 <= size <= 8 for size in traced)


# the live model


def test_the_traced_copy_shares_tensors_but_no_attributes() -> None:
    model = Model(lambda m, x: x)
    model.linear.weight.requires_grad_(False)
    copied: Any = shadow(model)
    assert copied.linear.weight is model.linear.weight
    assert copied.calls is model.calls
    assert copied.plain is model.plain
    assert copied.linear is not model.linear
    assert copied.settings is not model.settings


def test_a_thread_that_serves_the_live_model_meanwhile_sees_nothing_of_it(tmp_path: Path) -> None:
    """The model keeps its last result, which is where a fake tensor would show."""
    model = Model(lambda m, x: set_(m, "last", m.linear(x) + m.calls))
    x = torch.rand(5, 6)
    with torch.no_grad():
        expected = model(x)
    wrong: list[Any] = []
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            try:
                with torch.inference_mode():
                    result = model(x)
            except Exception as error:
                wrong.append(error)
                continue
            if isinstance(result, FakeTensor) or not torch.equal(result, expected):
                wrong.append(result)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for _ in range(3):
            with pytest.raises(NotExportable, match="changes 'last'"):
                exported(model, x, directory=tmp_path)
    finally:
        done.set()
        thread.join()
    assert not wrong
    assert not isinstance(model.last, FakeTensor)
    assert all(not isinstance(tensor, FakeTensor) for tensor in (*model.parameters(), *model.buffers()))
