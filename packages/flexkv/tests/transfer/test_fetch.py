# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from memory_tier import MemoryTier

from flexkv.transfer.fetch import Fetch
from flexkv.transfer.sources import IndexedSource
from flexkv.types.changes import Medium

KEYS = [bytes([i]) for i in range(8)]
DISK = IndexedSource(MemoryTier(Medium.DISK), 0, 1.0)
OBJECTS = IndexedSource(MemoryTier(Medium.OBJECTS), 1, 1.0)


def fetch() -> Fetch:
    """Two blocks from a disk, one from a store, and five that the store is asked for."""
    made = Fetch(KEYS, [None] * 3, stop=8, asking=Medium.OBJECTS)
    for key, source in zip(KEYS, (DISK, DISK, OBJECTS), strict=False):
        made.expect([key], source)
    return made


def test_missing_blocks_are_those_of_the_tier_that_may_give_them() -> None:
    made = fetch()
    assert made.missing == {Medium.DISK: 2, Medium.OBJECTS: 6}
    assert made.next_medium is Medium.DISK
    made.settle(KEYS[0], DISK)
    assert made.missing == {Medium.DISK: 1, Medium.OBJECTS: 6}
    made.cut(3)
    assert made.missing == {Medium.DISK: 1, Medium.OBJECTS: 1}


def test_a_fetch_is_steady_once_each_tier_has_given_a_block() -> None:
    made = fetch()
    made.asking = None
    steady = []
    for key, source in zip(KEYS, (DISK, OBJECTS), strict=False):
        steady.append(made.is_steady)
        made.settle(key, source)
    made.asking = Medium.OBJECTS
    steady.append(made.is_steady)
    made.asking = None
    assert [*steady, made.is_steady] == [False, False, False, True]


def test_a_block_came_from_the_tier_that_gave_it() -> None:
    made = fetch()
    assert made.medium_of(KEYS[0]) is Medium.DISK, "where it is read from, as long as it is"
    made.settle(KEYS[0], OBJECTS)
    made.settle(KEYS[1], None)  # the engine stored it meanwhile
    assert made.medium_of(KEYS[0]) is Medium.OBJECTS
    assert made.medium_of(KEYS[1]) is Medium.HOST
    assert {medium: count for medium, (count, _) in made.gave.items()} == {Medium.OBJECTS: 1}
    assert made.missing == {Medium.OBJECTS: 6}
