# SPDX-License-Identifier: Apache-2.0
"""Ages of blocks in shared memory, as readers see them."""

from __future__ import annotations

from mmap import mmap

import pytest
from ages_clock import AgesClock

from flexkv.eviction import LRUPolicy
from flexkv.index.ages import BlockAges, young_reader
from flexkv.index.block_index import BlockIndex, block_index, index_bytes

SLOTS = 8
KEYS = [b"%d" % number for number in range(4)]
AGE = 600


class World:
    """An index whose owner knows the ages, and a reader."""

    def __init__(self) -> None:
        memory, self.holds = mmap(-1, index_bytes(SLOTS)), bytearray(2 * SLOTS)
        self.index: BlockIndex = block_index(SLOTS, LRUPolicy(), memory)
        self.index.add_reader(self.holds)
        self.ages = BlockAges(AGE, SLOTS)
        self.ages.bind(self.index, memory)
        self.reader = young_reader(memory, self.holds, SLOTS)

    def store(self, keys: list[bytes]) -> None:
        blocks = self.index.reserve_all(keys, range(len(keys)), range(len(keys)))
        self.ages.note(blocks.keys, slots=blocks.slots)
        self.index.publish(blocks)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> AgesClock:
    return AgesClock(monkeypatch)


def test_a_reader_finds_no_block_that_is_too_old(clock: AgesClock) -> None:
    world = World()
    world.store(KEYS[:1])
    clock.pass_by(AGE / 2)
    world.store(KEYS[1:3])
    reader = world.reader
    assert reader.present(KEYS) == [True, True, True, False]
    clock.pass_by(AGE / 2)
    assert reader.present(KEYS) == [False, True, True, False]
    assert reader.lookup(KEYS) == 0
    assert reader.lookup(KEYS[1:]) == 2
    assert reader.lease(KEYS[:1]) is reader.lease(KEYS[:2]) is None
    assert reader.held == 0
    assert reader.lease(KEYS[1:3])
    assert reader.held == 2


def test_a_block_that_cannot_be_held_hides_no_other(clock: AgesClock) -> None:
    world = World()
    world.store(KEYS[:1])
    clock.pass_by(AGE)
    world.store(KEYS[1:])
    slots = {block.key: block.slot for block in world.index.blocks}
    memoryview(world.holds).cast("H")[slots[KEYS[2]]] = 0xFFFF  # as many holds as there can be
    assert world.reader.present(KEYS) == [False, True, False, True]
    assert world.reader.lookup(KEYS[1:]) == 1


def test_a_slot_that_nobody_has_timed_is_too_old(clock: AgesClock) -> None:
    world = World()
    (block,) = world.index.reserve_all(KEYS[:1], [0], [0])
    world.index.publish([block])
    world.store(KEYS[1:2])
    clock.pass_by(AGE)
    world.store(KEYS[2:])
    assert world.reader.present(KEYS) == [False, False, True, True]
