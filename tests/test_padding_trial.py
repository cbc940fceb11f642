"""Padding is switched on where it gives eager's results, and refused, with the reason, where it would not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPooling

from bentoml_compile.config import CompileConfig, VerifyConfig
from bentoml_compile.engines import dynamo
from bentoml_compile.engines.bounds import Bound
from bentoml_compile.engines.eager import unchanged
from bentoml_compile.listener import Listeners, Timeline
from bentoml_compile.padding import Pad, Padding
from bentoml_compile.padding_trial import verify_padding
from bentoml_compile.prepared import PreparedShape, Target
from bentoml_compile.serving import Serving
from bentoml_compile.shapes import ExampleInput, parameter_names, signature_of
from bentoml_compile.startup import Startup
from tests.architectures import make
from tests.models import WORDS, Classifier, classifier, ids
from tests.test_padding import DIMS, ROWS, find, floats, found, tokens

TOKENS_BATCH: Pad = {name: {0: "repeat"} for name in ("ids", "mask")}


# verification: models as functions


class Model(nn.Module):
    """A model that is a function of its arguments, given by name."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.ModuleList(arguments)

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.function(*self.inner, **inputs)


@dataclass
class Trial:
    """Padding of a model as eager serves it; `call` pads, runs and cuts."""

    model: nn.Module
    target: Target
    padding: Padding
    reason: str

    def call(self, **inputs: Any) -> Any:
        padded = found(self.padding, **inputs, names=self.target.names)
        args, kwargs = padded.fill((), inputs)
        with torch.inference_mode():
            return padded.cut(self.model(*args, **kwargs))


def verified(
    model: nn.Module | Callable[..., Any], pad: Pad, *examples: ExampleInput, dynamic: Any = None, **of_shape: Any
) -> Trial:
    model = model if isinstance(model, nn.Module) else Model(model)
    names = parameter_names(model.forward)
    target = Target(model, "forward", "m", CompileConfig(dynamic=dynamic), names, examples)
    padding = Padding(pad, target.shapes, names)
    reasons = []
    with unchanged(model):
        for shape in target.shapes:
            for name, value in of_shape.items():
                setattr(shape, name, value)
            failure = verify_padding(target, shape, padding, VerifyConfig())
            assert failure is None or failure.reason == "padding"
            reasons.append(failure.message if failure is not None else "")
    return Trial(model, target, padding, " ".join(reasons).strip())


def equal(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    torch.testing.assert_close(actual, expected)


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: {"nested": [(x.sin(), None)], "all": x.shape[2], "flag": True},
        lambda x: BaseModelOutputWithPooling(last_hidden_state=x * 2, pooler_output=x[:, 0]),
        lambda x: torch.cat([x[:, :1] * 0, x], 1),  # a token of its own in front
        lambda x: x.repeat_interleave(2, 1),
        lambda x: x.transpose(0, 1) + 1,
        lambda x: torch.tril(torch.ones(x.shape[1], x.shape[1])).matmul(x),  # causal
        lambda x: x.new_ones(3),  # follows nothing
    ],
)
def test_outputs_are_cut_along_the_dimensions_that_follow(function: Callable[..., Any]) -> None:
    trial = verified(function, DIMS, floats(4, 4, 3))  # equal sizes are told apart
    assert trial.reason == ""
    for batch in range(1, 5):
        for length in range(1, 5):
            if (batch, length) != (4, 4):
                given = floats(batch, length, 3).kwargs
                equal(trial.call(**given), function(**given))


