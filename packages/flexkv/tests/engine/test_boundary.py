# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from flexkv.engine.boundary import LASTING, Edge


def test_errors_end_here_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    edge = Edge()
    for _ in range(3):
        with edge.guard("lookup", "it is a miss"):
            raise ValueError("broken by the test")
    assert edge.failures == {"lookup": 3}
    assert len([r for r in caplog.records if "error in lookup" in r.message]) == 1


def fail(edge: Edge, times: int) -> None:
    for _ in range(times):
        with edge.guard("polling", "it is polled later"):
            raise ValueError("broken by the test")


def test_errors_last_if_no_success_comes_between() -> None:
    edge = Edge()
    fail(edge, LASTING - 1)
    with edge.guard("polling", "it is polled later"):
        pass
    fail(edge, LASTING - 1)
    assert not edge.lasts("polling")
    with edge.guard("lookup", "it is a miss"):
        pass
    fail(edge, 1)
    assert edge.lasts("polling")
    assert not edge.lasts("lookup")


def test_what_is_given_up_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    edge = Edge()
    fail(edge, LASTING)
    for _ in range(2):
        edge.gave_up("polling", "nothing is loaded")
    assert list(edge.given_up) == ["polling"]
    (text,) = [r.getMessage() for r in caplog.records if "consecutive" in r.message]
    assert f"{LASTING} consecutive errors in polling: nothing is loaded until" in text


def test_a_listener_learns_of_each_error() -> None:
    edge = Edge()
    heard = []
    edge.after_error = lambda: heard.append(None)
    fail(edge, 2)
    assert len(heard) == 2


def test_interrupts_pass() -> None:
    edge = Edge()
    with pytest.raises(KeyboardInterrupt), edge.guard("lookup", "it is a miss"):
        raise KeyboardInterrupt
    assert not edge.failures
