# SPDX-License-Identifier: Apache-2.0
"""How long an engine steps on without requests."""

from __future__ import annotations

from flexkv.engine.scheduler.scheduled_step import STEP_ON_SECONDS, IdleSteps


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_step_is_wanted_however_long_the_engine_took_to_start() -> None:
    clock = Clock()
    steps = IdleSteps(clock)
    clock.now += 1000 * STEP_ON_SECONDS
    assert steps.wanted(True)
    steps.note(False)
    assert steps.wanted(True)


def test_without_work_no_step_is_wanted() -> None:
    steps = IdleSteps(Clock())
    assert not steps.wanted(False)
    steps.note(True)
    assert not steps.wanted(False)


def test_what_never_ends_does_not_keep_the_engine_stepping() -> None:
    clock = Clock()
    steps = IdleSteps(clock)
    steps.note(True)
    clock.now += STEP_ON_SECONDS / 2
    steps.note(False)
    assert steps.wanted(True)
    clock.now += STEP_ON_SECONDS / 2
    assert not steps.wanted(True)
    steps.note(True)
    assert steps.wanted(True)
