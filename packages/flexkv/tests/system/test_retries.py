# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading

import pytest

from flexkv.system import retries
from flexkv.system.retries import Failures, Retried
from flexkv.tiers.disk import upkeep
from packages.conftest import PATIENCE_SECONDS

LONG = 1100
"""More failures in a row than a float has doublings."""


def test_each_failure_doubles_the_pause_up_to_the_longest() -> None:
    failures, pauses = Failures(), []
    for _ in range(9):
        failures.note(OSError())
        pauses.append(failures.pause)
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    failures.count = 1 << 40
    assert failures.pause == 5.0


def test_a_reset_reaches_a_store_that_was_gone_for_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_RETRY_SECONDS", "_LONGEST_RETRY_SECONDS"):
        monkeypatch.setattr(retries, name, 0.0)
    done = threading.Event()
    calls = 0

    def renew() -> None:
        nonlocal calls
        calls += 1
        if calls <= LONG:
            raise OSError("the store is gone")
        done.set()

    each = Retried("test", renew, print, at_close=True)
    each.begin()
    assert done.wait(PATIENCE_SECONDS), f"no try after {calls}"
    assert each.close(PATIENCE_SECONDS)


def test_each_new_error_is_reported_once_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_RETRY_SECONDS", "_LONGEST_RETRY_SECONDS"):
        monkeypatch.setattr(retries, name, 0.0)
    errors = iter(["refused", "refused", "denied", "denied", "refused"])
    done = threading.Event()
    reported: list[str] = []

    def work() -> None:
        text = next(errors, None)
        if text is not None:
            raise OSError(text)
        done.set()

    each = Retried("test", work, reported.append, at_close=False)
    each.begin()
    assert done.wait(PATIENCE_SECONDS)
    assert each.close(PATIENCE_SECONDS)
    assert reported == ["refused", "denied", "refused"]


@pytest.mark.parametrize("at_close", [False, True])
def test_the_end_is_the_last_try_of_work_that_needs_one(at_close: bool) -> None:
    tries: list[str] = []

    def fail() -> None:
        tries.append("failed")
        raise OSError("gone")

    each = Retried("test", fail, lambda _: each.begin_close(), at_close=at_close)
    each.begin()
    assert each.await_try(PATIENCE_SECONDS)
    assert each.close(PATIENCE_SECONDS)
    assert len(tries) == 1 + at_close


def test_work_that_fails_too_often_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_RETRY_SECONDS", "_LONGEST_RETRY_SECONDS"):
        monkeypatch.setattr(retries, name, 0.0)
    tries: list[str] = []

    def fail() -> None:
        tries.append("failed")
        if len(tries) == 3:
            last.set()
        raise OSError("gone")

    last = threading.Event()
    each = Retried("test", fail, print, at_close=False, most_tries=3)
    each.begin()
    assert last.wait(PATIENCE_SECONDS)
    assert each.close(PATIENCE_SECONDS)
    assert len(tries) == 3


def test_upkeep_goes_on_after_a_disk_was_full_for_hours() -> None:
    calls = 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        raise OSError("the disk is full")

    task = upkeep._Task(fail, 1.0, "the counters of %s cannot be written (%s)")
    for _ in range(LONG):
        task.wanted = True
        task.run("folder", last=False)
    assert calls == LONG
    assert task.wanted
