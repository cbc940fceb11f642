"""What compiles: the C++ compiler, the GPU, Triton, and the versions of what this package uses below its surface."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from bentoml_compile.doctor.check import Finding, in_one_line, install, ok, problem, run, warning

COMPILE_SECONDS = 60.0  # for one small file

_OPENMP = """
#include <omp.h>
#include <cmath>
extern "C" double probe(int n) {
    double sum = 0;
    #pragma omp parallel for reduction(+ : sum)
    for (int i = 0; i < n; i++) sum += std::sqrt(1.0);
    return sum + 0 * omp_get_max_threads();
}
"""
_WITH_PYTHON = "#include <Python.h>\nint probe(void) { return PY_MAJOR_VERSION; }\n"
_OFF = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")


def switched_off() -> list[str]:
    """The variables that switch compiling off."""
    return [name for name in _OFF if os.environ.get(name) == "1"]


def switches() -> Iterator[Finding]:
    """What the environment switches off."""
    for name in (names := switched_off()):
        yield warning(f"{name}=1: nothing is compiled or loaded, every model is served eagerly", f"unset {name}")
    if not names:
        yield ok("compiling is not switched off by the environment")


def compiler(*, has_bundle: bool = False) -> Iterator[Finding]:
    """The compiler that Inductor takes, by making a library with OpenMP and calling it.

    Args:
        has_bundle: artifacts came with the Bento, so that it may be meant to do without.
    """
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        given = f"CXX={name} is no program" if "CXX" in os.environ else f"there is no {name} in PATH"
        fix = "unset CXX" if "CXX" in os.environ and shutil.which("g++") else install("g++", "gcc-c++")
        make = warning if has_bundle else problem
        yield make(f"{given}: artifacts can be loaded here, and nothing compiled", fix)
        return
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(_OPENMP)
        command = [path, "-shared", "-fPIC", "-O1", "-std=c++17", "-fopenmp", str(source), "-o", str(library)]
        try:
            made = run(command, seconds=COMPILE_SECONDS, directory=Path(folder))
        except (TimeoutError, OSError) as error:
            yield problem(f"{path} cannot be used: {in_one_line(error)}", install("--reinstall g++", "gcc-c++"))
            return
        if made.status != 0 or not library.exists():
            yield problem(f"{path} failed (exit status {made.status}): {made.line}", _for_compiler(made.output))
            return
        yield _called(path, library)
    yield from _python_headers()


def _for_compiler(output: str) -> str:
    if "omp" in output:
        return install("libgomp1 libomp-dev", "libgomp libomp-devel")
    if "No space left" in output:
        return f"free space in {tempfile.gettempdir()}, or export TMPDIR=/a/folder/with/space"
    return install("--reinstall g++", "gcc-c++")


def _called(path: str, library: Path) -> Finding:
    try:
        probe = ctypes.CDLL(str(library)).probe
    except OSError as error:
        folder = tempfile.gettempdir()
        fix = f"mount -o remount,exec {folder}, or export TMPDIR=/a/folder/that/may/hold/programs"
        return problem(f"{path} makes libraries that cannot be loaded from {folder}: {error}", fix)
    probe.restype = ctypes.c_double
    if probe(1000) != 1000:
        return problem(f"{path} makes code that computes wrongly", install("--reinstall g++", "gcc-c++"))
    return ok(f"{path} makes libraries with OpenMP: {_version(path)}")


def _version(path: str) -> str:
    with contextlib.suppress(OSError, TimeoutError, IndexError):
        return run([path, "--version"], seconds=10).output.splitlines()[0]
    return "version unknown"


def _python_headers() -> Iterator[Finding]:
    """Which torch.compile's code for the CPU includes (torch/_inductor/codecache.py, torch 2.13)."""
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists():
        yield warning(
            f"no Python.h in {include}: models that only torch.compile can serve (engine jit) stay eager on the CPU",
            install("python3-dev", "python3-devel"),
        )


