"""What a check found, as tests expect it."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

from bentoml_compile.artifacts.signing import KEY, KEY_FILE
from bentoml_compile.doctor.check import Finding

NOT_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away or mount")


def only(findings: Iterable[Finding]) -> Finding:
    [finding] = findings
    return finding


def expect(finding: Finding, status: str, text: str, fix: str) -> None:
    assert finding.status == status, finding
    assert text in finding.text
    assert fix in finding.fix


def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that doctor reads are unset, and this machine is as most are."""
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "CXX", "CC", KEY, KEY_FILE, "BENTOML_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SDK_DISABLED", "TRACES_EXPORTER", "EXPORTER_OTLP_ENDPOINT", "EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)
