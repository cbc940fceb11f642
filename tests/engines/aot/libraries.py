"""Small libraries for tests, compiled with the engine's own settings, and what a child process needs to open them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

WORDS, WIDTH = 11, 64
LONG = 2000  # rows of Long's matrix
SETTINGS = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
    "aot_inductor.precompile_headers": False,
    "cpp.threads": 1,  # an index out of range is then an error, not the end of the process
}


class Words(nn.Module):
    """An index, a matrix product, small weights of every kind, and an output that is None."""

    scale: torch.Tensor
    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("offset", torch.tensor([1, 2, 3]), persistent=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        hidden = torch.tanh(self.head(self.embedding(ids) * mask.unsqueeze(-1))) * self.scale
        return hidden, None, hidden.sum(-1) + self.offset.sum()


class Long(nn.Module):
    """One call takes a few hundred milliseconds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(x @ x)
        return x


class Drawn(nn.Module):
    """multinomial has no C function: only the binding can run it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(x, 2)


def words(seed: int = 0) -> Words:
    torch.manual_seed(seed)
    return Words().eval().requires_grad_(False)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def word_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(10).reshape(2, 5) % WORDS, torch.ones(2, 5)


def compile_library(model: nn.Module, inputs: tuple[torch.Tensor, ...], directory: Path, name: str) -> Path:
    """Compiles, and unpacks the library (with the .json that goes with it, if there is one) into `directory`."""
    with torch.no_grad():
        program = torch.export.export(model, inputs, strict=False)
        archive = torch._inductor.aoti_compile_and_package(
            program, package_path=str(directory / f"{name}.pt2"), inductor_configs=SETTINGS
        )
    with zipfile.ZipFile(archive) as package:
        for member in package.namelist():
            for suffix in (".wrapper.so", ".wrapper.json"):
                if member.endswith(suffix):
                    (directory / name).with_suffix(Path(suffix).suffix).write_bytes(package.read(member))
    return (directory / name).with_suffix(".so")


@dataclass(frozen=True, slots=True)
class Finished:
    """A child process that has ended. `said`: the JSON of its last line, None if it did not get there."""

    code: int
    said: Any
    errors: str


def in_child(code: str, *arguments: object, env: dict[str, str] | None = None, deadline: float = 600) -> Finished:
    """Runs Python code in a process of its own, so that its end by a signal is seen as one."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    child = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=deadline, cwd=Path(__file__).parents[3], check=False
    )
    lines = child.stdout.splitlines()
    return Finished(child.returncode, json.loads(lines[-1]) if lines else None, child.stderr[-2000:])


def growth(steps: Mapping[str, Callable[[], object]], plan: Mapping[str, int]) -> dict[str, int]:
    """Bytes that this process grew by in each step of the plan, taken so many times; for a child process."""
    process, grown = psutil.Process(), {}
    for name, times in plan.items():
        for _ in range(max(20, times // 10)):
            steps[name]()
        before = process.memory_info().rss
        for _ in range(times):
            steps[name]()
        grown[name] = process.memory_info().rss - before
    return grown


def growth_in_child(
    code: str, library: Path, times: Mapping[str, int], env: dict[str, str] | None = None
) -> dict[str, int]:
    """What the code prints by `growth`, given the library and the plan."""
    child = in_child(code, library, json.dumps(times), env=env, deadline=3000)
    assert child.code == 0, child.errors
    return child.said


def close_under_load(make: Callable[[Words], Any], *, threads: int, rounds: int = 20) -> list[Any]:
    """Threads call what `make` opened for a model without a pause, until it is closed under them; for a child process.

    Returns:
        Whether every answer was right, how many calls were refused, with what messages, and what else was raised.
    """
    right: list[bool] = []
    refused: list[str] = []
    failed: list[str] = []
    for _ in range(rounds):
        model, inputs = words(), word_inputs()
        opened = make(model)
        expected, started = model(*inputs)[0], threading.Barrier(threads + 1)

        def call_until_closed(opened: Any = opened, expected: Any = expected, started: Any = started) -> None:
            started.wait()
            try:
                while True:
                    right.append(torch.allclose(opened.run(word_inputs())[0], expected, atol=1e-5))
            except RuntimeError as error:
                refused.append(str(error))
            except BaseException as error:
                failed.append(repr(error))

        callers = [threading.Thread(target=call_until_closed) for _ in range(threads)]
        for caller in callers:
            caller.start()
        started.wait()
        while not right:
            pass
        opened.close()
        del model
        for caller in callers:
            caller.join()
    return [all(right), len(refused), sorted(set(refused)), failed]
