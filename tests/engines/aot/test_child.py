"""Compiling in a process of its own. Where it is to hang, g++ is a script that notes its process and sleeps."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch._inductor import exc
from torch.export import ExportedProgram

from bentoml_compile.engines.aot import child, export, handover
from bentoml_compile.engines.aot.child import CompilerProcessError, HandoverError, compile_in_child
from bentoml_compile.engines.aot.package import open_package
from bentoml_compile.engines.failures import classify
from bentoml_compile.engines.limits import TimeLimitReached
from bentoml_compile.engines.phases import phase, recorded_phases
from bentoml_compile.shapes import ExampleInput
from tests.engines.aot.libraries import in_child
from tests.engines.aot.programs import CPU, IDS, Tied, exported, small

LONG = 600.0  # seconds; a limit that no test reaches


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of all processes of the test, in which nothing is left."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield directory
    assert not list(directory.iterdir())


@pytest.fixture
def family() -> set[psutil.Process]:
    """The processes that other tests' fixtures have started."""
    return set(psutil.Process().children())


@pytest.fixture
def target(tmp_path: Path) -> Path:
    directory = tmp_path / "target"
    directory.mkdir()
    return directory


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sleeping g++ notes its process."""
    noted = tmp_path / "g++.pid"
    install(f"echo $$ > {noted}.new; mv {noted}.new {noted}; exec sleep 3600", tmp_path, monkeypatch)
    return noted


def install(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As g++, first on PATH."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "g++").write_text(f"#!/bin/sh\n{script}\n")
    (programs / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CXX", raising=False)


def compiled(program: ExportedProgram, directory: Path, **how: Any) -> str:
    arguments: dict[str, Any] = {"device": CPU, "mode": "default", "options": {}, "time_limit": LONG, **how}
    return compile_in_child(program, directory, **arguments)


def until(condition: Callable[[], Any], what: str) -> Any:
    ends = time.monotonic() + 300
    while not (result := condition()):
        assert time.monotonic() < ends, what
        time.sleep(0.02)
    return result


def noted_process(noted: Path) -> psutil.Process:
    until(noted.exists, "the compiler was not started")
    return psutil.Process(int(noted.read_text()))


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # reaped between the two looks
        return True


class Compiling(threading.Thread):
    """A compile in another thread, whose end by an exception is kept."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self.directory = directory
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            compiled(small(), self.directory)
        except BaseException as error:
            self.error = error

    def result(self) -> BaseException | None:
        self.join(300)
        assert not self.is_alive()
        return self.error


# what comes out


def test_the_library_is_the_model_and_its_phases_are_the_callers(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "compile_program", partial(compile_in_child, time_limit=LONG))
    model = Tied().eval()
    with recorded_phases() as phases, phase("export"):
        package = export.export_package(
            model, "forward", ExampleInput((IDS,), {}), target, mode="default", options={"max_fusion_size": 32}
        )
    assert {file.name for file in target.iterdir()} == {package.library, "package.json", "constants.safetensors"}
    assert {"export", "compiler_process", "inductor", "cpp_compile"} <= {item.name for item in phases}
    around = {item.name: phases[item.parent].name for item in phases if item.parent is not None}
    assert (around["compiler_process"], around["inductor"]) == ("export", "compiler_process")
    for _ in range(2):
        executable = open_package(target, model, "forward")
        with torch.inference_mode():
            torch.testing.assert_close(executable(IDS), model(IDS), rtol=1e-4, atol=1e-4)
        executable.close()
        with torch.no_grad():
            for tensor in (*model.parameters(), model.shift, model.scale):
                tensor.add_(torch.rand(tensor.shape))


# what goes in


FROM_A_COPY = """
import json, logging, sys
from pathlib import Path
copy, target = map(Path, sys.argv[1:])
sys.path.insert(0, str(copy))
logged = []
handler = logging.Handler()
handler.emit = lambda record: logged.append(record.getMessage())
logging.getLogger("bentoml_compile").addHandler(handler)
logging.getLogger("bentoml_compile").setLevel("DEBUG")
from tests.engines.aot import test_child
try:
    test_child.compiled(test_child.small(), target)
except test_child.CompilerProcessError:
    print(json.dumps(any(str(copy / "bentoml_compile" / "engines") in message for message in logged)))
"""


