# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from flexkv.tiers.disk import health
from flexkv.tiers.disk.health import FAILURES, PAUSE_SECONDS, Health
from packages.conftest import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Clock:
    monkeypatch.setattr(health, "time", clock)
    return clock


def fail(device: Health, times: int) -> list[bool]:
    """Whether each of so many failures began a pause."""
    return [device.note(failed=True) for _ in range(times)]


def test_a_pause_begins_with_the_last_of_so_many_failures_in_a_row(clock: Clock) -> None:
    device = Health()
    assert fail(device, FAILURES - 1) == [False] * (FAILURES - 1)
    assert device.good
    assert fail(device, 1) == [True]
    assert not device.good


def test_a_success_between_failures_begins_the_count_anew(clock: Clock) -> None:
    device = Health()
    for _ in range(3):
        assert fail(device, FAILURES - 1) == [False] * (FAILURES - 1)
        assert not device.note(failed=False)
    assert device.good


def test_a_pause_ends(clock: Clock) -> None:
    device = Health()
    fail(device, FAILURES)
    clock.skip(PAUSE_SECONDS - 1)
    assert not device.good
    clock.skip(1)
    assert device.good
    # A device that is still broken gets as many tries again, no more.
    assert fail(device, FAILURES) == [False] * (FAILURES - 1) + [True]
    assert not device.good


def test_a_success_ends_a_pause(clock: Clock) -> None:
    device = Health()
    fail(device, FAILURES)
    device.note(failed=False)
    assert device.good
