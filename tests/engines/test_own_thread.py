"""One thread for all calls: order, what is carried over to it, interruptions, and its end."""

from __future__ import annotations

import contextvars
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from bentoml_compile.engines.dynamo import GuardMiss
from bentoml_compile.engines.limits import TimeLimitReached, time_limit
from bentoml_compile.engines.own_thread import (
    CallInterrupted,
    OwnThread,
    _Call,
    _set_async_exception,
    last_wait,
)
from bentoml_compile.engines.thread_state import ThreadState

pytestmark = pytest.mark.timeout(1200, method="thread")  # the other method takes SIGALRM for itself

DEADLINE = 300.0


@pytest.fixture
def own() -> Iterator[OwnThread]:
    thread = OwnThread("encoder")
    yield thread
    thread.close()


class Gate:
    """A function that runs on the thread until it is let go."""

    def __init__(self) -> None:
        self.entered, self.left = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        while not self.left.wait(0.01):  # Python code, so that it can be interrupted
            pass
        return "let go"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def waiting(own: OwnThread) -> int:
    return own._calls.qsize()


def name_of_thread() -> str:
    return threading.current_thread().name


# calls


def test_every_call_runs_on_the_one_thread(own: OwnThread) -> None:
    with ThreadPoolExecutor(4) as callers:
        threads = set(callers.map(lambda _: own.run(threading.get_ident), range(40)))
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert own.run(name_of_thread) == "torch_compile-encoder"


def test_calls_run_in_the_order_of_their_arrival(own: OwnThread) -> None:
    order: list[int] = []
    gate = Gate()
    with ThreadPoolExecutor(8) as callers:
        callers.submit(own.run, gate)
        gate.entered.wait(DEADLINE)
        for number in range(7):
            callers.submit(own.run, order.append, number)
            until(lambda number=number: waiting(own) == number + 1)  # type: ignore[misc]
        gate.left.set()
    assert order == list(range(7))


def test_arguments_results_and_exceptions_pass(own: OwnThread) -> None:
    assert own.run(divmod, 7, 2) == (3, 1)
    assert own.run(sorted, [1, 3, 2], reverse=True) == [3, 2, 1]
    with pytest.raises(ZeroDivisionError):
        own.run(divmod, 1, 0)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, TimeoutError, GeneratorExit])
def test_an_exception_of_any_kind_is_the_callers_and_the_thread_goes_on(
    own: OwnThread, kind: type[BaseException]
) -> None:
    def end() -> None:
        raise kind("7")

    with pytest.raises(kind, match="7"):
        own.run(end)
    assert own.run(name_of_thread) == "torch_compile-encoder"


def test_a_call_from_the_thread_itself_runs_at_once(own: OwnThread) -> None:
    assert own.run(own.run, own.run, name_of_thread) == "torch_compile-encoder"


def test_a_failed_call_keeps_no_tensor(own: OwnThread) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ValueError

    tensor = torch.ones(3)
    left = weakref.ref(tensor)
    gc.disable()
    try:
        with pytest.raises(ValueError):  # noqa: PT011
            own.run(fail, tensor)
        del tensor
        until(lambda: left() is None)
    finally:
        gc.enable()


def test_it_is_told_how_long_a_call_waited(own: OwnThread) -> None:
    def waited_for() -> tuple[int, int, float]:
        own.run(int)
        return last_wait.arrived_ns, last_wait.began_ns, last_wait.seconds

    gate = Gate()
    with ThreadPoolExecutor(2) as callers:
        callers.submit(own.run, gate)
        gate.entered.wait(DEADLINE)
        waiter = callers.submit(waited_for)
        until(lambda: waiting(own) == 1)
        still_waiting = time.time_ns()
        gate.left.set()
    arrived, began, seconds = waiter.result()
    assert arrived < still_waiting < began
    assert seconds == (began - arrived) / 1e9
    assert last_wait.began_ns == 0 or last_wait.began_ns < arrived  # this thread's own last call


# what is carried over


def test_the_opentelemetry_context_and_other_context_variables_are_the_callers(own: OwnThread) -> None:
    variable = contextvars.ContextVar("variable", default="")
    variable.set("set")
    with TracerProvider().get_tracer("test").start_as_current_span("request") as span:
        assert own.run(trace.get_current_span) is span
    assert own.run(trace.get_current_span) is not span
    assert own.run(variable.get) == "set"