def test_a_batch_is_cut_to_a_view_and_an_inner_dimension_to_a_dense_copy() -> None:
    kept: list[torch.Tensor] = []

    def keeping(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return kept[-1]

    trial = verified(keeping, DIMS, floats(4, 6, 2))
    for sizes, is_view in {(3, 6, 2): True, (4, 5, 2): False, (3, 5, 2): False}.items():
        result = trial.call(**floats(*sizes).kwargs)
        assert result.is_contiguous()
        assert (result.data_ptr() == kept[-1].data_ptr()) is is_view


def test_a_masked_mean_is_padded_though_its_rounding_depends_on_the_length() -> None:
    pad: Pad = {"x": {0: "repeat", 1: 5}, "mask": {0: "repeat", 1: 0}}
    example = ExampleInput((), {"x": torch.rand(4, 16, 3), "mask": torch.ones(4, 16)})
    trial = verified(masked_mean, pad, example)
    assert trial.reason == ""
    given = {"x": torch.rand(3, 9, 3), "mask": torch.ones(3, 9)}
    equal(trial.call(**given), masked_mean(**given))


class Norm(nn.Module):
    """Normalizes over the batch, in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


@dataclass
class Plain:
    values: torch.Tensor


MIXES = r"padding changes the model's result at \(x: float32\["


@pytest.mark.parametrize(
    ("model", "pad", "words"),
    [
        (lambda x: x.softmax(0), ROWS, MIXES),
        (lambda x: x - x.mean(0), ROWS, MIXES),
        (lambda x: x.sum(0), ROWS, MIXES),
        (lambda x: x.mean(1), {"x": {1: 0}}, MIXES),
        (lambda x: x.amax(1), {"x": {1: 0}}, MIXES),
        (lambda x: x.flip(1), {"x": {1: 0}}, MIXES),
        (lambda x: torch.cat([x, x], 1), {"x": {1: 0}}, MIXES),
        (lambda x: torch.cat([x, x[:, :1]], 1), {"x": {1: 0}}, MIXES),  # the dimension follows, its values do not
        (lambda x: x.flatten(), DIMS, MIXES),
        (lambda x: x + (x.shape[0] < 5 and x.shape[1] < 6), DIMS, MIXES),
        (lambda x: (x, float(x.sum())), ROWS, MIXES),
        (
            lambda x: x[:, ::2],
            {"x": {1: 0}},
            r"sizes \[3, 3, 2, 1\] where x's dimension 1 is \[6, 5, 3, 1\]",
        ),
        (lambda x: x.new_ones(9 - x.shape[0]), ROWS, "no multiple of it with an offset"),
        (lambda x: list(x), ROWS, "its output has another structure where x's dimension 0 is 4 instead of 5"),
        (lambda x: x.squeeze(0), ROWS, "its output 0 is a tensor of 1 dimensions where x's dimension 0 is 1"),
        (lambda x: x.to_sparse(), ROWS, "its output holds a torch.sparse_coo tensor"),
        (lambda x: Plain(x), ROWS, "its output holds a Plain, which cannot be cut back"),
        (lambda x: (x, DynamicCache()), ROWS, "its output holds a DynamicCache"),
        (lambda x: x.reshape(-1, 2, 3), {"x": {1: 0}}, r"eager fails at \(x: float32\[5, 5\]\): RuntimeError: shape"),
        (Noise(), ROWS, "eager gives another result each time"),
    ],
)
def test_padding_is_refused_where_it_would_change_results(model: Any, pad: Pad, words: str) -> None:
    trial = verified(model, pad, floats(5, 6))
    assert re.search(words, trial.reason), trial.reason
    assert find(trial.padding, **floats(4, 6).kwargs, names=trial.target.names) is None
    assert list(trial.padding.refused) == trial.target.shapes


def test_batch_norm_in_training_mode_is_refused_and_in_eval_mode_is_not() -> None:
    assert re.search(MIXES, verified(Norm(), ROWS, floats(5, 3, 2)).reason)
    assert verified(Norm().eval(), ROWS, floats(5, 3, 2)).reason == ""


def test_an_example_whose_rows_are_all_alike_does_not_hide_that_rows_mix() -> None:
    alike = ExampleInput((), {"x": torch.ones(5, 6)})
    assert re.search(MIXES, verified(lambda x: x - x.mean(0), ROWS, alike).reason)


def test_a_fill_value_outside_of_a_table_is_refused_before_compiled_code_reads_it() -> None:
    def not_to_be_run(**inputs: torch.Tensor) -> Any:
        raise AssertionError

    bounds = (Bound("ids", 0, (), 0, WORDS - 1),)
    pad: Pad = {"ids": {1: WORDS}, "mask": {1: 0}}
    trial = verified(Classifier(), pad, tokens(2, 5), bounds=bounds, run=not_to_be_run)
    assert "a fill value is out of the range of a table that it indexes at (ids: int64[2, 4]" in trial.reason


def test_a_mask_that_the_pad_forgets_is_refused() -> None:
    ranges = {name: {"1": [4, 8]} for name in ("ids", "mask")}
    trial = verified(classifier(), {"ids": {1: 0}}, tokens(2, 5), dynamic=ranges)
    assert "eager fails at (ids: int64[2, 3], mask: float32[2, 4])" in trial.reason
    trial = verified(classifier(), {"ids": {1: 0}}, tokens(2, 5))
    assert "eager fails at (ids: int64[2, 4], mask: float32[2, 5])" in trial.reason


def test_what_cannot_be_filled_in_is_refused_and_raises_nothing() -> None:
    trial = verified(lambda x: x, {"x": {1: 2**70}}, ExampleInput((), {"x": torch.ones(2, 5, dtype=torch.int64)}))
    assert "OverflowError: int too big to convert" in trial.reason
    assert list(trial.padding.refused) == trial.target.shapes


def test_a_model_that_writes_into_its_inputs_is_refused() -> None:
    trial = verified(lambda x: x.mul_(2), ROWS, floats(5, 6), writes_inputs=True)
    assert "writes into its inputs" in trial.reason


def test_compiled_code_that_is_wrong_for_padded_inputs_is_told_from_a_model_whose_rows_mix() -> None:
    trial = verified(lambda x: x * 2, ROWS, floats(5, 6), run=lambda x: x * 2 + (x[-1] == x[-2]))
    assert "compiled code differs at (x: float32[4, 6])" in trial.reason


def test_rounding_that_depends_on_the_size_is_allowed_as_long_as_compiled_code_rounds_like_eager() -> None:
    def rounding(x: torch.Tensor) -> torch.Tensor:
        return x + 1e4 * torch.finfo(x.dtype).eps * x.shape[0]

    assert verified(rounding, ROWS, floats(5, 6), run=rounding).reason == ""
    wrong = verified(rounding, ROWS, floats(5, 6), run=lambda x: rounding(x) + 1)
    assert "compiled code differs at (x: float32[4, 6])" in wrong.reason


def test_rows_that_mix_at_one_end_of_a_range_only_are_found() -> None:
    ranges = {"x": {"0": [4, 8], "1": [2, 9]}}
    trial = verified(lambda x: x + (x.shape[0] < 4 and x.shape[1] == 9), ROWS, floats(4, 6), dynamic=ranges)
    assert "padding changes the model's result at (x: float32[3, 9])" in trial.reason


def test_a_shape_that_nothing_is_smaller_than_needs_no_run() -> None:
    def not_to_be_run(x: torch.Tensor) -> Any:
        raise AssertionError

    trial = verified(not_to_be_run, ROWS, floats(1, 6))
    assert (trial.reason, trial.padding.refused) == ("", {})


def test_bert_is_padded_with_its_mask_and_refused_without() -> None:
    model, whole = make("bert")
    example = {name: value.repeat(4, 1) for name, value in whole.items()}
    pad: Pad = {name: {0: "repeat", 1: 0} for name in example}
    trial = verified(model, pad, ExampleInput((), example))
    assert trial.reason == ""
    given = {name: value[:3, :5] for name, value in example.items()}
    with torch.inference_mode():
        equal(trial.call(**given), model(**given))
    only_ids = ExampleInput((), {"input_ids": example["input_ids"]})
    assert re.search(r"padding changes the model's result", verified(model, {"input_ids": {1: 0}}, only_ids).reason)


# what is kept


def test_what_was_found_out_is_kept_for_the_next_boot_unless_pad_changes() -> None:
    first = verified(lambda x: torch.cat([x.softmax(1), x], 1), {"x": {0: "repeat"}}, floats(4, 3), floats(8, 3))
    mixing = verified(lambda x: x.softmax(0), ROWS, floats(4, 3))
    for trial in (first, mixing):
        padding, shapes = Padding(ROWS, trial.target.shapes, ()), trial.target.shapes
        for shape in shapes:
            decision = json.loads(json.dumps(trial.padding.decision(shape)))
            assert padding.decide_as(shape, decision)
            assert not Padding(DIMS, shapes, ()).decide_as(shape, decision)
        assert padding._allowed == trial.padding._allowed
        assert padding.refused == trial.padding.refused


# compiled code


def compiled(model: nn.Module, *examples: ExampleInput, **config: Any) -> Target:
    keys = {"engine": "jit", "backend": "eager", "keep_eager_if_slower": False, **config}
    names = parameter_names(model.forward)
    target = Target(model, "forward", "m", CompileConfig.model_validate(keys), names, examples)
    Startup(target, Timeline(Listeners(()))).run()
    assert len(target.compiled_shapes()) == len(target.shapes)
    return target


def padded_up_to(target: Target, pad: Pad) -> Padding:
    padding = Padding(pad, target.shapes, target.names)
    with unchanged(target.model):
        assert [verify_padding(target, shape, padding, VerifyConfig()) for shape in target.shapes] == [
            None for _ in target.shapes
        ]
    return padding


def answer(target: Target, padding: Padding, kwargs: dict[str, Any]) -> tuple[PreparedShape, Any]:
    """As a compiled model answers: a prepared shape, or one that the call is padded up to."""
    serving = Serving(target.eager, target.shapes, target.names, target.config.ranges)
    signature = signature_of(target.names, (), kwargs)
    if (shape := serving.exact.get(signature)) is not None:
        assert shape.run is not None
        return shape, shape.run(**kwargs)
    assert serving.look_further(signature, (), kwargs) is None
    padded = found(padding, **kwargs, names=target.names)
    args, filled = padded.fill((), kwargs)
    assert padded.shape.run is not None
    return padded.shape, padded.cut(padded.shape.run(*args, **filled))


def test_adaptive_batches_of_1_to_16_rows_run_on_three_prepared_sizes_without_a_compile() -> None:
    model = classifier()
    target = compiled(model, *(tokens(batch, 5) for batch in (1, 4, 16)))
    padding = padded_up_to(target, TOKENS_BATCH)
    dynamo.start_watching()
    dynamo.watch.take()
    for batch in range(1, 17):
        given = {"ids": ids(batch, 5), "mask": torch.rand(batch, 5)}
        shape, output = answer(target, padding, given)
        equal(output, model(**given))
        assert shape.example.kwargs["ids"].shape[0] == next(size for size in (1, 4, 16) if size >= batch)
    assert dynamo.watch.take() == []


def test_a_range_compiled_from_four_rows_serves_fewer_rows_too() -> None:
    model = classifier()
    ranges = {name: {"0": [4, 8], "1": [2, 16]} for name in ("ids", "mask")}
    target = compiled(model, tokens(4, 5), dynamic=ranges)
    padding = padded_up_to(target, TOKENS_BATCH)
    for batch in (1, 2, 3):
        for length in (2, 9, 16):
            given = {"ids": ids(batch, length), "mask": torch.rand(batch, length)}
            equal(answer(target, padding, given)[1], model(**given))
