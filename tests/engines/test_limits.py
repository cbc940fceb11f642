from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from bentoml_compile.engines.limits import Interruption, ProcessEnds, TimeLimitReached, prompt_termination, time_limit

pytestmark = pytest.mark.timeout(120, method="thread")  # the other method takes SIGALRM for itself

LONG = 600.0  # seconds; a limit that no test reaches
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def spin() -> None:
    while True:
        time.sleep(0.01)


def test_nothing_happens_within_the_limit() -> None:
    with time_limit(60):
        result = 1 + 1
    assert result == 2
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_the_limit_interrupts_a_blocked_call() -> None:
    with pytest.raises(TimeLimitReached), time_limit(0.2):
        time.sleep(600)


def test_a_limit_that_is_reached_as_its_block_begins_leaves_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "setitimer", lambda *_: signal.raise_signal(signal.SIGALRM))
    with pytest.raises(TimeLimitReached), time_limit(LONG):
        pass
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_the_limit_passes_through_handlers_of_ordinary_errors() -> None:
    def stubborn() -> None:
        with contextlib.suppress(Exception):
            time.sleep(600)
        time.sleep(600)

    with pytest.raises(TimeLimitReached), time_limit(0.2):
        stubborn()


def test_the_limit_holds_in_another_thread_too() -> None:
    seen: list[BaseException] = []

    def run() -> None:
        try:
            with time_limit(0.2):
                spin()
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert [type(error) for error in seen] == [TimeLimitReached]


def test_a_program_that_uses_the_alarm_keeps_it() -> None:
    def ring(_signum: int, _frame: object) -> None: ...

    signal.signal(signal.SIGALRM, ring)
    try:
        with time_limit(60):
            assert signal.getsignal(signal.SIGALRM) is ring
        with pytest.raises(TimeLimitReached), time_limit(0.2):
            spin()
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_the_compilers_children_end_with_the_limit_and_others_live() -> None:
    earlier = subprocess.Popen(SLEEPER)
    compilers: list[subprocess.Popen[bytes]] = []

    def compile_for_long() -> None:
        compilers.append(subprocess.Popen(SLEEPER))
        signal.raise_signal(signal.SIGALRM)  # the limit is reached now

    try:
        with pytest.raises(TimeLimitReached), time_limit(LONG):
            compile_for_long()
        assert compilers[0].wait(60) == -signal.SIGKILL
        assert earlier.poll() is None
    finally:
        earlier.kill()
        earlier.wait()


def test_the_error_of_a_killed_compiler_counts_as_the_limit() -> None:
    def compile_for_long() -> None:
        try:
            subprocess.run(SLEEPER, check=True)
        except TimeLimitReached as limit:
            raise subprocess.CalledProcessError(-9, "g++") from limit

    with pytest.raises(TimeLimitReached), time_limit(0.5):
        compile_for_long()


TERMINATED = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background is started with it ignored
from bentoml_compile.engines.limits import prompt_termination
with prompt_termination():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    try:
        time.sleep(600)
    except Exception:
        time.sleep(600)
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_ends_the_process_and_its_compiler(signum: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINATED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.send_signal(signum)
    assert process.wait(60) == code
    ends = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):  # reaped between the two looks
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < ends, "the compiler outlived its worker"
            time.sleep(0.01)


def test_handlers_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with prompt_termination():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_outside_of_the_main_thread_signals_are_left_alone() -> None:
    seen: list[bool] = []

    def run() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with prompt_termination():
            seen.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert seen == [True]


def test_an_interrupted_thread_starts_no_other_compiler() -> None:
    """As Inductor does where one has failed."""
    interruptions: list[Interruption] = []
    raised: list[type[BaseException]] = []
    started, before = threading.Event(), set(psutil.Process().children())

    def compile_again() -> None:
        interruptions.append(Interruption())
        try:
            while True:
                with subprocess.Popen(SLEEPER):
                    started.set()
        except BaseException as error:
            raised.append(type(error))

    thread = threading.Thread(target=compile_again)
    thread.start()
    assert started.wait(60)
    interruptions[0](60)
    assert not thread.is_alive()
    assert raised == [ProcessEnds]
    _, left = psutil.wait_procs(set(psutil.Process().children()) - before, timeout=60)
    assert left == []
