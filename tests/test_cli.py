"""The command, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.json.file import FileSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from bentoml_compile.artifacts.artifact import Artifact
from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.store import Store
from bentoml_compile.cli import main
from tests.forked import Forked

SECOND = 10**9
START = 1_700_000_000 * SECOND


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("BENTOML_HOME", str(tmp_path))
    return Store(tmp_path / "compile")


def make(store: Store, model: str, size: int = 1000) -> Artifact:
    with store.draft(model, Fingerprint({"torch": "2.13.0", "mode": "default"})) as draft:
        (draft.cache / "kernel.so").write_bytes(b"x" * size)
        artifact = draft.seal({"speedup": 1.5}, {"/app/helper.py": "0" * 64})
    artifact.release()
    return artifact


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_artifacts_lists_those_of_the_home_folder(store: Store) -> None:
    assert "No artifacts" in run("artifacts").output
    artifact = make(store, "encoder", 2_500_000)
    heading, row = run("artifacts").output.splitlines()
    assert heading.split() == ["MODEL", "FINGERPRINT", "ENGINE", "SIZE", "AGE", "LAST", "USE"]
    assert row.split()[:5] == ["encoder", artifact.fingerprint, "jit", "2.5", "MB"]


def test_artifacts_lists_another_store_as_json(tmp_path: Path) -> None:
    store = Store(tmp_path / "elsewhere")
    artifact = make(store, "encoder")
    (listed,) = json.loads(run("artifacts", "--store", str(store.root), "--json").output)
    assert listed["model"] == "encoder"
    assert listed["fingerprint"] == artifact.fingerprint
    assert listed["size"] == 1000
    assert listed["path"] == str(artifact.path)


def test_show_prints_axes_decisions_and_files_by_the_beginning_of_an_id(store: Store) -> None:
    artifact = make(store, "encoder")
    for id in (artifact.fingerprint[:6], artifact.path.name):
        output = run("artifacts", "show", id).output
        for expected in ("torch: 2.13.0", "mode: default", '"speedup": 1.5', "/app/helper.py", "cache/kernel.so"):
            assert expected in output
    assert json.loads(run("artifacts", "show", artifact.fingerprint, "--json").output)[0]["axes"]["mode"] == "default"


def test_show_of_an_unknown_id_is_a_usage_error(store: Store) -> None:
    result = run("artifacts", "show", "abc")
    assert result.exit_code == 2
    assert "no artifact 'abc'" in result.output


def test_prune_by_size_keeps_the_last_used(store: Store) -> None:
    old, new = make(store, "old"), make(store, "new")
    os.utime(old.path / "used", (0, 0))
    assert "1 would be removed" in run("artifacts", "prune", "--max-size", "1kB", "--dry-run").output
    assert old.path.exists()
    assert "1 removed, 1.0 kB" in run("artifacts", "prune", "--max-size", "1kB").output
    assert not old.path.exists()
    assert new.path.exists()


def test_prune_by_age_removes_what_was_not_used_for_so_long(store: Store) -> None:
    old, new = make(store, "old"), make(store, "new")
    os.utime(old.path / "used", (0, 0))
    assert run("artifacts", "prune", "--older-than", "1.5h").exit_code == 0
    assert [artifact.path for artifact in store.artifacts()] == [new.path]


@pytest.mark.parametrize(
    "arguments", [(), ("--older-than", "7"), ("--older-than", "-1d"), ("--max-size", "big"), ("--max-size", "2IB")]
)
def test_prune_refuses_what_it_does_not_understand(store: Store, arguments: tuple[str, ...]) -> None:
    make(store, "encoder")
    assert run("artifacts", "prune", *arguments).exit_code == 2
    assert len(store.artifacts()) == 1


@pytest.mark.parametrize("arguments", [["artifacts"], ["trace", os.devnull], ["--help"]], ids=" ".join)
def test_what_needs_no_model_starts_without_what_is_slow_to_import(store: Store, arguments: list[str]) -> None:
    make(store, "encoder")
    script = f"""
        import sys
        from click.testing import CliRunner
        from bentoml_compile.cli import main
        result = CliRunner().invoke(main, {arguments!r})
        assert result.exit_code == 0 and result.output, result
        assert not {{"torch", "_bentoml_sdk", "cryptography", "fsspec"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


SERVICE = """
import bentoml
import torch
from torch import nn
from bentoml_compile import compile_model


class Whole(nn.Module):
    def forward(self, x):
        return x + 1


class Broken(nn.Module):
    def forward(self, x):
        x = x + 1
        print("a break")
        return x * 2


@bentoml.service
class Good:
    def __init__(self):
        self.model = compile_model(Whole(), example_inputs=[(torch.ones(2, 2),)], name="whole")


@bentoml.service
class Bad:
    def __init__(self):
        self.whole = compile_model(Whole(), example_inputs=[(torch.ones(2, 2),)], name="whole")
        self.broken = compile_model(Broken(), example_inputs=[(torch.ones(2, 2),)], name="broken")


@bentoml.service
class Api:
    good = bentoml.depends(Good)


@bentoml.service
class Crash:
    def __init__(self):
        raise RuntimeError("no weights")
"""


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    """Each service is made in a process of its own, since BentoML keeps its config there."""
    with Forked("torch._dynamo", "_bentoml_sdk.service", "bentoml_compile.bento.compile") as forked:
        yield forked


def explain(forked: Forked, folder: Path, target: str) -> subprocess.CompletedProcess[str]:
    (folder / "service.py").write_text(SERVICE)
    environment = {**os.environ, "BENTOML_HOME": str(folder / "home"), "BENTOML_DO_NOT_TRACK": "True"}
    return forked.run("from bentoml_compile.cli import main; main()", folder, "explain", target, env=environment)


def test_explain_says_one_graph_of_a_model_without_breaks(forked: Forked, tmp_path: Path) -> None:
    result = explain(forked, tmp_path, "service:Good")
    assert result.returncode == 0, result.stderr
    assert "whole: one graph" in result.stdout


def test_explain_prints_each_break_and_exits_with_1(forked: Forked, tmp_path: Path) -> None:
    result = explain(forked, tmp_path, "service:Bad")
    assert result.returncode == 1, result.stderr
    assert "whole: one graph" in result.stdout
    assert "broken: 1 graph break\n" in result.stdout
    line = 1 + SERVICE.splitlines().index('        print("a break")')
    assert f'service.py:{line}: print("a break")' in result.stdout
    assert "reason: " in result.stdout
    assert "hint: " in result.stdout


def test_explain_of_a_service_that_only_depends_on_others_names_them_and_exits_with_1(
    forked: Forked, tmp_path: Path
) -> None:
    result = explain(forked, tmp_path, "service:Api")
    assert (result.returncode, result.stdout) == (1, "")
    assert "service:Api.good" in result.stderr
    assert explain(forked, tmp_path, "service:Api.good").returncode == 0


@pytest.mark.parametrize(
    ("target", "words"), [("service:Missing", "Missing"), ("nowhere:Svc", "nowhere"), ("service:Crash", "no weights")]
)
def test_explain_of_a_service_that_cannot_be_made_exits_with_2(
    forked: Forked, tmp_path: Path, target: str, words: str
) -> None:
    result = explain(forked, tmp_path, target)
    assert result.returncode == 2
    assert words in result.stderr


def write_traces(path: Path) -> None:
    """A boot that ended in eager, a request that recompiled, and one whose parent was not exported."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(FileSpanExporter(path)))
    tracer = provider.get_tracer("bentoml_compile")

    def span(
        name: str, start: float, end: float, parent: otel.Span | None = None, **attributes: str | int
    ) -> otel.Span:
        context = otel.set_span_in_context(parent) if parent is not None else None
        named = {f"torch_compile.{key}": value for key, value in attributes.items()}
        made = tracer.start_span(name, context, start_time=START + int(start * SECOND), attributes=named)
        made.end(START + int(end * SECOND))
        return made

    request = span("POST /embed", 100, 101)
    span("torch_compile.inference", 100.25, 101, request, model="encoder", shape="[2, 12]")
    boot = span("torch_compile.startup", 0, 10, model="encoder", outcome="eager")
    compile = tracer.start_span("torch_compile.compile", otel.set_span_in_context(boot), start_time=START + 5 * SECOND)
    compile.add_event("torch_compile.fallback", {"reason": "no_compiler"}, START + 6 * SECOND)
    compile.set_status(otel.StatusCode.ERROR, "no g++\n  on PATH")
    compile.end(START + 10 * SECOND)
    span("torch_compile.lookup", 0, 1, boot)
    unexported = otel.NonRecordingSpan(
        otel.SpanContext(7, 9, is_remote=True, trace_flags=otel.TraceFlags(otel.TraceFlags.SAMPLED))
    )
    span("orphan", 200, 201, unexported)
    provider.shutdown()


def test_trace_prints_trees_with_times_and_shares_the_newest_last(tmp_path: Path) -> None:
    write_traces(tmp_path / "traces.jsonl")
    traces = [part.splitlines() for part in run("trace", str(tmp_path / "traces.jsonl")).output.split("\n\n")]
    words = [[" ".join(line.split()) for line in lines[1:]] for lines in traces]
    assert words == [
        [
            "torch_compile.startup 10000.0 ms model=encoder outcome=eager",
            "torch_compile.lookup 1000.0 ms 10%",
            "torch_compile.compile 5000.0 ms 50% error: no g++ on PATH",
            "* torch_compile.fallback reason=no_compiler",
        ],
        ["POST /embed 1000.0 ms", "torch_compile.inference 750.0 ms 75% model=encoder shape=[2, 12]"],
        ["orphan 1000.0 ms"],
    ]
    indents = [len(line) - len(line.lstrip()) for line in traces[0]]
    assert indents == [0, 2, 4, 4, 6]


@pytest.mark.parametrize(
    ("attributes", "words"), [({"http.status_code": 500}, "error: HTTP status 500"), ({}, "error: unknown")]
)
def test_trace_says_of_a_failure_without_words_its_status(
    tmp_path: Path, attributes: dict[str, int], words: str
) -> None:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(FileSpanExporter(tmp_path / "traces.jsonl")))
    span = provider.get_tracer("test").start_span("POST /embed", attributes=attributes)
    span.set_status(otel.StatusCode.ERROR)
    span.end()
    provider.shutdown()
    assert run("trace", str(tmp_path / "traces.jsonl")).stdout.rstrip().endswith(words)


def test_trace_prints_the_last_ones_and_skips_a_line_that_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    write_traces(file)
    content = file.read_text()
    file.write_text(content + content[: len(content) // 2] + '\n{"a": []}\n[1]\n')
    result = run("trace", str(file), "--last", "1")
    assert result.exit_code == 0
    assert "orphan" in result.stdout
    assert "startup" not in result.stdout
    assert "2 lines" in result.stderr


def test_trace_of_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    assert run("trace", str(tmp_path / "gone.jsonl")).exit_code == 2
