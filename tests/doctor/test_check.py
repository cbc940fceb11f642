"""A check ends in findings, whatever it does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from bentoml_compile.doctor import check
from bentoml_compile.doctor.check import Check, Finding, ok
from tests.doctor.findings import expect, only
from tests.waiting import wait_for


def test_a_check_that_raises_ends_in_a_problem_after_what_it_has_found() -> None:
    def look() -> Iterator[Finding]:
        yield ok("so far")
        raise SystemExit("over")

    first, last = Check("any", look, 60).run()
    assert first.text == "so far"
    expect(last, "problem", "SystemExit: over", "report")


def test_a_check_that_hangs_is_left_behind() -> None:
    ends = threading.Event()
    try:
        finding = only(Check("any", lambda: [ok(str(ends.wait()))], 0.1, "look at it").run())
        expect(finding, "problem", "no answer within 0.1 s", "look at it")
        assert check.left_behind()
    finally:
        ends.set()


def test_a_check_that_ends_after_its_time_adds_nothing_to_what_was_found() -> None:
    goes_on = threading.Event()

    def look() -> Iterator[Finding]:
        yield ok("so far")
        goes_on.wait()
        yield ok("too late")

    found = Check("any", look, 0.1).run()
    texts = [finding.text for finding in found]
    goes_on.set()
    wait_for(lambda: not check.left_behind())
    assert [finding.text for finding in found] == texts
    assert texts[-1] == "no answer within 0.1 s"
