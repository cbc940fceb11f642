from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bentoml_compile.engines.measure import MIN_PAIRS, _by_chance, measure

CPU = torch.device("cpu")


seconds = [0.0]  # of a clock that other load on the machine does not move


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bentoml_compile.engines.measure.time", SimpleNamespace(perf_counter=lambda: seconds[0]))


def work(milliseconds: float) -> None:
    seconds[0] += milliseconds / 1e3


def test_clearly_slower_compiled_code_is_found_slower() -> None:
    found = measure(lambda: work(20), lambda: work(1), CPU)
    assert found.slower
    assert found.ratio < 1
    assert found.pairs >= MIN_PAIRS


def test_clearly_faster_compiled_code_is_not_slower() -> None:
    found = measure(lambda: work(1), lambda: work(20), CPU)
    assert not found.slower
    assert found.ratio > 1


def test_both_run_equally_often_and_in_turn() -> None:
    runs: list[str] = []
    measure(lambda: runs.append("compiled"), lambda: runs.append("eager"), CPU)
    turns = runs[1:]  # the first eager run warms up
    assert turns.count("compiled") == turns.count("eager")
    assert all(set(turns[i : i + 2]) == {"compiled", "eager"} for i in range(0, len(turns), 2))


def test_a_difference_that_chance_explains_does_not_decide() -> None:
    assert _by_chance(5, 5) < 0.05
    assert _by_chance(4, 5) > 0.05
    assert _by_chance(15, 30) > 0.05
    assert _by_chance(0, 10) == 1.0


def test_load_that_spoils_some_compiled_runs_does_not_make_it_slower() -> None:
    runs = iter(range(1000))

    def disturbed() -> None:
        work(1 if next(runs) % 3 == 0 else 30)

    assert not measure(disturbed, lambda: work(10), CPU).slower