def cuda(needs_gpu: bool = False) -> Iterator[Finding]:
    """The driver, the devices, and whether torch has code for them."""
    import torch

    driver = _driver()
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    missing = problem if needs_gpu else warning
    if torch.version.cuda is None and torch.version.hip is None:
        if driver is None and not needs_gpu:
            yield ok(f"torch {torch.__version__} is built for the CPU, and no NVIDIA driver is here")
            return
        has = f"this machine has {driver}" if driver else "the service asks for a GPU"
        public = Version(torch.__version__).public
        yield missing(
            f"torch {torch.__version__} is built for the CPU, but {has}: models run on the CPU",
            f"pip install --force-reinstall torch=={public}",
        )
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        yield missing("CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    elif torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            yield _device(torch, number, driver, built)
    elif driver is None:
        yield missing(
            f"torch is built for {built}, but no NVIDIA driver is here: models run on the CPU",
            "docker run --gpus all ..., or Kubernetes' resources: {limits: {nvidia.com/gpu: 1}}; else install a driver",
        )
    else:
        yield problem(f"{driver} is here, but torch ({built}) cannot use it: {_cuda_error(torch)}", "nvidia-smi")


def _driver() -> str | None:
    if (command := shutil.which("nvidia-smi")) is not None:
        with contextlib.suppress(OSError, TimeoutError):
            ran = run([command, "--query-gpu=driver_version", "--format=csv,noheader"], seconds=20)
            if ran.status == 0 and ran.output.strip():
                return f"NVIDIA driver {ran.output.split()[0]}"
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return None


def _device(torch: Any, number: int, driver: str | None, built: str) -> Finding:
    name, capability = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
    about = f"GPU {number}: {name}, capability {capability[0]}.{capability[1]}, {built}, {driver or 'driver unknown'}"
    try:
        total = torch.ones(8, device=f"cuda:{number}").sum().item()
        free, size = torch.cuda.mem_get_info(number)
    except Exception as error:
        has = ", ".join(torch.cuda.get_arch_list()) or "nothing"
        return problem(
            f"{about}: it does not compute: {in_one_line(error)} (torch has code for {has})",
            f"nvidia-smi -i {number}; for a GPU that torch has no code for: pip install --upgrade torch",
        )
    assert total == 8
    return ok(f"{about}, {free / 1e9:.1f} of {size / 1e9:.1f} GB free")


def _cuda_error(torch: Any) -> str:
    try:
        torch.cuda.init()
    except Exception as error:
        return in_one_line(error)
    return "it names no reason"


def triton() -> Iterator[Finding]:
    """Triton, and the C compiler that it takes for its launchers (triton/runtime/build.py)."""
    import torch

    if not torch.cuda.is_available():
        yield ok("not needed: no GPU is in use")
        return
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        yield problem("Triton is not installed: nothing can be compiled for the GPU", f"pip install {_wanted_triton()}")
        return
    command = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if command is None or (path := shutil.which(command)) is None:
        given = f"CC={command} is no program" if command else "there is no gcc or clang in PATH"
        yield problem(f"{given}, which Triton {version} needs", install("gcc", "gcc"))
        return
    yield c_compiler(path, version)


def c_compiler(path: str, version: str) -> Finding:
    """Whether the compiler makes a library that includes Python's headers, as Triton's launchers do."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        source = Path(folder, "probe.c")
        source.write_text(_WITH_PYTHON)
        include = f"-I{sysconfig.get_path('include')}"
        command = [path, "-shared", "-fPIC", "-O1", include, str(source), "-o", str(Path(folder, "probe.so"))]
        made = run(command, seconds=COMPILE_SECONDS, directory=Path(folder))
    if made.status != 0:
        packages = ("gcc python3-dev", "gcc python3-devel") if "Python.h" in made.output else ("gcc", "gcc")
        return problem(f"{path}, which Triton {version} needs, failed: {made.line}", install(*packages))
    return ok(f"Triton {version} with {path}: {_version(path)}")


def _wanted_triton() -> str:
    for text in importlib.metadata.requires("torch") or ():
        if Requirement(text).name == "triton":
            return f"'triton{Requirement(text).specifier}'"
    return "triton"


def versions() -> Iterator[Finding]:
    """Python, and the packages whose private parts this one uses. What its tests ran with are its lower bounds."""
    own = importlib.metadata.distribution("bentoml-compile")
    python = SpecifierSet(own.metadata["Requires-Python"] or "")
    here = platform.python_version()
    if here not in python:
        yield problem(f"Python {here}; bentoml-compile {own.version} needs {python}", f"install Python {python}")
    bounds = {item.name: item for item in map(Requirement, own.requires or ()) if item.marker is None}
    checked = [_against(bounds[name]) for name in ("torch", "bentoml")]
    yield from (finding for finding in checked if finding.status != "ok")
    named = ", ".join(finding.text for finding in checked if finding.status == "ok")
    yield ok(f"bentoml-compile {own.version}, Python {here}" + (f", {named}" if named else ""))


def _against(bound: Requirement) -> Finding:
    installed = importlib.metadata.version(bound.name)
    lowest = next(item.version for item in bound.specifier if item.operator == ">=")
    fix = f"pip install '{bound.name}>={lowest},<{_next_minor(lowest)}'"
    try:
        version = Version(installed)
    except InvalidVersion:
        return warning(f"{bound.name} {installed}: not a version; checked with {lowest}", fix)
    if version.release < Version(lowest).release:
        return problem(f"{bound.name} {installed} is older than {lowest}, the oldest that works", fix)
    if version.release[:2] != Version(lowest).release[:2]:
        return warning(
            f"{bound.name} {installed} is newer than {lowest}, which was checked; its inside may differ", fix
        )
    return ok(f"{bound.name} {installed}")


def _next_minor(version: str) -> str:
    major, minor = Version(version).release[:2]
    return f"{major}.{minor + 1}"


def machine() -> Iterator[Finding]:
    """The axes of a fingerprint that are this machine and its settings, not a model."""
    import torch

    from bentoml_compile.artifacts.environment import environment_axes

    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] or [torch.device("cpu")]
    axes = environment_axes(devices)
    yield ok(f"an artifact made here loads where {len(axes)} axes are the same", **axes)
