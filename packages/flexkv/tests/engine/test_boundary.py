# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from flexkv.engine.boundary import LASTING, ErrorBoundary


def test_errors_end_here_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    boundary = ErrorBoundary()
    for _ in range(3):
        with boundary.guard("lookup", "it is a miss"):
            raise ValueError("broken by the test")
    assert boundary.failures == {"lookup": 3}
    assert len([r for r in caplog.records if "error in lookup" in r.message]) == 1


def fail(boundary: ErrorBoundary, times: int) -> None:
    for _ in range(times):
        with boundary.guard("polling", "it is polled later"):
            raise ValueError("broken by the test")


def test_errors_last_if_no_success_comes_between() -> None:
    boundary = ErrorBoundary()
    fail(boundary, LASTING - 1)
    with boundary.guard("polling", "it is polled later"):
        pass
    fail(boundary, LASTING - 1)
    assert not boundary.lasts("polling")
    with boundary.guard("lookup", "it is a miss"):
        pass
    fail(boundary, 1)
    assert boundary.lasts("polling")
    assert not boundary.lasts("lookup")


def test_what_is_given_up_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    boundary = ErrorBoundary()
    fail(boundary, LASTING)
    for _ in range(2):
        boundary.gave_up("polling", "nothing is loaded")
    assert list(boundary.given_up) == ["polling"]
    (text,) = [r.getMessage() for r in caplog.records if "consecutive" in r.message]
    assert f"{LASTING} consecutive errors in polling: nothing is loaded until" in text


def test_a_listener_learns_of_each_error() -> None:
    boundary = ErrorBoundary()
    heard = []
    boundary.after_error = lambda: heard.append(None)
    fail(boundary, 2)
    assert len(heard) == 2


def test_interrupts_pass() -> None:
    boundary = ErrorBoundary()
    with pytest.raises(KeyboardInterrupt), boundary.guard("lookup", "it is a miss"):
        raise KeyboardInterrupt
    assert not boundary.failures
