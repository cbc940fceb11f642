from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import boot_ways, fresh
from benchmarks.boot_ways import Sample


def sample(seconds: float, imported: float = 0.0) -> Sample:
    return Sample(seconds, seconds / 2, seconds / 2, 0.01, 0.02, imported, 1e-6)


SAMPLES = {
    "cold": [sample(30), sample(20), sample(40)],
    "aoti": [sample(2), sample(3), sample(90)],
    "ours": [sample(0.5, 0.25), sample(0.25, 0.25), sample(0.75, 0.25)],
}


def test_the_ratio_is_that_of_the_best_other_ways_median() -> None:
    assert boot_ways.ratio(SAMPLES) == {
        "best_other": "aoti",
        "best_other_over_ours": 6.0,
        "best_other_over_ours_with_import": 4.0,
    }


def test_the_table_has_a_row_for_each_way_of_each_model() -> None:
    lines = boot_ways.table({"small": SAMPLES, "large": SAMPLES}).splitlines()
    assert len(lines) == 2 + 2 * len(SAMPLES)
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| small | cold | 30.000 (20.000 to 40.000) | 15.000 | ")
    assert lines[2].endswith("| - | 60.0 |")
    assert lines[-1].endswith("| 0.250 | 1.0 |")


def test_figures_of_the_other_part_are_kept(tmp_path: Path) -> None:
    boot_ways.keep(tmp_path, {"boots": [1], "models": "old"})
    kept = boot_ways.keep(tmp_path, {"models": "new"})
    assert kept == json.loads((tmp_path / "boot.json").read_text()) == {"boots": [1], "models": "new"}


def test_a_process_that_fails_is_an_error_with_its_last_words() -> None:
    with pytest.raises(RuntimeError, match=r"No module named 'benchmarks\.missing'"):
        fresh.run("benchmarks.missing:boot", env={})
