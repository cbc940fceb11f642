"""The upgrade path of docs/runners.md: its file before, by BentoML alone, and after its diff, compiled."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bento.test_settings import prepared

PAGE = Path(__file__).parents[2] / "docs" / "runners.md"

ASK = """
import json, sys
import numpy as np
import service
service.scorer.init_local(quiet=True)
answers = {size: service.svc.apis["score"].func(np.ones((size, 16), "float32") * size).tolist() for size in (1, 2, 7)}
report = getattr(service.scorer._runner_handle._runnable.model, "report", None)
ours = sorted(name for name in sys.modules if name.startswith("bentoml_compile"))
print(json.dumps({"answers": answers, "report": report and report.to_dict(), "plain": not ours}))
"""


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def ask(directory: Path, **config: Any) -> dict[str, Any]:
    env = prepared(directory, BENTOML_CONFIG_OVERRIDES=json.dumps({"services": {"scorer": {"torch_compile": config}}}))
    done = subprocess.run(
        [sys.executable, "-c", ASK], cwd=directory, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_the_runner_file_answers_the_same_before_and_after_its_diff(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(block("python"))
    before = ask(tmp_path)
    subprocess.run(["git", "apply", "-"], input=block("diff"), cwd=tmp_path, text=True, check=True)
    after = ask(tmp_path, engine="jit", backend="eager", keep_eager_if_slower=False)
    assert before["plain"]
    assert before["report"] is None
    for size, rows in before["answers"].items():
        assert after["answers"][size] == [pytest.approx(row, abs=1e-5) for row in rows]
    assert (after["report"]["model"], after["report"]["outcome"]) == ("scorer", "compiled")
    assert {shape["engine"] for shape in after["report"]["shapes"]} == {"jit"}