@pytest.mark.soak
def test_the_other_process_finds_modules_where_this_one_does(tmp_path: Path, target: Path) -> None:
    """There is no compiler, and the traceback in the log says whose code it was."""
    installed = Path(handover.__file__).parents[2]
    shutil.copytree(installed, tmp_path / "copy" / installed.name)
    said = in_child(FROM_A_COPY, tmp_path / "copy", target, env={**os.environ, "PATH": ""})
    assert said.said is True, said.errors


# what cannot go


@torch.library.custom_op("bentoml_compile_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return twice(x)


@pytest.fixture
def starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.usefixtures("starts_nothing")
def test_what_only_this_process_has_is_refused_before_anything_is_started(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HandoverError, match=r"bentoml_compile_tests\.twice"):
        compiled(exported(Twice(), torch.rand(2)), target)
    with pytest.raises(HandoverError, match="the option 'post_grad_custom_pre_pass' is a function"):
        compiled(small(), target, options={"post_grad_custom_pre_pass": lambda graph: None})
    with (
        torch._inductor.config.patch({"post_grad_custom_post_pass": lambda graph: None}),
        pytest.raises(HandoverError, match=r"the setting torch\._inductor\.config\.post_grad_custom_post_pass"),
    ):
        compiled(small(), target)
    program = small()
    program.state_dict["weight"] = torch.rand(4, 4).to_sparse()
    with pytest.raises(HandoverError, match=r"'weight' is more than a dense tensor: torch\.sparse_coo"):
        compiled(program, target)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(HandoverError, match=r"sys\.executable"):
        compiled(small(), target)
    assert not list(target.iterdir())


# how it ends


def test_a_killed_process_is_an_error_and_leaves_nothing(
    target: Path, compiler: Path, family: set[psutil.Process]
) -> None:
    compiling = Compiling(target)
    compiling.start()
    gxx = noted_process(compiler)
    process = next(parent for parent in gxx.parents() if "main(sys.argv[1])" in " ".join(parent.cmdline()))
    assert process.nice() == min(19, psutil.Process().nice() + 10)
    assert Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() == "1000"
    process.kill()
    error = compiling.result()
    assert isinstance(error, CompilerProcessError)
    assert str(error).startswith("the compiler's process was killed by signal 9, perhaps out of memory")
    assert is_gone(gxx)
    assert not list(target.iterdir())
    assert set(psutil.Process().children()) == family


def test_an_exception_in_the_thread_that_waits_ends_the_process(
    target: Path, compiler: Path, family: set[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, is_over = threading.Event(), child._is_over

    def look(process: subprocess.Popen[bytes]) -> bool:
        waits.set()
        return is_over(process)

    monkeypatch.setattr(child, "_is_over", look)
    compiling = Compiling(target)
    compiling.start()
    gxx = noted_process(compiler)
    tree = [process for process in gxx.parents() if os.getpid() in (parent.pid for parent in process.parents())]
    assert len(tree) >= 2
    assert waits.wait(300)
    thread = ctypes.c_ulong(compiling.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(KeyboardInterrupt))
    assert isinstance(compiling.result(), KeyboardInterrupt)
    assert all(map(is_gone, [gxx, *tree]))
    assert not list(target.iterdir())
    assert set(psutil.Process().children()) == family


def test_a_hanging_process_ends_with_the_time_limit(target: Path, compiler: Path, family: set[psutil.Process]) -> None:
    with pytest.raises(TimeLimitReached, match="did not end within 10 s"):
        compiled(small(), target, time_limit=10)
    assert not compiler.exists() or not psutil.pid_exists(int(compiler.read_text()))
    assert not list(target.iterdir())
    assert set(psutil.Process().children()) == family


WORKER = """
import sys
from pathlib import Path
from tests.engines.aot import test_child
test_child.compiled(test_child.small(), Path(sys.argv[1]))
"""


def test_nothing_outlives_a_worker_that_is_killed(target: Path, compiler: Path) -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(target)], cwd=Path(__file__).parents[3])
    gxx = noted_process(compiler)
    tree = psutil.Process(worker.pid).children(recursive=True)
    assert gxx in tree
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    until(lambda: all(map(is_gone, tree)), "the compiler outlived its worker")
    until(lambda: not list(target.iterdir()), "files outlived the worker")


# its errors


def test_a_missing_compiler_is_found_by_the_same_words(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompilerProcessError) as caught:
        compiled(small(), target)
    assert classify(caught.value).reason == "no_compiler"
    assert not list(target.iterdir())


@pytest.mark.soak
def test_a_failing_compiler_is_found_by_the_same_words(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        'case "$*" in *--version*) echo g++ 12;; *) echo the disk is on fire >&2; exit 1;; esac', tmp_path, monkeypatch
    )
    with pytest.raises(CompilerProcessError) as caught:
        compiled(small(), target)
    failure = classify(caught.value)
    assert failure.reason == "compiler_failed"
    assert "the disk is on fire" in failure.message
    assert "the disk is on fire" in str(caught.value)
    assert not list(target.iterdir())


def nested(cause: BaseException) -> BaseException:
    error = RuntimeError("Inductor failed")
    error.inner_exception = cause  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        OSError(28, "No space left on device"),
        exc.InvalidCxxCompiler(),
        exc.CppCompileError(["g++", "a.cpp"], "a.cpp:1: error"),
        subprocess.CalledProcessError(1, ["g++"], output=b"a.cpp:1: error"),
        subprocess.CalledProcessError(4, ["g++"]),
        nested(subprocess.CalledProcessError(1, ["g++"], stderr="a.cpp:1: error")),
        KeyError("weight"),
    ],
    ids=repr,
)
def test_an_error_that_was_written_down_is_classified_as_itself(error: Exception) -> None:
    rebuilt = child._rebuilt(child._described(error))
    assert rebuilt is not None
    assert classify(rebuilt) == classify(error)


