"""Whatever is thrown at a compiled model, the answer is eager's: same values, or the same exception.

Hypothesis draws the calls, in a child process each, because what goes wrong in compiled code may end the process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FEW, MANY = 200, 5000
ENGINES = pytest.mark.parametrize("engine", ["aot", "jit", "aot-ranges", "jit-ranges"])
POLICIES = pytest.mark.parametrize("policy", ["eager", "reject"])


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each engine compiles once; the policy is no part of an artifact."""
    return tmp_path_factory.mktemp("store")


def call_wildly(engine: str, policy: str, examples: int, store: Path, folder: Path) -> None:
    last = folder / "last.txt"
    arguments = [engine, policy, str(examples), str(store), str(last)]
    child = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.hostile_process", *arguments],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        errors="replace",
    )
    if child.returncode:
        called = last.read_text() if last.exists() else "nothing"
        pytest.fail(f"exit status {child.returncode}, last called: {called}\n{child.stdout}\n{child.stderr[-20_000:]}")


@pytest.mark.parametrize(
    ("engine", "policy"), [("aot", "eager"), ("jit", "reject"), ("aot-ranges", "reject"), ("jit-ranges", "eager")]
)
def test_a_hostile_call_ends_as_eager_ends_it(engine: str, policy: str, store: Path, tmp_path: Path) -> None:
    call_wildly(engine, policy, FEW, store, tmp_path)


@pytest.mark.soak
@ENGINES
@POLICIES
def test_thousands_of_hostile_calls_end_as_eager_ends_them(
    engine: str, policy: str, store: Path, tmp_path: Path
) -> None:
    call_wildly(engine, policy, MANY, store, tmp_path)