def state() -> dict[str, Any]:
    return {
        "inference": torch.is_inference_mode_enabled(),
        "grad": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast on cuda": (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "dynamo": torch._dynamo.config.recompile_limit,
        "inductor": torch._inductor.config.max_autotune,
    }


def test_torchs_state_is_the_callers(own: OwnThread) -> None:
    plain = own.run(state)
    assert plain == state()
    with torch.inference_mode():
        assert own.run(state) == state() != plain
        with torch.inference_mode(False), torch.no_grad():
            assert own.run(state) == state() != plain
        with torch.enable_grad():
            assert own.run(state) == state() != plain
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        assert own.run(state) == state() != plain
    with torch._dynamo.config.patch(recompile_limit=77), torch._inductor.config.patch(max_autotune=True):
        assert own.run(state) == state() != plain
    torch.set_default_dtype(torch.float64)
    try:
        assert own.run(state) == state() != plain
    finally:
        torch.set_default_dtype(torch.float32)
    assert own.run(state) == plain


def test_torchs_number_of_threads_is_each_threads_own(own: OwnThread) -> None:
    """And is not carried over: that would set it for the process. A guard of Dynamo's, so that it had better stay."""
    before = torch.get_num_threads()
    assert own.run(torch.get_num_threads) == before
    torch.set_num_threads(before + 1)
    try:
        assert own.run(torch.get_num_threads) == before
    finally:
        torch.set_num_threads(before)


def test_a_caller_in_a_torch_mode_is_refused(own: OwnThread) -> None:
    with torch.device("meta"), pytest.raises(GuardMiss, match="Mode"):
        own.run(int)
    with torch._subclasses.FakeTensorMode(), pytest.raises(GuardMiss, match="Mode"):
        own.run(int)


def test_a_caller_in_a_functorch_transform_is_refused(own: OwnThread) -> None:
    with pytest.raises(GuardMiss, match="functorch"):
        torch.vmap(lambda x: own.run(lambda: x + 1))(torch.ones(2))


def test_the_default_device_of_the_thread_that_made_it_holds_for_all_callers() -> None:
    with torch.device("meta"):
        own = OwnThread("encoder")
        assert own.run(torch.ones, 1).is_meta
    assert own.run(torch.ones, 1).is_meta
    own.close()


# interruptions


def limited(own: OwnThread, function: Callable[[], Any]) -> None:
    with pytest.raises(TimeLimitReached), time_limit(2 * DEADLINE):
        own.run(function)


def interrupted_in_main(own: OwnThread, function: Callable[[], Any], reached: threading.Event) -> None:
    def ring() -> None:
        assert reached.wait(DEADLINE)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    with ThreadPoolExecutor(1) as ringing:
        ringing.submit(ring)
        limited(own, function)


def interrupted_in_a_thread(own: OwnThread, function: Callable[[], Any], reached: threading.Event) -> None:
    class Timer(threading.Timer):
        def run(self) -> None:
            assert reached.wait(DEADLINE)
            self.function()

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as callers:
        patch.setattr(threading, "Timer", Timer)
        callers.submit(limited, own, function).result()  # by an exception that is set in it


@pytest.mark.parametrize("interrupted", [interrupted_in_main, interrupted_in_a_thread])
def test_a_caller_that_is_interrupted_interrupts_its_running_call(own: OwnThread, interrupted: Any) -> None:
    ended: list[BaseException] = []
    reached = threading.Event()

    def run() -> None:
        try:
            reached.set()
            Gate()()
        except BaseException as error:
            ended.append(error)
            raise

    interrupted(own, run, reached)
    assert [type(error) for error in ended] == [CallInterrupted]
    assert own.run(int) == 0


@pytest.mark.parametrize("interrupted", [interrupted_in_main, interrupted_in_a_thread])
def test_a_call_whose_caller_was_interrupted_while_it_waited_is_not_run(own: OwnThread, interrupted: Any) -> None:
    ran: list[int] = []
    gate, reached = Gate(), threading.Event()

    def reach() -> None:
        until(lambda: waiting(own) == 1)
        reached.set()

    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(own.run, gate)
        gate.entered.wait(DEADLINE)
        callers.submit(reach)
        interrupted(own, lambda: ran.append(1), reached)
        gate.left.set()
        assert first.result(DEADLINE) == "let go"
    own.run(int)
    assert not ran


