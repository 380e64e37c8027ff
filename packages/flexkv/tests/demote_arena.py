# SPDX-License-Identifier: Apache-2.0
"""A small arena over a tier in memory, and the writer between them."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator
from contextlib import contextmanager

from memory_tier import MemoryTier, QueriedMemoryTier

from flexkv.eviction import LRUPolicy
from flexkv.index.block_index import Block, block_index
from flexkv.tiers.job import Outcome
from flexkv.transfer.demote import _BLOCKS, _LEAVING_SHARE, Demoter, EvictionWriteback
from flexkv.transfer.sources import Source
from packages.inside_tiers import assert_idle, leaving_blocks
from packages.tier_blocks import assert_no_slot_is_lost, ready_blocks


def keys(names: str) -> list[bytes]:
    return [name.encode() for name in names]


def long_prefix(parts: int) -> str:
    """A prefix of so many times the blocks that one poll begins to write."""
    return "".join(map(chr, range(ord("0"), ord("0") + parts * _BLOCKS)))


class Arena:
    """An index and its demoter over a tier in memory. Blocks have one byte."""

    def __init__(self, slots: int, asked: bool) -> None:
        self.index = block_index(slots, LRUPolicy())
        self.tier = MemoryTier()
        memory = memoryview(bytearray(slots))
        tier = QueriedMemoryTier(self.tier, 1.0) if asked else self.tier
        source = Source(tier, 0, 1.0)
        self.counters = source.counters
        self.leaving = EvictionWriteback(self.index)
        self.demoter = Demoter(
            self.index, lambda slot: memory[slot : slot + 1], source, self.leaving
        )

    def add(self, names: str, parent: str = "") -> list[Block]:
        """Blocks of a prefix become ready, behind the block `parent`."""
        blocks = []
        before = parent.encode() or None
        for key in keys(names):
            block = self.index.reserve(key, before)
            assert block is not None
            blocks.append(block)
            before = key
        self.index.publish(blocks)
        return blocks

    def fill(self) -> None:
        """Until one block has to leave."""
        for i in range(self.index.free_slots - self.index.num_slots // _LEAVING_SHARE + 1):
            self.add(chr(0x4E00 + i))

    def lose(self, name: str) -> None:
        """A load of this block fails."""
        blocks = self.index.lease(keys(name))
        assert blocks is not None
        self.index.drop(blocks)
        self.index.release(blocks)

    def clear(self) -> None:
        self.index.clear()
        self.demoter.clear()
        self.tier.clear()

    def drop_newest(self) -> str:
        """The blocks that give way."""
        return b"".join(block.key for block in self.demoter.drop_newest()).decode()

    def poll(self) -> None:
        for result in self.tier.poll():
            self.demoter.take(result)

    def offer(self, names: str) -> str:
        """What is being written once these were offered."""
        self.demoter.offer(keys(names))
        return self.write()

    def make_room(self) -> str:
        self.leaving.make_room([self.demoter])
        return self.write()

    def write(self) -> str:
        """What is being written once some blocks that wait are."""
        self.demoter.write_waiting()
        return self.writing()

    def writing(self) -> str:
        return b"".join(task.key for task in self.tier.tasks).decode()

    def finish(self, outcome: Outcome = Outcome.DONE) -> None:
        self.tier.end_all(outcome)
        self.poll()

    def order(self) -> str:
        """What leaves, in that order: all, as if no slot were free."""
        blocks = dict(ready_blocks(self.index))
        children = Count(block.parent for block in blocks.values())
        left = []
        while blocks:
            ends = [b for b in blocks.values() if not (children[b] or b.leases)]
            if not ends:
                break
            end = min(ends, key=lambda block: block.used)
            del blocks[end.key]
            children[end.parent] -= 1
            left.append(end.key)
        return b"".join(left).decode()

    def assert_at_rest(self) -> None:
        assert not (self.demoter.busy)
        assert_idle(self.demoter)
        assert not leaving_blocks(self.leaving)
        assert not any(block.leases for block in ready_blocks(self.index).values())
        assert_no_slot_is_lost(self.index)


@contextmanager
def arena(slots: int = 16, *, asked: bool = False) -> Iterator[Arena]:
    """`asked`: whether the tier has to be asked, as a shared store has."""
    made = Arena(slots, asked)
    yield made
    made.poll()
    made.assert_at_rest()
