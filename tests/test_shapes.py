from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from bentoml_compile.errors import ConfigError
from bentoml_compile.shapes import (
    ExampleInput,
    batch_size_of,
    describe,
    fits,
    fitted,
    leaves,
    parameter_names,
    read_example_inputs,
    relaxed,
    signature_of,
)

NAMES = ("ids", "mask")
ONES = torch.ones(2, 3)


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return signature_of(NAMES, (), left) == signature_of(NAMES, (), right)


def test_positional_and_keyword_calls_have_one_signature() -> None:
    by_position = signature_of(NAMES, (ONES, ONES), {})
    assert by_position == signature_of(NAMES, (), {"mask": ONES, "ids": ONES})
    assert by_position == signature_of(NAMES, (ONES,), {"mask": ONES})
    assert by_position is not None


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(3, 2),
        torch.ones(6),
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(3, 2).t(),
        torch.ones(2, 3, device="meta"),
        torch.ones(2, 3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2, 3), requires_grad=False),
        [torch.ones(2, 3)],
        None,
    ],
)
def test_everything_that_compiled_code_depends_on_is_in_the_signature(other: Any) -> None:
    assert same({"ids": ONES}, {"ids": torch.zeros(2, 3)})
    assert not same({"ids": ONES}, {"ids": other})


@pytest.mark.parametrize(
    ("left", "right"), [(1, 2), (1, True), (1, 1.0), ("a", "b"), (None, False), ([1], (1,)), (0.0, -0.0)]
)
def test_constants_differ_by_type_and_value(left: Any, right: Any) -> None:
    assert not same({"flag": left}, {"flag": right})
    assert same({"flag": left}, {"flag": left})


def test_a_relaxed_signature_leaves_out_what_a_copy_can_put_right() -> None:
    wanted = signature_of(NAMES, (), {"ids": [ONES]})
    assert wanted is not None
    for value in (torch.ones(3, 2).t(), torch.ones(2, 3, requires_grad=True), torch.nn.Parameter(torch.ones(2, 3))):
        given = signature_of(NAMES, (), {"ids": [value]})
        assert given is not None
        assert given != wanted
        assert relaxed(given) == relaxed(wanted)
    other = signature_of(NAMES, (), {"ids": [torch.ones(2, 3, dtype=torch.float64)]})
    assert other is not None
    assert relaxed(other) != relaxed(wanted)


def test_a_fitted_call_has_the_examples_strides_and_the_calls_values() -> None:
    example = ExampleInput((), {"ids": ONES, "mask": {"m": [torch.ones(3, 2).t()]}})
    given = torch.arange(6.0).reshape(3, 2).t().requires_grad_()
    args, kwargs = fitted(example, NAMES, (given,), {"mask": {"m": [torch.arange(6.0).reshape(2, 3)]}})
    assert torch.equal(args[0], given)
    assert args[0].stride() == (3, 1)
    assert not args[0].requires_grad
    assert kwargs["mask"]["m"][0].stride() == (1, 2)
    assert torch.equal(kwargs["mask"]["m"][0], torch.arange(6.0).reshape(2, 3))
    again, _ = fitted(example, NAMES, (ONES,), {})
    assert again[0].data_ptr() == ONES.data_ptr()


class Pair(NamedTuple):
    a: Any


CONTAINERS: list[Callable[[Any], Any]] = [
    lambda item: {"a": item},
    lambda item: {1: item},
    lambda item: {"1": item},
    lambda item: [item],
    lambda item: (item,),
    Pair,
    lambda item: collections.OrderedDict(a=item),
    lambda item: collections.defaultdict(list, a=item),
    lambda item: collections.UserDict(a=item),
    lambda item: BatchEncoding({"a": item}),
    lambda item: BaseModelOutput(last_hidden_state=item),
]


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_walk_looks_into_the_same_containers_and_keeps_their_class(container: Callable[[Any], Any]) -> None:
    example = ExampleInput((), {"ids": container(ONES), "mask": [container(ONES)]})
    given = {"ids": container(torch.arange(6.0).reshape(3, 2).t()), "mask": [container(ONES)]}
    assert len(list(leaves(given))) == 2
    wanted, strided = signature_of(NAMES, (), example.kwargs), signature_of(NAMES, (), given)
    assert wanted is not None
    assert strided is not None
    assert wanted != strided
    assert relaxed(wanted) == relaxed(strided)
    assert not fits(example, NAMES, (), given, plainly=False)
    _, fit = fitted(example, NAMES, (), given)
    assert signature_of(NAMES, (), fit) == wanted
    (_, tensor), _ = leaves(fit)
    assert torch.equal(tensor, torch.arange(6.0).reshape(3, 2).t())
    for other in (example.clone(), example.without_values()):
        assert signature_of(NAMES, (), other.kwargs) == wanted
        for _, tensor in leaves(other.kwargs):
            tensor.fill_(7.0)
    assert ONES.sum() == 6
    assert type(fit["ids"]) is type(given["ids"])
    if isinstance(fit["ids"], BaseModelOutput):
        assert fit["ids"].last_hidden_state is fit["ids"]["last_hidden_state"]


def test_a_container_with_attributes_beside_its_items_has_no_signature() -> None:
    """Code made ahead of time would take them for constants."""

    class Batch(dict[str, Any]):
        scale = 1.0

    batch = Batch(ids=ONES)
    assert signature_of(NAMES, (batch,), {}) is not None
    batch.scale = 2.0
    assert signature_of(NAMES, (batch,), {}) is None


