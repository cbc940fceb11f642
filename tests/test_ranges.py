"""Ranges of sizes as values: which dimensions go together, which calls they hold, and examples of other sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bentoml_compile.errors import ConfigError
from bentoml_compile.prepared import PreparedShape, prepared_shapes
from bentoml_compile.ranges import (
    MAX_CORNERS,
    FreeSize,
    Place,
    check_ranges,
    corners,
    free_sizes,
    holds,
    label,
    resized,
    sizes_to_trace,
)
from bentoml_compile.serving import Serving
from bentoml_compile.shapes import ExampleInput, describe, signature_of

TOKENS = {"ids": {0: (1, 8), 1: (2, 64)}, "mask": {0: (1, 8), 1: (2, 64)}}


def tokens(batch: int, length: int, **other: Any) -> ExampleInput:
    ids = torch.arange(batch * length).reshape(batch, length)
    return ExampleInput((), {"ids": ids, "mask": torch.ones(batch, length), **other})


def spans(sizes: tuple[FreeSize, ...]) -> list[tuple[int, int, list[tuple[str, int]]]]:
    return [(size.low, size.high, [(place.argument, place.dim) for place in size.places]) for size in sizes]


def test_dimensions_of_one_range_that_are_equal_in_every_example_are_one_size() -> None:
    assert spans(free_sizes(TOKENS, [tokens(2, 5)], ())) == [
        (1, 8, [("ids", 0), ("mask", 0)]),
        (2, 64, [("ids", 1), ("mask", 1)]),
    ]
    square = {"x": {0: (1, 8), 1: (1, 8)}}
    one = [ExampleInput((torch.ones(3, 3),), {})]
    assert spans(free_sizes(square, one, ("x",))) == [(1, 8, [("x", 0), ("x", 1)])]
    two = [*one, ExampleInput((torch.ones(3, 4),), {})]
    assert spans(free_sizes(square, two, ("x",))) == [(1, 8, [("x", 0)]), (1, 8, [("x", 1)])]


def test_an_example_outside_of_the_ranges_is_a_shape_of_its_own_and_those_inside_are_one() -> None:
    shapes = prepared_shapes("m", [tokens(2, 5), tokens(8, 64), tokens(9, 5), tokens(2, 5, flag=True)], (), TOKENS)
    assert sorted(shape.label for shape in shapes) == [
        "flag: True, ids: int64[1..8, 2..64], mask: float32[1..8, 2..64]",
        "ids: int64[1..8, 2..64], mask: float32[1..8, 2..64]",
        "ids: int64[9, 5], mask: float32[9, 5]",
    ]


def test_tensors_inside_of_containers_vary_too() -> None:
    example = ExampleInput(({"a": [torch.ones(2, 3)], "b": torch.ones(3)},), {})
    sizes = free_sizes({"batch": {0: (1, 8)}}, [example], ("batch",))
    assert label(example, ("batch",), sizes) == "batch: {a: [float32[1..8, 3]], b: float32[1..8]}"
    other = resized(example, ("batch",), [(sizes[0], 5), (sizes[1], 7)])
    assert other.args[0]["a"][0].shape == (5, 3)
    assert other.args[0]["b"].shape == (7,)


def test_a_label_is_the_same_on_every_gpu_and_a_description_is_not() -> None:
    """Workers with a GPU each share artifacts."""
    with FakeTensorMode():
        example = ExampleInput((), {"ids": torch.zeros(2, 3, device="cuda:1")})
    assert label(example, (), free_sizes({"ids": {0: (1, 8)}}, [example], ())) == "ids: float32[1..8, 3] on cuda"
    assert PreparedShape("model", example, ()).identity == "ids: float32[2, 3] on cuda"
    assert describe(example, ()) == "ids: float32[2, 3] on cuda:1"


@pytest.mark.parametrize(
    ("ids", "mask", "inside"),
    [
        ((1, 2), (1, 2), True),
        ((8, 64), (8, 64), True),
        ((9, 5), (9, 5), False),
        ((0, 5), (0, 5), False),
        ((2, 1), (2, 1), False),
        ((2, 65), (2, 65), False),
        ((2, 5), (3, 5), False),
        ((2, 5), (2, 6), False),
    ],
)
def test_a_range_holds_sizes_between_its_ends_that_are_equal_where_they_must_be(
    ids: tuple[int, int], mask: tuple[int, int], inside: bool
) -> None:
    sizes = free_sizes(TOKENS, [tokens(2, 5)], ())
    assert holds(sizes, {"ids": torch.zeros(ids), "mask": torch.zeros(mask)}) is inside


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_resized_example_keeps_its_values_and_its_memory_order(size: int) -> None:
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    height = FreeSize(1, 8, (Place("x", (), 2),))
    other = resized(ExampleInput((image,), {}), ("x",), [(height, size)]).args[0]
    assert other.shape == (2, 3, size, 5)
    assert other.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(other[:, :, :2], image[:, :, : min(size, 2)])
    assert torch.isin(other, image).all()


def test_an_example_with_gaps_becomes_dense_since_other_sizes_have_no_gaps_to_copy() -> None:
    wide = torch.rand(4, 9)[:, :5]
    rows = FreeSize(1, 8, (Place("x", (), 0),))
    other = resized(ExampleInput((wide,), {}), ("x",), [(rows, 4)]).args[0]
    assert other.is_contiguous()
    assert torch.equal(other, wide)


def test_sizes_to_trace_with_are_at_least_two_and_differ() -> None:
    sizes = free_sizes({"x": {0: (1, 8), 1: (1, 9)}}, [ExampleInput((torch.ones(1, 1),), {})], ("x",))
    assert sorted(sizes_to_trace(ExampleInput((torch.ones(1, 1),), {}), ("x",), sizes)) == [2, 3]
    only_two = [FreeSize(1, 2, (Place("x", (), 0),)), FreeSize(1, 2, (Place("x", (), 1),))]
    assert sizes_to_trace(ExampleInput((torch.ones(1, 1),), {}), ("x",), only_two) == [2, 2]


def test_corners_are_all_combinations_of_the_ends_and_never_too_many() -> None:
    sizes = free_sizes(TOKENS, [tokens(2, 5)], ())
    assert {tuple(corner.kwargs["ids"].shape) for corner in corners(tokens(2, 5), (), sizes)} == {
        (1, 2),
        (1, 64),
        (8, 2),
        (8, 64),
    }
    many = [FreeSize(2, 3, (Place("x", (), dim),)) for dim in range(6)]
    found = {tuple(corner.args[0].shape) for corner in corners(ExampleInput((torch.ones([2] * 6),), {}), ("x",), many)}
    assert len(found) <= MAX_CORNERS
    assert {(2,) * 6, (3,) * 6, (3, 2, 2, 2, 2, 2), (2, 3, 3, 3, 3, 3)} <= found


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ({"idz": {0: (1, 8)}}, r"dynamic\.idz: the examples have \['ids', 'mask'\] only"),
        ({"ids": {2: (1, 8)}}, r"dynamic\.ids\.2: the examples' tensors have 2 dimensions"),
        ({"ids": {0: (3, 8)}}, "no example input lies within these ranges"),
    ],
)
def test_ranges_that_no_example_has_anything_to_do_with_are_refused(ranges: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_ranges(ranges, [tokens(2, 5)], (), where="here")


# finding the shape of a call


def served(shapes: list[PreparedShape], inputs: ExampleInput) -> str | None:
    serving = Serving(lambda: None, shapes, (), TOKENS)
    labels = []
    for _ in range(2):  # the second time it is remembered
        signature = signature_of((), inputs.args, inputs.kwargs)
        exact = serving.exact.get(signature)
        found = serving.look_further(signature, inputs.args, inputs.kwargs)
        labels.append(exact.label if exact else found.shape.label if found else None)
    assert labels[0] == labels[1]
    return labels[0]


def test_exact_shapes_come_first_then_the_narrowest_range() -> None:
    wide = prepared_shapes("m", [tokens(2, 5)], (), TOKENS)[0]
    one = wide.split_one_off(wide.sizes[0])
    exact = PreparedShape("m", tokens(3, 3), ())
    assert wide.label == "ids: int64[2..8, 2..64], mask: float32[2..8, 2..64]"
    assert one.label == "ids: int64[1, 2..64], mask: float32[1, 2..64]"
    whole = prepared_shapes("m", [tokens(2, 5)], (), TOKENS)[0]
    for order in ([whole, one, exact], [exact, one, whole]):
        assert served(order, tokens(3, 3)) == exact.label
        assert served(order, tokens(1, 9)) == one.label
        assert served(order, tokens(4, 9)) == whole.label
        assert served(order, tokens(9, 9)) is None


def test_other_strides_in_a_range_are_put_right_and_remembered() -> None:
    shape = prepared_shapes("m", [tokens(2, 5)], (), TOKENS)[0]
    serving = Serving(lambda: None, [shape], (), TOKENS)
    given = {"ids": torch.arange(12).reshape(4, 3).t(), "mask": torch.ones(3, 4)}
    for _ in range(2):
        found = serving.look_further(signature_of((), (), given), (), given)
        assert found is not None
        assert found.kwargs["ids"].is_contiguous()
        assert torch.equal(found.kwargs["ids"], given["ids"])


def test_what_is_remembered_does_not_grow_without_end() -> None:
    ranges = {"x": {0: (1, 10_000)}}
    shape = prepared_shapes("m", [ExampleInput((torch.ones(2),), {})], ("x",), ranges)[0]
    serving = Serving(lambda: None, [shape], ("x",), ranges)
    for size in range(1, 3000):
        args = (torch.empty(size),)
        assert serving.look_further(signature_of(("x",), args, {}), args, {}) is not None
    assert len(serving._direct) <= 1024
