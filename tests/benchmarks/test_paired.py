from __future__ import annotations

import random

import pytest

from benchmarks import paired


def test_a_difference_of_one_percent_is_found_under_noise_that_meets_both() -> None:
    draw = random.Random(1)
    noise = [draw.choice((0.0, 0.0, 0.5e-3, 20e-3)) for _ in range(2000)]
    times = {
        "short": [1e-3 + more + draw.uniform(-2e-5, 2e-5) for more in noise],
        "long": [1.01e-3 + more + draw.uniform(-2e-5, 2e-5) for more in noise],
    }

    found = paired.compare(times, "long", "short")

    median = paired.median_interval(times["short"])[1]
    assert found.difference_us == pytest.approx(10, abs=1)
    assert found.percent == pytest.approx(100 * 10e-6 / median, rel=0.1)
    assert 0 < found.percent_low < found.percent < found.percent_high


def test_the_interval_holds_the_true_median_in_95_of_100_repetitions() -> None:
    draw = random.Random(2)
    held = 0
    for _ in range(1000):
        low, _, high = paired.median_interval([draw.expovariate(1) for _ in range(200)])
        held += low <= 0.6931 <= high  # ln 2
    assert 930 <= held <= 975


@pytest.mark.parametrize("count", [1, 2, 5])
def test_of_few_values_the_interval_is_their_range(count: int) -> None:
    values = [float(value) for value in range(count)]
    assert paired.median_interval(values) == (0, (count - 1) / 2, count - 1)
