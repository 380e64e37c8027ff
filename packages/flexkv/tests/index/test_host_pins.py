# SPDX-License-Identifier: Apache-2.0
"""Pins and retained blocks beside one another; `test_pins` has each alone."""

from __future__ import annotations

import pytest

from flexkv.eviction import LRUPolicy
from flexkv.index.block_index import BlockIndex, block_index
from flexkv.index.pins import HostPins

SLOTS = 16
KEYS = [bytes([number]) * 32 for number in range(SLOTS)]


@pytest.fixture
def index() -> BlockIndex:
    made = block_index(SLOTS, LRUPolicy())
    for key in KEYS:
        block = made.reserve(key, None)
        assert block is not None
        made.publish([block])
    return made


def kept(index: BlockIndex) -> int:
    return index.pinned_blocks


def test_half_can_be_pinned_and_a_quarter_retained(
    index: BlockIndex, caplog: pytest.LogCaptureFixture
) -> None:
    pins = HostPins(index, 100.0)
    pins.retain(KEYS, "one", 10.0, 0.0)
    assert (kept(index), pins.refused) == (SLOTS // 8, SLOTS - SLOTS // 8)
    pins.retain(KEYS, "other", 10.0, 0.0)
    pins.retain(KEYS, "third", 10.0, 0.0)
    assert kept(index) == SLOTS // 8  # others retain the same blocks
    pins.pin(KEYS[SLOTS // 2 :], "one", None, 0.0)
    assert kept(index) == SLOTS // 8 + SLOTS // 2
    before = pins.refused
    pins.pin(KEYS[:1], "one", None, 0.0)
    assert pins.refused == before + 1


def test_a_pin_lasts_as_long_as_set_and_ends_with_its_time(index: BlockIndex) -> None:
    pins = HostPins(index, 100.0)
    pins.pin(KEYS[:1], "one", None, 0.0)
    pins.pin(KEYS[1:2], "one", 10.0, 0.0)
    pins.retain(KEYS[2:3], "one", 20.0, 0.0)
    ends = {5.0: 3, 15.0: 2, 25.0: 1, 99.0: 1, 101.0: 0}
    for now, left in ends.items():
        pins.expire(now)
        assert kept(index) == left
    pins.pin(KEYS[:1], "one", 10.0, 0.0)
    assert not pins.unpin("one", 11.0), "its time was over"
    assert kept(index) == 0


def test_owners_end_what_is_theirs(index: BlockIndex) -> None:
    pins = HostPins(index, 100.0)
    pins.pin(KEYS[:2], "one", None, 0.0)
    pins.retain(KEYS[2:4], "one", 100.0, 0.0)
    assert len(pins.recount()) == 4
    assert not pins.unpin("other", 0.0)
    pins.release(KEYS[2:3], "other")
    assert kept(index) == 4
    pins.release(KEYS[2:3], "one")
    assert kept(index) == 3
    assert pins.unpin("one", 0.0)
    assert kept(index) == 1
