"""Uploads beside serving: tried again, told of once, and waited for by whoever likes."""

from __future__ import annotations

import logging
import threading

import pytest

from bentoml_compile.artifacts.store import Store
from bentoml_compile.artifacts.uploads import Uploads
from tests.artifacts.faulty_proxy import Fault, FaultyProxy
from tests.artifacts.remotes import FINGERPRINT, HANG, KEY, OTHER, make, remote


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and "model" in record.getMessage()
    ]


def test_what_is_added_is_uploaded_in_turn(
    uri: str, there: Store, here: Store, caplog: pytest.LogCaptureFixture
) -> None:
    uploads, told = Uploads(), list[tuple[int, Exception | None]]()
    assert uploads.wait(HANG)  # for nothing
    builder = remote(uri, key=KEY)
    uploads.add(builder, make(there), lambda error: told.append((1, error)))
    uploads.add(builder, make(there, OTHER), lambda error: told.append((2, error)))
    assert uploads.wait(HANG)
    assert told == [(1, None), (2, None)]
    assert remote(uri).lookup("encoder", FINGERPRINT, here).artifact is not None
    assert remote(uri).lookup("encoder", OTHER, here).artifact is not None
    assert warnings(caplog) == []


def test_a_failure_is_tried_again(
    bucket: str, there: Store, proxy: FaultyProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.fault = Fault("403", when="PUT", times=3)
    uploads, told = Uploads(pause=0.01), list[Exception | None]()
    uploads.add(remote(bucket, key=KEY), make(there), told.append)
    assert uploads.wait(HANG)
    assert told == [None]
    assert proxy.fault.times == 0
    assert warnings(caplog) == []


def test_a_failure_that_stays_is_one_warning(
    bucket: str, there: Store, proxy: FaultyProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.fault = Fault("403", when="PUT")
    uploads, told = Uploads(attempts=3, pause=0.01), list[Exception | None]()
    uploads.add(remote(bucket, key=KEY), make(there), told.append)
    assert uploads.wait(HANG)
    assert [type(error) for error in told] == [PermissionError]
    [warning] = warnings(caplog)
    assert "'encoder'" in warning
    assert "a bad day" in warning
    assert bucket in warning
    assert len([line for line in proxy.requests if line.startswith("PUT")]) == 3
    proxy.fault = None
    uploads.add(remote(bucket, key=KEY), make(there, OTHER), told.append)  # the queue goes on
    assert uploads.wait(HANG)
    assert told[1:] == [None]


def test_what_will_always_fail_is_tried_once(there: Store, uri: str, caplog: pytest.LogCaptureFixture) -> None:
    uploads, told = Uploads(pause=HANG), list[Exception | None]()
    uploads.add(remote(uri, key=KEY), make(there, engine="jit"), told.append)
    uploads.add(remote(uri), make(there), told.append)
    assert uploads.wait(HANG)
    assert ["aot" in str(told[0]), "key" in str(told[1])] == [True, True]
    assert len(warnings(caplog)) == 2


def test_waiting_has_an_end(bucket: str, there: Store, proxy: FaultyProxy) -> None:
    proxy.fault = Fault("silence")
    uploads = Uploads(attempts=1)
    uploads.add(remote(bucket, key=KEY), make(there))
    assert not uploads.wait(0.1)
    proxy.close()
    assert uploads.wait(HANG)  # or its warning would come in another test


def test_a_callback_that_fails_does_not_stop_the_next(uri: str, there: Store) -> None:
    uploads, told = Uploads(), threading.Event()

    def fail(error: Exception | None) -> None:
        raise ZeroDivisionError

    uploads.add(remote(uri, key=KEY), make(there), fail)
    uploads.add(remote(uri, key=KEY), make(there, OTHER), lambda error: told.set())
    assert uploads.wait(HANG)
    assert told.is_set()
