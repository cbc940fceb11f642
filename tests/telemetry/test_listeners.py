from __future__ import annotations

import logging
import threading

import pytest

from bentoml_compile.listener import Call, Executable, Listener, Listeners
from tests.executable import Shape


class Recorder(Listener):
    def __init__(self) -> None:
        self.calls: list[Call] = []

    def called(self, call: Call) -> None:
        self.calls.append(call)


class Broken(Listener):
    def tracing(self) -> bool:
        raise RuntimeError("broken")

    def answered(self, executable: Executable, started_ns: int, ended_ns: int) -> None:
        raise RuntimeError("broken")


class Deaf(Recorder):
    hears_plain_calls = False


def test_a_listener_that_knows_only_calls_hears_of_a_plain_one_as_a_call() -> None:
    recorder, shape = Recorder(), Shape()
    Listeners([recorder]).answered(shape, 10, 20)
    [call] = recorder.calls
    assert (call.executable, call.engine, call.started_ns, call.ended_ns) == (shape, "aot", 10, 20)
    assert (call.compiles, call.fallback, call.error) == ((), None, None)


def test_a_listener_that_does_not_hear_plain_calls_is_not_told_of_them() -> None:
    deaf = Deaf()
    Listeners([deaf]).answered(Shape(), 10, 20)
    assert deaf.calls == []


def test_a_broken_listener_is_logged_once_and_the_others_still_hear(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    listeners = Listeners([Broken(), recorder])
    with caplog.at_level(logging.ERROR, "bentoml_compile"):
        assert listeners.tracing() is False
        for _ in range(3):
            listeners.answered(Shape(), 10, 20)
    assert len(recorder.calls) == 3
    said = [record.getMessage() for record in caplog.records if record.thread == threading.get_ident()]
    assert said == ["telemetry: Broken.tracing failed; serving goes on"]