def test_an_argument_that_is_given_twice_has_no_signature() -> None:
    assert signature_of(NAMES, (ONES,), {"ids": ONES}) is None


def test_an_absent_argument_is_not_none() -> None:
    assert not same({"ids": ONES}, {"ids": ONES, "mask": None})


def test_a_container_that_holds_itself_has_no_signature() -> None:
    endless: dict[str, Any] = {"ids": ONES}
    endless["self"] = endless
    assert signature_of(NAMES, (), {"ids": endless}) is None


class Failing(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)


def endless() -> list[Any]:
    items: list[Any] = [ONES]
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (lambda: 0, "function"),
        (types.MappingProxyType({"a": ONES}), "mappingproxy"),
        (Failing(a=ONES), "KeyError"),
        (endless(), "holds itself"),
        (torch.ones(2, 2).to_sparse(), "sparse"),
        (torch._neg_view(ONES), "lazily"),
        (torch.nested.nested_tensor([ONES, ONES]), "nested"),
        (torch.nested.nested_tensor([ONES, ONES], layout=torch.jagged), "nested"),
        (torch.quantize_per_tensor(ONES, 0.1, 0, torch.quint8), "quint8"),
        (torch.ones(4, dtype=torch.uint8).view(torch.bits8), "bits8"),
    ],
)
def test_what_cannot_be_compared_or_copied_has_no_signature_and_is_named_as_an_example(value: Any, words: str) -> None:
    assert signature_of(NAMES, (), {"ids": value}) is None
    assert "ids: " in describe(ExampleInput((), {"ids": value}), NAMES)
    assert batch_size_of((), {"ids": value}) in (1, 2, 4)
    with pytest.raises(ConfigError, match=rf"'encoder'.*example_inputs\[0\].*'ids'.*{words}.*NamedTuple"):
        read_example_inputs([{"ids": value, "mask": ONES}], model="encoder")


class Uncopied(dict[str, Any]):
    def __copy__(self) -> Any:
        raise TypeError("only one of these")


class Another(dict[str, Any]):
    def __copy__(self) -> Any:
        return dict(self)


@pytest.mark.parametrize(("kind", "words"), [(Uncopied, "only one of these"), (Another, "when it is copied")])
def test_an_example_of_which_no_like_one_can_be_made_is_refused(kind: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"'encoder'.*example_inputs\[0\].*{words}"):
        read_example_inputs([(kind(x=ONES),)], model="encoder")


def test_examples_are_copied_and_keep_what_code_depends_on() -> None:
    given = (BatchEncoding({"x": ONES}), ONES.clone().requires_grad_())
    [example] = read_example_inputs([given], model="encoder")
    example.args[0]["x"].zero_()
    assert ONES.sum() == 6
    for other in (example, example.without_values()):
        assert signature_of(NAMES, other.args, {}) == signature_of(NAMES, given, {})


def test_descriptions_are_sorted_and_name_dtype_and_sizes() -> None:
    example = ExampleInput((torch.ones(2, 3, dtype=torch.int64),), {"flag": True, "mask": torch.ones(3, 2).t()})
    assert describe(example, NAMES) == "flag: True, ids: int64[2, 3], mask: float32[2, 3] strides [1, 2]"


def test_containers_of_other_classes_are_described_apart() -> None:
    """Shapes and artifacts are told apart by what is written here."""
    described = [describe(ExampleInput((container(ONES),), {}), NAMES) for container in CONTAINERS]
    assert len(set(described)) == len(CONTAINERS)
    ones = "float32[2, 3]"
    assert described[0] == f"ids: {{a: {ones}}}"
    assert described[3:6] == [f"ids: [{ones}]", f"ids: ({ones})", f"ids: Pair({ones})"]
    assert f"ids: BatchEncoding{{a: {ones}}}" in described


def test_parameter_names_are_those_that_may_be_positional() -> None:
    def forward(ids: Any, /, mask: Any = None, *rest: Any, flag: bool = False, **more: Any) -> None: ...

    assert parameter_names(forward) == ("ids", "mask")


def test_leaves_of_nested_containers_come_with_their_paths() -> None:
    assert list(leaves({"a": [1, (2,)], "b": 3})) == [(("a", 0), 1), (("a", 1, 0), 2), (("b",), 3)]


def test_a_cloned_example_shares_nothing() -> None:
    example = ExampleInput((ONES,), {"nested": {"x": [ONES]}})
    copy = example.clone()
    copy.args[0].zero_()
    copy.kwargs["nested"]["x"][0].zero_()
    assert ONES.sum() == 6


def test_an_example_that_a_model_has_changed_in_any_way_is_another() -> None:
    example = ExampleInput(({"x": ONES, "y": 1},), {})
    assert example.equals(example.clone())
    for change in ({"x": ONES * 2}, {"x": torch.ones(3, 2)}, {"x": [ONES]}, {"y": 2}, {"z": ONES}):
        other = example.clone()
        other.args[0].update(change)
        assert not other.equals(example)
    other.args[0].clear()
    assert not other.equals(example)


def test_the_batch_size_is_the_first_tensors_first_dimension() -> None:
    assert batch_size_of((), {"flag": 3, "ids": torch.ones(5, 2)}) == 5
    assert batch_size_of((torch.tensor(1.0),), {}) == 1


@pytest.mark.parametrize("wrong", [None, [], {}, "text", [1], [{"ids": 1}], [[ONES]], [()]])
def test_wrong_example_inputs_are_refused_by_name(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"'encoder'.*example_inputs"):
        read_example_inputs(wrong, model="encoder")
