# SPDX-License-Identifier: Apache-2.0
"""When a circuit opens, is probed and closes."""

from __future__ import annotations

import pytest

from flexkv.tiers import circuit
from flexkv.tiers.circuit import FAILURES, PAUSE_SECONDS, Circuit, CircuitState
from packages.conftest import Clock, StillClock

BUDGET = 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = StillClock()
    monkeypatch.setattr(circuit, "time", made)
    return made


def fail(device: Circuit, times: int) -> list[bool]:
    """Whether each of so many failed jobs opened the circuit."""
    opened = []
    for _ in range(times):
        device.begin()
        opened.append(device.end(failed=True))
    return opened


def opened() -> Circuit:
    device = Circuit(BUDGET)
    fail(device, FAILURES)
    return device


def test_the_last_of_so_many_failures_in_a_row_opens_a_circuit(clock: Clock) -> None:
    device = Circuit(BUDGET)
    assert fail(device, FAILURES - 1) == [False] * (FAILURES - 1)
    assert (device.allows, device.state) == (True, CircuitState.CLOSED)
    assert fail(device, 1) == [True]
    assert (device.allows, device.state, device.openings) == (False, CircuitState.OPEN, 1)


def test_a_success_between_failures_begins_the_count_again(clock: Clock) -> None:
    device = Circuit(BUDGET)
    for _ in range(3):
        assert fail(device, FAILURES - 1) == [False] * (FAILURES - 1)
        assert not device.end(failed=False)
    assert device.allows


def test_jobs_over_their_budget_open_a_circuit(clock: Clock) -> None:
    device = Circuit(BUDGET)
    for _ in range(FAILURES - 1):
        assert not device.end(failed=False, seconds=2 * BUDGET)
    assert not device.end(failed=False, seconds=BUDGET)
    for _ in range(FAILURES - 1):
        assert not device.end(failed=False, seconds=2 * BUDGET)
    assert device.end(failed=False, seconds=2 * BUDGET)
    assert device.state is CircuitState.OPEN


def test_after_a_pause_one_caller_probes(clock: Clock) -> None:
    device = opened()
    clock.skip(PAUSE_SECONDS - 1)
    assert not device.allows
    clock.skip(1)
    assert (device.allows, device.state) == (True, CircuitState.PROBING)
    device.begin(3)
    assert (device.allows, device.state) == (False, CircuitState.PROBING)
    assert not device.end(failed=False, seconds=BUDGET)
    assert (device.allows, device.state) == (True, CircuitState.CLOSED)
    # What opened it before counts no more.
    assert fail(device, FAILURES - 1) == [False] * (FAILURES - 1)


@pytest.mark.parametrize(("failed", "seconds"), [(True, 0.0), (False, 2 * BUDGET)])
def test_a_probe_that_fails_or_is_slow_opens_the_circuit_again(
    clock: Clock, failed: bool, seconds: float
) -> None:
    device = opened()
    clock.skip(PAUSE_SECONDS)
    device.begin()
    assert not device.end(failed, seconds)
    assert (device.allows, device.state) == (False, CircuitState.OPEN)
    clock.skip(PAUSE_SECONDS - 1)
    assert not device.allows
    clock.skip(1)
    assert device.allows
    assert device.openings == 1


def test_a_probe_that_was_taken_back_leaves_the_next_caller_its_turn(clock: Clock) -> None:
    device = opened()
    clock.skip(PAUSE_SECONDS)
    device.begin(2)
    device.drop()
    assert not device.allows
    device.drop()
    assert device.allows


def test_jobs_from_before_the_pause_close_but_never_prolong_it(clock: Clock) -> None:
    device = opened()
    clock.skip(PAUSE_SECONDS - 1)
    assert fail(Circuit(), 1) == [False]
    assert not device.end(failed=True)
    clock.skip(1)
    assert device.allows
    device = opened()
    assert not device.end(failed=False)
    assert (device.allows, device.state) == (True, CircuitState.CLOSED)
