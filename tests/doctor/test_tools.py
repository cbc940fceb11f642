"""Faults of what compiles, each with the line and the command that ends it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from bentoml_compile.doctor import tools
from tests.doctor.findings import expect, only
from tests.waiting import wait_for


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a shell script alone into PATH, under a name."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def put(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    monkeypatch.setenv("PATH", str(folder))
    return put


def test_a_compiler_that_works_is_named_with_its_version() -> None:
    finding = only(tools.compiler())
    assert finding.status == "ok", finding
    assert f"{shutil.which('g++')} makes libraries with OpenMP: " in finding.text
    assert "unknown" not in finding.text


def test_path_without_a_compiler(program: Callable[[str, str], None]) -> None:
    expect(
        only(tools.compiler()), "problem", "there is no g++ in PATH: artifacts can be loaded", "apt-get install -y g++"
    )
    expect(only(tools.compiler(has_bundle=True)), "warning", "there is no g++ in PATH: artifacts can be loaded", "g++")
    program("dnf", "")
    expect(only(tools.compiler()), "problem", "there is no g++ in PATH", "dnf install -y gcc-c++")


def test_cxx_that_names_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++-99")
    expect(only(tools.compiler()), "problem", "CXX=g++-99 is no program", "unset CXX")


@pytest.mark.parametrize(
    ("script", "text", "fix"),
    [
        ("echo start; echo \"g++: fatal error: cannot execute 'cc1plus'\"; exit 1", "cc1plus", "--reinstall g++"),
        ("echo 'probe.cpp:2:10: fatal error: omp.h: No such file or directory'; exit 1", "omp.h", "libgomp1"),
        ("echo 'probe.s: fatal error: No space left on device'; exit 1", "No space left", "export TMPDIR="),
        ("exit 0", "exit status 0", "--reinstall g++"),
        ("kill -9 $$", "exit status -9", "--reinstall g++"),
        ("while [ \"$1\" != -o ]; do shift; done; echo junk >$2", "cannot be loaded", "export TMPDIR="),
    ],
    ids=["fails", "no openmp", "full", "makes nothing", "killed", "makes junk"],
)  # fmt: skip
def test_a_compiler_that_fails(program: Callable[[str, str], None], script: str, text: str, fix: str) -> None:
    program("g++", script)
    expect(only(tools.compiler()), "problem", text, fix)


def test_a_compiler_that_hangs_is_ended(
    program: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"

    class Started(subprocess.Popen[str]):
        """Its time begins when it hangs, however late that is."""

        def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
            wait_for(lambda: pid.exists() and pid.read_text().endswith("\n"))
            return super().communicate(input, timeout)

    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(tools, "COMPILE_SECONDS", 1.0)
    program("g++", f"echo $$ >{pid}; {shutil.which('sleep', path=os.defpath)} 600")
    expect(only(tools.compiler()), "problem", "did not end within 1 s", "--reinstall g++")
    group = int(pid.read_text())
    wait_for(lambda: not any(_lives_in(group, each) for each in psutil.process_iter()))


def _lives_in(group: int, process: psutil.Process) -> bool:
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("name", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_compiling_that_is_switched_off(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert only(tools.switches()).status == "ok"
    monkeypatch.setenv(name, "1")
    expect(only(tools.switches()), "warning", f"{name}=1: nothing is compiled", f"unset {name}")


def test_versions_that_the_tests_run_with_are_fine() -> None:
    finding = only(tools.versions())
    assert finding.status == "ok", finding
    assert "torch 2." in finding.text


@pytest.mark.parametrize(
    ("package", "version", "status", "text", "fix"),
    [
        ("torch", "2.12.1", "problem", "torch 2.12.1 is older than 2.13", "pip install 'torch>=2.13,<2.14'"),
        (
            "torch",
            "2.99.0+cu140",
            "warning",
            "torch 2.99.0+cu140 is newer than 2.13",
            "pip install 'torch>=2.13,<2.14'",
        ),
        ("bentoml", "1.3.0", "problem", "bentoml 1.3.0 is older than 1.4.40", "pip install 'bentoml>=1.4.40,<1.5'"),
        ("torch", "git-abc", "warning", "torch git-abc: not a version", "pip install"),
    ],
)
def test_a_version_that_was_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str, status: str, text: str, fix: str
) -> None:
    folder = tmp_path / f"{package}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    first, last = tools.versions()
    expect(first, status, text, fix)
    assert last.status == "ok"
    assert f"{package} " not in last.text


ON_CPU = pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")


@ON_CPU
def test_a_driver_that_torch_is_not_built_for(program: Callable[[str, str], None]) -> None:
    assert only(tools.cuda()).status == "ok"
    expect(
        only(tools.cuda(needs_gpu=True)),
        "problem",
        "the service asks for a GPU",
        "pip install --force-reinstall torch==",
    )
    program("nvidia-smi", "echo 580.65.06")
    expect(
        only(tools.cuda()),
        "warning",
        "this machine has NVIDIA driver 580.65.06",
        "pip install --force-reinstall torch==",
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is in use")
def test_triton_is_not_asked_for_without_a_gpu() -> None:
    assert only(tools.triton()).status == "ok"


def test_tritons_c_compiler_is_tried_with_pythons_headers(program: Callable[[str, str], None], tmp_path: Path) -> None:
    gcc = shutil.which("gcc", path=os.defpath)
    assert gcc is not None
    program("gcc", "echo 'probe.c:1:10: fatal error: Python.h: No such file or directory'; exit 1")
    expect(tools.c_compiler(str(tmp_path / "bin/gcc"), "3.6"), "problem", "Triton 3.6 needs, failed", "gcc python3-dev")


def test_the_machines_axes_are_those_of_a_fingerprint() -> None:
    details = only(tools.machine()).details
    assert details["torch"] == torch.__version__
    assert details["threads"] == str(torch.get_num_threads())
