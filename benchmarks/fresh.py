"""Runs one function in a process of its own: what a process has imported, opened or cached would tell on the next.

    fresh.run("benchmarks.boot_ways:boot", "minilm", "cold", directory, env={"TMPDIR": ...})

Started as `python -m benchmarks.fresh MODULE:FUNCTION ARGUMENT...`; arguments are text, the last line printed is JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
DEADLINE = 1800.0  # seconds for one process


def run(function: str, *arguments: object, env: Mapping[str, str]) -> Any:
    """What the function returned, as JSON knows it.

    Raises:
        RuntimeError: the process failed; its last lines are in the message.
    """
    command = [sys.executable, "-m", "benchmarks.fresh", function, *map(str, arguments)]
    child = subprocess.run(
        command,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd=CHECKOUT,
        check=False,
    )
    if child.returncode:
        raise RuntimeError(f"{' '.join(command[3:])} ended with {child.returncode}:\n{child.stderr[-3000:]}")
    return json.loads(child.stdout.splitlines()[-1])


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(*sys.argv[2:])))


if __name__ == "__main__":
    main()