def test_a_caller_that_is_interrupted_before_it_waits_interrupts_its_call_too(own: OwnThread) -> None:
    """The call runs as soon as it is in the queue."""
    gate, ended = Gate(), list[str]()

    class Interrupting(type(own._calls)):  # type: ignore[misc]
        def put(self, call: Any) -> None:
            own_calls.put(call)
            assert gate.entered.wait(DEADLINE)
            raise KeyboardInterrupt

    def run() -> None:
        try:
            gate()
            ended.append("by itself")
        except CallInterrupted:
            ended.append("interrupted")
            raise

    own_calls, own._calls = own._calls, Interrupting()
    with pytest.raises(KeyboardInterrupt):
        own.run(run)
    own._calls = own_calls
    found = list(ended)
    gate.left.set()
    assert own.run(int) == 0
    assert found == ["interrupted"]


def test_an_interruption_that_comes_as_the_call_ends_does_not_reach_the_next() -> None:
    gate, after = Gate(), list[int]()
    call = _Call(gate, ThreadState.of_this_thread())

    def execute() -> None:
        call.execute()
        after.append(sum(range(10)))  # the next call

    thread = threading.Thread(target=execute)
    thread.start()
    gate.entered.wait(DEADLINE)
    assert thread.ident is not None
    with call._interrupting:  # as in _give_up
        gate.left.set()
        until(lambda: "_end_interruption" in {frame.f_code.co_name for frame in frames_of(thread)})
        call._given_up = True
        _set_async_exception(thread.ident, CallInterrupted)
    thread.join(DEADLINE)
    assert after == [45]
    with pytest.raises(CallInterrupted):
        call.wait()


def frames_of(thread: threading.Thread) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def test_an_interruption_leaves_nothing_pending_in_the_interpreter() -> None:
    """CPython 3.11 hangs at a function's entry under a profile function if it believes that one is to be raised."""
    program = """
import sys, threading
from bentoml_compile.engines.limits import TimeLimitReached, time_limit
from bentoml_compile.engines.own_thread import OwnThread
own = OwnThread("encoder")
own.run(int)
try:
    with time_limit(0.2):
        own.run(lambda: [None for _ in iter(int, 1)])
except TimeLimitReached:
    sys.setprofile(lambda *_: None)
    own.run(int)
    print("end")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


# the end


def test_close_waits_for_what_runs_and_refuses_what_waits(own: OwnThread) -> None:
    gate = Gate()
    with ThreadPoolExecutor(3) as callers:
        running = callers.submit(own.run, gate)
        gate.entered.wait(DEADLINE)
        queued = callers.submit(own.run, int)
        until(lambda: waiting(own) == 1)
        closing = callers.submit(own.close)
        with pytest.raises(RuntimeError, match="'encoder' was closed"):
            queued.result(DEADLINE)
        assert not closing.done()
        gate.left.set()
        closing.result(DEADLINE)
        assert running.result(DEADLINE) == "let go"
    assert not own._thread.is_alive()
    with pytest.raises(RuntimeError, match="'encoder' was closed"):
        own.run(int)
    own.close()


def test_the_thread_can_close_itself(own: OwnThread) -> None:
    own.run(own.close)
    own._thread.join(DEADLINE)
    assert not own._thread.is_alive()


def test_the_thread_ends_when_nobody_holds_it() -> None:
    own = OwnThread("encoder")
    own.run(int)
    thread = own._thread
    del own
    gc.collect()
    thread.join(DEADLINE)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "ending", ["own.run(int)", "threading.Thread(target=own.run, args=(run,), daemon=True).start()"]
)
def test_neither_an_idle_nor_a_busy_thread_keeps_the_process_from_ending(ending: str) -> None:
    program = f"""
import threading, time
from bentoml_compile.engines.own_thread import OwnThread
def run():
    entered.set()
    time.sleep(10_000)
entered, own = threading.Event(), OwnThread("encoder")
{ending}
if "run," in {ending!r}:
    entered.wait()
print("end")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_fork_is_told_that_the_thread_is_not_there(own: OwnThread) -> None:
    own.run(int)
    if (child := os.fork()) == 0:
        try:
            own.run(int)
        except RuntimeError as error:
            own.close()
            os._exit(7 if "compile after the fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert own.run(int) == 0
