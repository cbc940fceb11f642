"""`pad`: a call of sizes that were not prepared runs at the next prepared ones, and gives eager's result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bentoml_compile.errors import ConfigError
from bentoml_compile.padding import Cuts, Pad, Padded, Padding, check_pad
from bentoml_compile.prepared import prepared_shapes
from bentoml_compile.shapes import ExampleInput, signature_of
from tests.models import ids

TOKENS: Pad = {"ids": {0: "repeat", 1: 0}, "mask": {0: "repeat", 1: 0}}
ROWS: Pad = {"x": {0: "repeat"}}
DIMS: Pad = {"x": {0: "repeat", 1: 0}}
NOTHING_CUT = Cuts(1, ())


def tokens(batch: int, length: int, **other: Any) -> ExampleInput:
    return ExampleInput((), {"ids": ids(batch, length), "mask": torch.ones(batch, length), **other})


def floats(*sizes: int) -> ExampleInput:
    torch.manual_seed(sum(sizes))
    return ExampleInput((), {"x": torch.randn(sizes)})


def padding_of(pad: Pad, *examples: ExampleInput, names: tuple[str, ...] = (), ranges: Any = None) -> Padding:
    """Every shape may be padded up to; outputs are not cut."""
    shapes = prepared_shapes("m", examples, names, ranges or {})
    padding = Padding(pad, shapes, names)
    for shape in shapes:
        padding.allow(shape, NOTHING_CUT)
    return padding


def find(padding: Padding, *args: Any, names: tuple[str, ...] = (), **kwargs: Any) -> Padded | None:
    return padding.find(signature_of(names, args, kwargs), args, kwargs)


def found(padding: Padding, *args: Any, names: tuple[str, ...] = (), **kwargs: Any) -> Padded:
    padded = find(padding, *args, names=names, **kwargs)
    assert padded is not None
    return padded


# what is filled in


def test_a_batch_grows_by_its_last_row_and_a_sequence_by_its_fill_value() -> None:
    padding = padding_of({"ids": {0: "repeat", 1: 7}, "mask": {0: "repeat", 1: 0}}, tokens(4, 5))
    given: dict[str, Any] = {"ids": torch.tensor([[1, 2], [3, 4]]), "mask": torch.ones(2, 2)}
    padded = found(padding, **given)
    _, filled = padded.fill((), given)
    assert filled["ids"].tolist() == [[1, 2, 7, 7, 7], [3, 4, 7, 7, 7], [3, 4, 7, 7, 7], [3, 4, 7, 7, 7]]
    assert filled["mask"].tolist() == [[1, 1, 0, 0, 0]] * 4
    assert given["ids"].tolist() == [[1, 2], [3, 4]]
    assert (padded.added, padded.waste) == (32, 0.8)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64])
def test_every_kind_of_number_is_filled_exactly(dtype: torch.dtype) -> None:
    value = 2**60 + 1 if dtype is torch.int64 else 1
    padding = padding_of({"x": {0: "repeat", 1: value}}, ExampleInput((), {"x": torch.zeros(2, 2, dtype=dtype)}))
    x = torch.zeros(1, 1, dtype=dtype)
    _, filled = found(padding, x=x).fill((), {"x": x})
    assert filled["x"].dtype is dtype
    assert filled["x"].tolist() == [[0, value]] * 2


def test_an_image_keeps_its_order_in_memory() -> None:
    example = ExampleInput((), {"x": torch.rand(4, 3, 8, 8).to(memory_format=torch.channels_last)})
    padding = padding_of({"x": {0: "repeat", 2: 0.5, 3: 0.5}}, example)
    for given in (torch.rand(3, 3, 6, 6), torch.rand(3, 3, 6, 6).to(memory_format=torch.channels_last)):
        _, filled = found(padding, x=given).fill((), {"x": given})
        assert filled["x"].stride() == example.kwargs["x"].stride()
        assert torch.equal(filled["x"][:3, :, :6, :6], given)
        assert (filled["x"][:, :, 6:] == 0.5).all()
        assert torch.equal(filled["x"][3], filled["x"][2])


def test_tensors_by_position_and_inside_of_containers_grow_too() -> None:
    example = ExampleInput(({"a": [torch.ones(3, 4)], "b": torch.ones(3)}, 2), {})
    padding = padding_of({"batch": {0: "repeat", 1: 9}}, example, names=("batch", "times"))
    given = {"a": [torch.zeros(1, 2)], "b": torch.zeros(1)}
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    calls = [((given, 2), {}), ((given,), {"times": 2}), ((), {"batch": given, "times": 2})]
    for args, kwargs in calls:
        args, kwargs = found(padding, *args, names=("batch", "times"), **kwargs).fill(args, kwargs)
        batch = args[0] if args else kwargs["batch"]
        assert batch["a"][0].tolist() == [[0, 0, 9, 9]] * 3
        assert batch["b"].tolist() == [0, 0, 0]


def test_what_is_filled_is_as_ordinary_as_the_example() -> None:
    padding = padding_of(ROWS, ExampleInput((), {"x": torch.zeros(4, 2), "scale": torch.zeros(2)}))
    with_grad: dict[str, Any] = {"x": nn.Parameter(torch.ones(3, 2)), "scale": torch.ones(2, requires_grad=True)}
    with torch.inference_mode():
        inference: dict[str, Any] = {"x": torch.ones(3, 2), "scale": torch.ones(2)}
        _, filled = found(padding, **inference).fill((), inference)
        padded = found(padding, **with_grad)
    for tensors in (filled, padded.fill((), with_grad)[1]):
        assert not any(tensor.requires_grad or tensor.is_inference() for tensor in tensors.values())


# which shape is found


def test_the_shape_with_the_fewest_added_elements_is_found() -> None:
    padding = padding_of(TOKENS, *(tokens(batch, length) for batch in (1, 4, 16) for length in (8, 32)))
    for (batch, length), label in {(1, 5): (1, 8), (2, 8): (4, 8), (3, 9): (4, 32), (5, 1): (16, 8)}.items():
        assert found(padding, **tokens(batch, length).kwargs).shape.example.kwargs["ids"].shape == label


def test_only_what_is_padded_may_differ() -> None:
    padding = padding_of({"ids": {1: 0}, "mask": {1: 0}}, tokens(2, 8))
    given = tokens(2, 5).kwargs
    assert find(padding, **given) is not None
    assert find(padding, **tokens(2, 9).kwargs) is None  # too long
    assert find(padding, **tokens(1, 5).kwargs) is None  # the batch is not padded
    assert find(padding, **given, flag=True) is None
    assert find(padding, ids=given["ids"].int(), mask=given["mask"]) is None
    assert find(padding, ids=given["ids"], mask=torch.ones(2, 6)) is None  # eager's to judge
    assert find(padding, ids=given["ids"].to("meta"), mask=given["mask"]) is None
    assert find(padding, ids=given["ids"][:, :0], mask=given["mask"][:, :0]) is None
    assert padding.find(None, (), {}) is None


def test_sizes_that_are_equal_in_every_prepared_shape_grow_together_unless_their_rules_differ() -> None:
    x, other = torch.zeros(3, 2), torch.zeros(2, 2)
    assert find(padding_of({"x": {0: 0, 1: 0}}, floats(4, 4)), x=x) is None
    assert find(padding_of({"x": {0: 0, 1: 0}}, floats(4, 4)), x=other) is not None
    assert find(padding_of({"x": {0: 0, 1: 0}}, floats(4, 4), floats(4, 5)), x=x) is not None
    assert find(padding_of(DIMS, floats(4, 4)), x=x) is not None


def test_a_range_is_padded_up_to_its_smallest_size() -> None:
    ranges = {name: {1: (8, 64)} for name in ("ids", "mask")}
    padding = padding_of(TOKENS, tokens(4, 16), ranges=ranges)
    for (batch, length), sizes in {(4, 5): (4, 8), (3, 5): (4, 8), (3, 33): (4, 33), (1, 64): (4, 64)}.items():
        given = tokens(batch, length).kwargs
        _, filled = found(padding, **given).fill((), given)
        assert filled["ids"].shape == filled["mask"].shape == sizes
    assert find(padding, **tokens(3, 65).kwargs) is None
    only_ids = padding_of({"ids": {1: 0}}, tokens(4, 16), ranges=ranges)
    assert find(only_ids, **tokens(4, 5).kwargs) is None  # the mask must be as long
    assert find(only_ids, ids=ids(4, 5), mask=torch.ones(4, 9)) is None


def test_what_was_found_is_remembered_for_so_many_signatures() -> None:
    padding = padding_of({"x": {0: 0}}, floats(5000))
    x = torch.zeros(10)
    assert find(padding, x=x) is find(padding, x=torch.ones(10))
    for size in range(1, 3000):
        assert find(padding, x=torch.empty(size)) is not None
    assert len(padding._found) <= 1024


def test_a_shape_is_used_only_while_it_is_allowed() -> None:
    shapes = prepared_shapes("m", [floats(4, 2)], (), {})
    padding, x = Padding(ROWS, shapes, ()), torch.zeros(3, 2)
    assert find(padding, x=x) is None
    padding.allow(shapes[0], NOTHING_CUT)
    assert find(padding, x=x) is not None
    padding.refuse(shapes[0], "rows mix")
    assert find(padding, x=x) is None
    assert padding.refused == {shapes[0]: "rows mix"}


# the config


@pytest.mark.parametrize(
    ("pad", "words"),
    [
        ({"tokens": {0: "repeat"}}, r"torch_compile\.pad\.tokens: the examples have \['flag', 'ids', 'mask'\] only"),
        ({"ids": {2: 0}}, r"torch_compile\.pad\.ids\.2: the examples' tensors have 2 dimensions"),
        ({"flag": {0: 0}}, r"torch_compile\.pad\.flag\.0: the examples' tensors have 0 dimensions"),
        ({"ids": {1: "zeros"}}, r"torch_compile\.pad\.ids\.1: 'zeros' is not allowed; allowed: \"repeat\", a number"),
        ({"ids": {1: 0.5}}, r"torch_compile\.pad\.ids\.1: 0\.5 is not a value of torch\.int64"),
        ({"ids": {1: float("inf")}}, r"torch_compile\.pad\.ids\.1: inf is not a value of torch\.int64"),
        ({"ids": {1: 2**63}}, r"torch_compile\.pad\.ids\.1: 9223372036854775808 is not"),
        ({"mask": {1: 2**24 + 1}}, r"torch_compile\.pad\.mask\.1: 16777217 is not a value of torch\.float32"),
        ({"mask": {1: 1e39}}, r"torch_compile\.pad\.mask\.1: 1e\+39 is not"),
        ({"mask": {1: 1e-60}}, r"torch_compile\.pad\.mask\.1: 1e-60 is not"),
    ],
)
def test_a_pad_that_cannot_be_is_refused_by_its_path(pad: Pad, words: str) -> None:
    with pytest.raises(ConfigError, match="^here: " + words):
        check_pad(pad, [tokens(2, 5, flag=True)], (), where="here")


def test_a_fraction_may_be_rounded_and_infinity_is_a_float() -> None:
    check_pad({"ids": {0: "repeat", 1: 3}, "mask": {1: 0.1}}, [tokens(2, 5)], (), where="here")
    check_pad({"mask": {1: float("-inf")}}, [tokens(2, 5)], (), where="here")
    check_pad({"x": {0: True}}, [ExampleInput((torch.ones(2, dtype=torch.bool),), {})], ("x",), where="here")
