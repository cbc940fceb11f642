"""Several workers of one service under the real `bentoml serve`: one compiles, the others load its artifact."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.otlp_receiver import OtlpReceiver
from tests.serving.test_boots import classify, serve

WORKERS = 3
STARTUP = "torch_compile.startup"

pytestmark = pytest.mark.slow


def test_one_of_three_workers_compiles_and_the_others_load_its_artifact(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        server = serve(tmp_path / "home", workers=WORKERS, tracing=receiver.tracing_config(0.0)).start(wait=False)
        with server:
            startups = receiver.wait_for(STARTUP, count=WORKERS, deadline=600)
            server.wait_ready()
            assert len(classify(server).json()) == 2
        spans = receiver.spans()
    outcomes = sorted(span.attributes["torch_compile.outcome"] for span in startups)
    assert outcomes == ["compiled", *["loaded"] * (WORKERS - 1)]
    assert {span.attributes["torch_compile.engine"] for span in startups} == {"aot"}
    assert len({span.attributes["torch_compile.fingerprint"] for span in startups}) == 1
    waits = [span for span in spans if span.name == "torch_compile.wait"]
    assert {span.attributes["torch_compile.outcome"] for span in waits} <= {"loaded"}  # a late worker does not wait
    assert {span.parent_id for span in waits} <= {span.span_id for span in startups}
    assert [span.name for span in spans].count("torch_compile.compile") == 1
    assert len(list((tmp_path / "home" / "compile").rglob("manifest.json"))) == 1
    assert list((tmp_path / "home" / "compile").rglob("lease")) == []
