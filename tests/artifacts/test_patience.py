"""Patience: a call that hangs is left alone, and what it brings too late is given back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

from bentoml_compile.artifacts.patience import Patience
from tests.artifacts.remotes import HANG, poll


def test_a_result_or_an_error_comes_back() -> None:
    assert Patience(HANG).call(lambda is_abandoned: is_abandoned()) is False
    with pytest.raises(ZeroDivisionError):
        Patience(HANG).call(lambda is_abandoned: 1 / 0)


def test_a_late_result_is_discarded_and_nothing_is_asked_again() -> None:
    go, told, discarded = threading.Event(), threading.Event(), list[str]()

    def hang(is_abandoned: Callable[[], bool]) -> str:
        go.wait()
        if is_abandoned():
            told.set()
        return "late"

    patience = Patience(0.1)
    with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
        patience.call(hang, discarded.append)
    with pytest.raises(TimeoutError):
        patience.call(lambda is_abandoned: discarded.append("asked"))
    patience.renew()
    with pytest.raises(TimeoutError):
        patience.call(lambda is_abandoned: discarded.append("asked"))
    go.set()
    poll(lambda: discarded == ["late"], "not discarded")
    assert told.is_set()


def test_an_error_that_comes_too_late_is_nobodys() -> None:
    go, ended = threading.Event(), threading.Event()

    def fail(is_abandoned: Callable[[], bool]) -> None:
        go.wait()
        ended.set()
        raise ZeroDivisionError

    with pytest.raises(TimeoutError):
        Patience(0.1).call(fail)
    go.set()
    assert ended.wait(HANG)


def test_all_calls_together_have_the_time_until_it_is_renewed() -> None:
    patience, pause, hanging = Patience(0.4), threading.Event(), threading.Event()
    for _ in range(4):
        with contextlib.suppress(TimeoutError):
            patience.call(lambda is_abandoned: pause.wait(0.1))
    assert patience._left <= 0.0
    with pytest.raises(TimeoutError):
        patience.call(lambda is_abandoned: hanging.wait(HANG))
    hanging.set()
    patience = Patience(HANG)
    patience.call(lambda is_abandoned: pause.wait(0.1))
    assert patience._left < HANG
    patience.renew()
    assert patience._left == HANG


def test_what_was_given_up_is_not_asked_by_others_of_the_process_until_it_is_forgiven() -> None:
    asked: list[str] = []
    hanging = threading.Event()
    with pytest.raises(TimeoutError):
        Patience(0.1, "bucket").call(lambda is_abandoned: hanging.wait(HANG))
    hanging.set()
    other = Patience(HANG, "bucket")
    with pytest.raises(TimeoutError, match="no answer within"):
        other.call(lambda is_abandoned: asked.append("the same"))
    assert Patience(HANG, "another").call(lambda is_abandoned: "asked") == "asked"
    other.forgive()
    other.call(lambda is_abandoned: asked.append("the same, by who waits anyway"))
    assert asked == ["the same, by who waits anyway"]
