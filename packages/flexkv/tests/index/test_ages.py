# SPDX-License-Identifier: Apache-2.0
"""Blocks become too old before their greatest age, and not long before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from ages_clock import AgesClock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexkv.index.ages import LAST, UNIT_SECONDS, UNKNOWN, BlockAges

AGE = 600.0
KEYS = [b"a", b"b", b"c"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> AgesClock:
    return AgesClock(monkeypatch)


@given(
    age=st.floats(60, 100_000),
    begin=st.floats(0, UNIT_SECONDS),
    part=st.floats(0, 1.0, exclude_max=True),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_block_is_young_beyond_its_greatest_age(
    clock: AgesClock, age: float, begin: float, part: float
) -> None:
    clock.pass_by(begin)
    ages = BlockAges(age, 8)
    ages.note(KEYS[:1])
    young = age - 9 - min(UNIT_SECONDS, age / 64)
    clock.pass_by(part * young)
    assert ages.count_young(KEYS[:1]) == 1
    assert take_old(ages, 8) == []
    clock.pass_by(age - part * young)
    assert ages.count_young(KEYS[:1]) == 0
    assert take_old(ages, 8) == KEYS[:1]


def bind(ages: BlockAges, has: Callable[[bytes], bool]) -> None:
    """Bind to what says which blocks host memory has, as an index does."""

    class Blocks:
        def __contains__(self, key: bytes) -> bool:
            return has(key)

    ages.bind(cast("Any", Blocks()))


def take_old(ages: BlockAges, most: int) -> list[bytes]:
    """Remove old blocks from a host memory that has all others. Returns their keys."""
    taken: list[bytes] = []
    bind(ages, lambda key: key not in taken)
    ages.remove_old(most, taken.extend)
    return taken


def test_what_cannot_be_removed_yet_is_removed_later(clock: AgesClock) -> None:
    ages = BlockAges(AGE, 8)
    ages.note(KEYS)
    clock.pass_by(AGE)
    written = KEYS[0]
    bind(ages, lambda key: key == written)
    seen: list[list[bytes]] = []
    ages.remove_old(8, seen.append)
    assert seen == [KEYS]
    assert ages.are_young(KEYS[:1]) == [False]
    assert take_old(ages, 8) == [written]
    assert take_old(ages, 8) == []


def test_an_error_forgets_no_old_block(clock: AgesClock) -> None:
    ages = BlockAges(AGE, 8)
    ages.note(KEYS)
    clock.pass_by(AGE)

    def fail(_: list[bytes]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ages.remove_old(8, fail)
    assert not any(ages.are_young(KEYS))
    assert take_old(ages, 8) == KEYS


def test_old_blocks_are_taken_once_a_part_at_a_time(clock: AgesClock) -> None:
    ages = BlockAges(AGE, 8)
    ages.note(KEYS[:2])
    clock.pass_by(300)
    ages.note(KEYS[2:])
    assert take_old(ages, 8) == []
    clock.pass_by(310)
    assert ages.is_due
    assert ages.are_young(KEYS) == [False, False, True]
    assert len(take_old(ages, 1)) == 1
    assert ages.is_due
    assert len(take_old(ages, 8)) == 1
    assert not ages.is_due
    clock.pass_by(300)
    assert take_old(ages, 8) == KEYS[2:]
    assert take_old(ages, 8) == []


def test_a_block_that_is_stored_again_is_new(clock: AgesClock) -> None:
    ages = BlockAges(AGE, 8)
    ages.note(KEYS)
    clock.pass_by(500)
    ages.note(KEYS[1:2])
    clock.pass_by(110)
    assert sorted(take_old(ages, 8)) == [b"a", b"c"]
    assert ages.count_young(KEYS[1:2]) == 1


def test_a_fetched_block_keeps_its_time(clock: AgesClock) -> None:
    first = BlockAges(AGE, 8)
    first.note(KEYS)
    clock.pass_by(500)
    ages = BlockAges(AGE, 8)
    ages.note(KEYS, first.of(KEYS))
    assert ages.count_young(KEYS) == 3
    clock.pass_by(110)
    assert ages.count_young(KEYS) == 0
    assert ages.of([b"unknown"]) == [UNKNOWN]
    assert ages.oldest > UNKNOWN


def test_who_sets_the_clock_makes_no_block_younger(clock: AgesClock) -> None:
    ages = BlockAges(AGE, 8)
    ages.note(KEYS)
    clock.pass_by(300)
    clock.day -= 100_000
    clock.pass_by(310)
    assert ages.count_young(KEYS) == 0
    after = BlockAges(AGE, 8)
    stored = ages.now
    assert after.oldest < stored - AGE
    after.at_least(stored)
    assert stored <= after.now < stored + UNIT_SECONDS


def test_times_fit_into_a_record(clock: AgesClock) -> None:
    clock.day = clock.uptime = 0
    assert BlockAges(AGE, 8).now == UNIT_SECONDS
    clock.day = 1e11
    assert BlockAges(AGE, 8).now == LAST


def test_blocks_that_host_memory_has_evicted_are_forgotten(clock: AgesClock) -> None:
    ages = BlockAges(AGE, 8)
    there: set[bytes] = set()
    bind(ages, there.__contains__)
    for number in range(20_000):
        key = b"%d" % number
        there.add(key)
        there.discard(b"%d" % (number - 8))
        ages.note([key])
    known = [b"%d" % number for number in range(20_000)]
    assert sum(stored != UNKNOWN for stored in ages.of(known)) < 2 * 8 + 1024 + 400
    assert UNKNOWN not in ages.of(known[-8:])
