from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bentoml_compile.engines.bounds import Bound, find_indexing, in_bounds
from bentoml_compile.shapes import ExampleInput

TABLE = nn.Embedding(7, 3)
IDS = torch.zeros(2, 4, dtype=torch.long)


def bounds_of(run: Any, *args: Any, **kwargs: Any) -> tuple[Bound, ...]:
    return find_indexing(run, ExampleInput(args, kwargs), ("ids", "batch")).bounds


def test_an_input_that_indexes_an_embedding_is_bounded_by_its_rows() -> None:
    assert bounds_of(TABLE, IDS) == (Bound("ids", 0, (), 0, 6),)
    assert bounds_of(lambda ids: TABLE(ids), ids=IDS) == (Bound("ids", 0, (), 0, 6),)


@pytest.mark.parametrize(
    "view",
    [
        lambda ids: ids.view(-1),
        lambda ids: ids[:, 1:],
        lambda ids: ids.t().contiguous(),
        lambda ids: ids.to(torch.int32),
        lambda ids: ids.clone().reshape(8),
    ],
)
def test_views_casts_and_copies_of_an_input_still_index_directly(view: Any) -> None:
    assert bounds_of(lambda ids: TABLE(view(ids)), IDS) == (Bound("ids", 0, (), 0, 6),)


def test_the_narrowest_of_two_tables_counts() -> None:
    other = nn.Embedding(5, 3)
    assert bounds_of(lambda ids: TABLE(ids) + other(ids), IDS) == (Bound("ids", 0, (), 0, 4),)


@pytest.mark.parametrize(
    ("run", "low", "high"),
    [
        (lambda ids: torch.index_select(torch.ones(5, 2), 0, ids.flatten()), 0, 4),
        (lambda ids: torch.gather(torch.ones(2, 9), 1, ids), 0, 8),
        (lambda ids: torch.ones(6)[ids], -6, 5),
        (lambda ids: torch.take(torch.ones(2, 3), ids), -6, 5),
        (lambda ids: torch.zeros(2, 9).scatter(1, ids, 1.0), 0, 8),
        (lambda ids: F.embedding_bag(ids, torch.ones(4, 2)), 0, 3),
    ],
)
def test_every_operator_that_reads_by_index_bounds_it(run: Any, low: int, high: int) -> None:
    assert bounds_of(run, IDS) == (Bound("ids", 0, (), low, high),)


def test_indices_inside_containers_are_found() -> None:
    bounds = bounds_of(lambda batch: TABLE(batch["ids"][0]), batch={"ids": [IDS]})
    assert bounds == (Bound("batch", 1, ("ids", 0), 0, 6),)
    assert in_bounds(bounds, (), {"batch": {"ids": [IDS]}})
    assert not in_bounds(bounds, (), {"batch": {"ids": [IDS + 7]}})


def test_a_bound_holds_for_positional_and_keyword_calls() -> None:
    for bounds in (bounds_of(TABLE, IDS), bounds_of(lambda ids: TABLE(ids), ids=IDS)):
        assert in_bounds(bounds, (IDS,), {})
        assert in_bounds(bounds, (), {"ids": IDS})
        assert not in_bounds(bounds, (IDS + 7,), {})
        assert not in_bounds(bounds, (), {"ids": IDS + 7})


def test_values_that_are_not_used_as_an_index_are_free() -> None:
    assert bounds_of(lambda ids: ids * 2.0, IDS) == ()
    assert bounds_of(lambda mask: torch.ones(2, 4)[mask], torch.ones(2, 4, dtype=torch.bool)) == ()


@pytest.mark.parametrize(("value", "fits"), [(0, True), (6, True), (7, False), (-1, False)])
def test_both_ends_are_checked(value: int, fits: bool) -> None:
    ids = IDS.clone()
    ids[1, 2] = value
    assert in_bounds((Bound("ids", 0, (), 0, 6),), (ids,), {}) is fits


@pytest.mark.parametrize(
    "run",
    [
        lambda ids: TABLE(ids + 1),
        lambda ids: TABLE(torch.cat([torch.zeros(2, 1, dtype=torch.long), ids], 1)),
        lambda ids: TABLE(torch.where(ids > 0, ids, 0)),
        lambda ids: TABLE(ids.sort()[0]),
        lambda ids: TABLE((ids.float() * 2).long()),
        lambda ids: torch.ones(2, 9).gather(1, torch.cumsum(ids, 1)),
        lambda ids: F.cross_entropy(torch.ones(8, 5), ids.flatten() % 3),
    ],
)
def test_an_index_that_is_computed_from_inputs_is_found(run: Any) -> None:
    assert find_indexing(run, ExampleInput((IDS,), {}), ()).computed


@pytest.mark.parametrize(
    "run",
    [
        lambda ids: TABLE(ids),
        lambda ids: TABLE(ids) + TABLE(torch.arange(4)),
        lambda ids: (ids * 2.0).sum() + TABLE(torch.arange(4)).sum(),
    ],
)
def test_an_index_that_depends_on_no_input_is_not_computed(run: Any) -> None:
    assert not find_indexing(run, ExampleInput((IDS,), {}), ()).computed


def test_what_is_read_by_index_in_the_branches_of_an_operator_is_taken_for_computed() -> None:
    def run(ids: torch.Tensor) -> Any:
        return torch.cond(ids.sum() > 0, lambda ids: TABLE(ids), lambda ids: TABLE(ids) + 1, (ids,))

    found = find_indexing(run, ExampleInput((IDS,), {}), ("ids",))
    assert (found.bounds, found.computed) == ((), True)
