"""A function in a Python of its own, of which nothing is left when the command that waits for it is told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import PATIENCE, wait_for

WAITING = """
import os, time
from functools import partial
from bentoml_compile.bento.own_process import in_own_process
in_own_process(partial(time.sleep, 600), "the sleeper", environment=os.environ, folder=".")
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_one_whose_command_is_told_to_end(tmp_path: Path, how: signal.Signals) -> None:
    command = subprocess.Popen([sys.executable, "-c", WAITING], env={**os.environ, "TMPDIR": str(tmp_path)})
    wait_for(lambda: any(tmp_path.glob("*/job")) and bool(psutil.Process(command.pid).children()))
    [child] = psutil.Process(command.pid).children()
    command.send_signal(how)
    assert command.wait(PATIENCE) != 0
    child.wait(PATIENCE)
    assert list(tmp_path.iterdir()) == []


TOLD_AT_ONCE = """
import os, signal, subprocess, sys
from bentoml_compile.bento import own_process

class Told(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        print(self.pid, flush=True)
        os.kill(os.getpid(), int(sys.argv[1]))

own_process.subprocess.Popen = Told
own_process.in_own_process(signal.pause, "the sleeper", environment=os.environ, folder=".")
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_one_whose_command_is_told_to_end_before_it_waits(
    tmp_path: Path, how: signal.Signals
) -> None:
    command = [sys.executable, "-c", TOLD_AT_ONCE, str(int(how))]
    done = subprocess.run(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, check=False)
    assert done.returncode != 0
    wait_for(lambda: is_over(int(done.stdout)))
    assert list(tmp_path.iterdir()) == []


def is_over(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
