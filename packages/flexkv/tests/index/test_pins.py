# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from flexkv.eviction import LRUPolicy
from flexkv.index.block_index import BlockIndex, block_index
from flexkv.index.pins import _STALE, Pins
from packages.inside import assert_no_pin, damage_pins, kept_ends

SLOTS = 4


def keys(names: str) -> list[bytes]:
    return [name.encode() for name in names]


def make(names: str, limit: int = SLOTS) -> tuple[BlockIndex, Pins]:
    """Pins over a full index that has a prefix."""
    index = block_index(SLOTS, LRUPolicy())
    fill(index, names)
    return index, Pins(index, limit)


def fill(index: BlockIndex, names: str) -> None:
    before = None
    for key in keys(names):
        block = index.reserve(key, before)
        assert block is not None
        index.publish([block])
        before = key


def left(index: BlockIndex, names: str) -> str:
    """The blocks that are not evicted, whatever wants their slots."""
    others = []
    while (block := index.reserve(b"%d" % len(others), None)) is not None:
        others.append(block)
    index.abandon(others)
    return "".join(name for name in names if index.lookup(keys(name)))


def test_a_pin_ends_when_its_time_has_come() -> None:
    index, pins = make("abcd")
    pins.pin(keys("ab"), "me", until=10)
    pins.pin(keys("c"), "me", until=20)
    pins.expire(9.9)
    assert index.pinned_blocks == 3
    pins.expire(10)
    assert index.pinned_blocks == 1
    assert left(index, "abcd") == "abc", "what a pinned block builds on stays"
    pins.expire(20)
    assert left(index, "abcd") == ""


def test_a_pin_that_is_renewed_lasts_longer_and_never_shorter() -> None:
    index, pins = make("a")
    pins.pin(keys("a"), "me", until=10)
    pins.pin(keys("a"), "me", until=30)
    pins.pin(keys("a"), "me", until=20)
    pins.expire(29)
    assert index.pinned_blocks == 1
    pins.expire(30)
    assert index.pinned_blocks == 0


def test_an_owner_ends_no_pins_but_its_own() -> None:
    index, pins = make("abcd")
    pins.pin(keys("ab"), "me", until=10)
    pins.pin(keys("bc"), "other", until=10)
    assert pins.unpin("me")
    assert not pins.unpin("me")
    assert not pins.unpin("nobody")
    assert not pins.unpin("other", keys("a"))
    assert index.pinned_blocks == 2
    assert left(index, "abcd") == "abc"
    pins.unpin("other")
    assert left(index, "abcd") == ""


def test_what_exceeds_the_limit_is_not_pinned() -> None:
    index, pins = make("abcd", limit=2)
    assert pins.pin(keys("abcx"), "me", until=10) == 1
    assert pins.pin(keys("a"), "other", until=10) == 1, "each owner's pin counts"
    assert pins.pin(keys("ab"), "me", until=10) == 0
    pins.unpin("me")
    assert pins.pin(keys("cd"), "other", until=10) == 0
    assert index.pinned_blocks == 2


def test_a_pin_of_a_block_that_has_left_is_not_one_of_its_successor() -> None:
    index, pins = make("a", limit=1)
    pins.pin(keys("a"), "me", until=10)
    leased = index.lease(keys("a"))
    assert leased is not None
    index.drop(leased)
    index.release(leased)
    fill(index, "a")
    assert index.pinned_blocks == 0
    assert pins.pin(keys("a"), "me", until=20) == 0
    pins.expire(15)
    assert index.pinned_blocks == 1
    pins.expire(20)
    assert index.pinned_blocks == 0


def test_a_clear_ends_all_pins() -> None:
    index, pins = make("ab", limit=2)
    pins.pin(keys("ab"), "me", until=10)
    index.clear()
    pins.clear()
    fill(index, "ab")
    assert pins.pin(keys("ab"), "me", until=30) == 0
    pins.expire(10)
    assert index.pinned_blocks == 2


def test_pins_that_come_and_go_take_no_more_memory() -> None:
    index, pins = make("a")
    for _ in range(10 * _STALE):
        pins.pin(keys("a"), "me", until=10)
        pins.unpin("me")
    assert kept_ends(pins) <= _STALE + 2
    pins.pin(keys("a"), "me", until=10)
    pins.expire(10)
    assert index.pinned_blocks == 0
    assert_no_pin(pins)


def test_after_an_error_only_the_pins_of_the_table_are_left_and_these_still_end() -> None:
    index, pins = make("abcd")
    pins.pin(keys("a"), "me", until=10)
    pins.pin(keys("b"), "other", until=20)
    assert index.pin(b"d") is not None, "a pin that an error kept from the table"
    damage_pins(pins)
    index.settle([], [], pins.recount())
    assert index.pinned_blocks == 2
    assert left(index, "abcd") == "ab"
    assert pins.pin(keys("ab"), "third", until=30) == 0, "two of four places are free"
    pins.unpin("third")
    pins.expire(10)
    assert index.pinned_blocks == 1
    pins.expire(20)
    assert index.pinned_blocks == 0
    assert left(index, "abcd") == ""
