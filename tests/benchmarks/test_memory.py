from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import memory
from tests.conftest import CHECKOUT


def process(**rss: float) -> dict[str, dict[str, dict[str, float]]]:
    return {"steps": {step: {"rss_mb": mb, "anonymous_mb": mb / 2} for step, mb in rss.items()}}


EAGER = memory.median([process(imports=300, bentoml=300, call=mb) for mb in (400.0, 390.0, 800.0)])
OURS = memory.median([process(imports=300, bentoml=300, compile_model=350, call=420.0)])


def test_ours_is_compared_with_eager_as_a_whole_and_beyond_the_imports() -> None:
    found = memory.compare({"eager": EAGER, "ours": OURS})
    assert (found["eager_mb"], found["ours_mb"]) == (400, 420)
    assert found["percent"] == pytest.approx(5)
    assert found["percent_beyond_imports"] == pytest.approx(20)


def test_the_table_says_what_each_step_added() -> None:
    compared = {"steps": {"eager": EAGER, "ours": OURS}, **memory.compare({"eager": EAGER, "ours": OURS})}
    lines = memory.table({"tiny": compared}).splitlines()
    assert "| tiny | 400.0 | 420.0 | +20.0 MB (+5.0%) | 100.0 | +20.0% |" in lines
    assert "| tiny | ours | call | 420.0 | +70.0 | 210.0 |" in lines


HELD = """
from benchmarks import memory
before = memory.resident()["anonymous_mb"]
held = bytearray(b"x") * 64_000_000
with_it = memory.resident()["anonymous_mb"]
del held
print(with_it - before, with_it - memory.resident()["anonymous_mb"])
"""


def test_memory_that_is_held_is_seen_and_given_back_when_freed() -> None:
    """In a process whose other threads and tests take and give back nothing meanwhile."""
    done = subprocess.run([sys.executable, "-c", HELD], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert [float(mb) for mb in done.stdout.split()] == [pytest.approx(64, abs=8), pytest.approx(64, abs=8)]
