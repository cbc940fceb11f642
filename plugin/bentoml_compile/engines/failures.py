"""Why compiling failed: one of few words for metrics and spans, and a sentence that says what to do."""

from __future__ import annotations

import errno
import os
import subprocess
from dataclasses import dataclass

import torch

from bentoml_compile.errors import ConfigError, GraphBreakError
from bentoml_compile.words import one_line


@dataclass(frozen=True, slots=True)
class Failure:
    reason: str  # no_compiler, compiler_failed, out_of_memory, time_limit, no_space, backend_error, verification, ...
    message: str  # what happened and what to do next

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


_OUT_OF_MEMORY = (
    "can't allocate memory",
    "std::bad_alloc",
    "out of memory allocating",  # cc1plus
    "virtual memory exhausted",
    "Killed signal terminated program",  # g++, of a cc1plus that the kernel killed
)


def out_of_memory(error: BaseException) -> bool:
    """Also for torch's CPU allocator, which raises a plain RuntimeError."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    said = f"{error} {getattr(error, 'output', '')} {getattr(error, 'stderr', '')}"
    return any(words in said for words in _OUT_OF_MEMORY)


def classify(error: BaseException) -> Failure:
    """Looks through the chain of causes: Dynamo and Inductor wrap the error that matters."""
    chain = causes(error)
    names = {type(link).__name__ for link in chain}
    text = "\n".join(str(link) for link in chain)
    first_line = (str(chain[-1]).strip().splitlines() or [type(chain[-1]).__name__])[0][:300]
    if any(map(out_of_memory, chain)):
        return Failure(
            "out_of_memory", f"{first_line}; give the worker more memory, or prepare fewer or smaller shapes"
        )
    if names & {"InvalidCxxCompiler"} or "Failed to find C compiler" in text or "No working C++ compiler" in text:
        return Failure(
            "no_compiler",
            "no C++ compiler found; install one (Debian: apt-get install g++; RHEL: dnf install gcc-c++) or set CXX",
        )
    if isinstance(error, (GraphBreakError, ConfigError)):
        return Failure("graph_break" if isinstance(error, GraphBreakError) else "config", first_line)
    if "CompilerProcessError" in names and len(chain) == 1:
        return Failure("compiler_died", f"{first_line}; give the machine more memory, or prepare fewer shapes")
    if "TritonMissing" in names:
        return Failure("no_compiler", "Triton is not installed; pip install triton")
    if any(isinstance(link, OSError) and link.errno in (28, 122) for link in chain):
        return Failure(
            "no_space", f"{first_line}; free space in the store or prune it: bentoml-compile artifacts prune"
        )
    if names & {"CppCompileError", "CalledProcessError", "CompilationError"} or "C++ compile error" in text:
        compiler = os.environ.get("CXX", "g++")
        return Failure(
            "compiler_failed", f"{compiler} failed: {_output(chain)}; see that it builds a program and TMPDIR has space"
        )
    return Failure("backend_error", f"{type(chain[-1]).__name__}: {first_line}; see TORCH_LOGS=+dynamo,+inductor")


def causes(error: BaseException) -> list[BaseException]:
    """The error and what lies behind it, the outermost first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        inner = getattr(current, "inner_exception", None)  # Dynamo's BackendCompilerFailed
        current = inner or current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return chain


def _output(chain: list[BaseException]) -> str:
    """What the compiler printed, without its command line of many kilobytes."""
    for link in reversed(chain):
        printed = getattr(link, "output", None) or getattr(link, "stderr", None)
        if not printed and "Output:" in str(link):  # Inductor's CppCompileError
            printed = str(link).split("Output:", 1)[1]
        text = printed.decode(errors="replace") if isinstance(printed, bytes) else str(printed or "")
        if text.strip():
            return one_line(text, 300)
    status = next((link.returncode for link in chain if isinstance(link, subprocess.CalledProcessError)), None)
    return f"exit status {status}" if status is not None else "without a word"