# the guard


def guarded(code: str, tmp_path: Path, **how: Any) -> Any:
    return child._guarded([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], tmp_path, 2, **how)


def test_the_guard_ends_as_the_command_does(tmp_path: Path) -> None:
    with guarded("raise SystemExit(3)", tmp_path) as process:
        until(lambda: child._is_over(process), "the guard did not end")
    assert process.returncode == 3
    with guarded("import os; os.abort()", tmp_path) as process:
        until(lambda: child._is_over(process), "the guard did not end")
    assert process.returncode == 128 + signal.SIGABRT


LEAVES_ANOTHER = """
import pathlib, subprocess, sys
pid = subprocess.Popen(["sleep", "3600"], start_new_session=True).pid
pathlib.Path(sys.argv[1], "new").write_text(str(pid))
pathlib.Path(sys.argv[1], "new").rename(pathlib.Path(sys.argv[1], "pid"))
"""


def test_what_the_command_leaves_behind_in_a_session_of_its_own_ends_too(tmp_path: Path) -> None:
    with guarded(LEAVES_ANOTHER, tmp_path) as process:
        until(lambda: child._is_over(process), "the guard did not end")
    assert process.returncode == 0
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_guard_that_is_killed_takes_its_group_along(tmp_path: Path) -> None:
    with guarded(
        f"{LEAVES_ANOTHER.replace(', start_new_session=True', '')}\nimport time; time.sleep(3600)", tmp_path
    ) as process:
        sleeper = noted_process(tmp_path / "pid")
        process.kill()
        until(lambda: child._is_over(process), "the guard did not end")
    until(lambda: is_gone(sleeper), "the command's child outlived the guard")


WAITS = """
import os, pathlib, signal, sys, time
directory = pathlib.Path(sys.argv[1])
(directory / "started").touch()
while not (directory / "go").exists():
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_sigterm_ends_the_command_and_not_the_guard(tmp_path: Path) -> None:
    """BentoML's supervisor sends it to all children of a worker, whose own end is the guard's."""
    with guarded(WAITS, tmp_path) as process:
        until((tmp_path / "started").exists, "the command did not start")
        process.terminate()
        (tmp_path / "go").touch()
        until(lambda: child._is_over(process), "the guard did not end")
    assert process.returncode == 128 + signal.SIGTERM
