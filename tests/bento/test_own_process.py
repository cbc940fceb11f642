"""A function in a Python of its own, of which nothing is left when the command that waits for it is told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PATIENCE = 60.0  # seconds until something that should happen counts as failed

WAITING = """
import os, time
from functools import partial
from bentoml_compile.bento.own_process import in_own_process
in_own_process(partial(time.sleep, 600), "the sleeper", environment=os.environ, folder=".")
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_one_whose_command_is_told_to_end(tmp_path: Path, how: signal.Signals) -> None:
    command = subprocess.Popen([sys.executable, "-c", WAITING], env={**os.environ, "TMPDIR": str(tmp_path)})
    ends = time.monotonic() + PATIENCE
    while not list(tmp_path.glob("*/job")) or not psutil.Process(command.pid).children():
        assert time.monotonic() < ends
        time.sleep(0.05)
    [child] = psutil.Process(command.pid).children()
    command.send_signal(how)
    assert command.wait(PATIENCE) != 0
    child.wait(PATIENCE)
    assert list(tmp_path.iterdir()) == []
