# SPDX-License-Identifier: Apache-2.0
"""Random use of an arena whose blocks are written to two tiers before they leave: resets, failed
loads, writes that fail, and keys that get another block while an old one is on its way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from memory_tier import MemoryTier, Task

from flexkv.eviction import LRUPolicy
from flexkv.index.block_index import Block, block_index
from flexkv.tiers.base import BlockResult
from flexkv.tiers.job import Outcome
from flexkv.transfer import demote
from flexkv.transfer.demote import Demoter, EvictionWriteback
from flexkv.transfer.sources import Source
from packages.conftest import StillClock
from packages.inside_tiers import assert_idle, leaving_blocks
from packages.tier_blocks import assert_no_slot_is_lost, ready_blocks, writing_blocks

SLOTS = 12
CHAINS, LENGTH = 3, 5
PREFIXES = {"chain": st.integers(0, CHAINS - 1), "length": st.integers(1, LENGTH)}
OUTCOMES = st.sampled_from([Outcome.DONE, Outcome.DONE, Outcome.FAILED, Outcome.DROPPED])


def prefix_of(chain: int, length: int) -> list[bytes]:
    return [bytes([chain, i]) for i in range(length)]


class CheckedTier(MemoryTier):
    """Each block that it is given belongs behind one that it has, gets, or has just dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: set[bytes] = set()

    def poll(self) -> list[BlockResult]:
        self.dropped.clear()
        return super().poll()

    def write(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        after: Sequence[bytes | None] | None = None,
    ) -> int:
        assert len(set(keys)) == len(keys)
        reached = self.being_written | self.blocks.keys() | self.dropped
        for key in keys:
            assert not key[1] or bytes([key[0], key[1] - 1]) in reached
            reached.add(key)
        if self.full:
            self.dropped.update(keys)
        return super().write(keys, buffers)


class LeavingModel(RuleBasedStateMachine):
    """See above."""

    @initialize(both=st.booleans())
    def start(self, both: bool) -> None:
        self.clock = StillClock()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(demote, "time", self.clock)
        self.patch.setattr(demote, "_BLOCKS", 2)  # a chain takes several polls
        self.patch.setattr(demote, "_LEAVING_SHARE", 2)  # something leaves nearly always
        self.index = block_index(SLOTS, LRUPolicy())
        memory = memoryview(bytearray(SLOTS))
        self.tiers = [CheckedTier(), CheckedTier()]
        self.leaving = EvictionWriteback(self.index)
        self.demoters = [
            Demoter(
                self.index,
                lambda slot: memory[slot : slot + 1],
                Source(tier, place, 1.0),
                self.leaving,
            )
            for place, tier in enumerate(self.tiers)
        ]
        self.evicting = self.demoters[: 1 + both]
        self.storing: list[Block] = []

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.rest(Outcome.DONE)
            self.patch.undo()

    @property
    def tasks(self) -> list[tuple[MemoryTier, Task]]:
        return [(tier, task) for tier in self.tiers for task in tier.tasks]

    @rule(**PREFIXES, ready=st.booleans())
    def store(self, chain: int, length: int, ready: bool) -> None:
        """Blocks get ready at once or later."""
        before = None
        blocks = []
        for key in prefix_of(chain, length):
            block = self.index.reserve(key, before)
            if block is not None:
                blocks.append(block)
            before = key
        if ready:
            self.index.publish(blocks)
        else:
            self.storing += blocks

    @precondition(lambda self: self.storing)
    @rule(data=st.data(), ready=st.booleans())
    def end_store(self, data: st.DataObject, ready: bool) -> None:
        block = data.draw(st.sampled_from(self.storing))
        self.storing.remove(block)
        (self.index.publish if ready else self.index.abandon)([block])

    @rule(**PREFIXES, number=st.integers(0, 1))
    def offer(self, chain: int, length: int, number: int) -> None:
        self.demoters[number].complete(prefix_of(chain, length))

    @rule(**PREFIXES)
    def load(self, chain: int, length: int) -> None:
        found = self.index.lease(prefix_of(chain, length))
        self.index.release(found or [])

    @rule(**PREFIXES)
    def fail_to_load(self, chain: int, length: int) -> None:
        found = self.index.lease(prefix_of(chain, length))
        self.index.drop(found or [])
        self.index.release(found or [])

    @rule(polls=st.integers(1, 8))
    def go_on(self, polls: int) -> None:
        for _ in range(polls):
            self.poll()

    def poll(self) -> None:
        for tier, demoter in zip(self.tiers, self.demoters, strict=True):
            for result in tier.poll():
                demoter.take(result)
        self.index.sweep(3)
        self.leaving.make_room(self.evicting)
        for demoter in self.demoters:
            demoter.write_waiting()

    @rule(number=st.integers(0, 1))
    def give_way(self, number: int) -> None:
        self.demoters[number].drop_newest()

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), outcome=OUTCOMES)
    def end_task(self, data: st.DataObject, outcome: Outcome) -> None:
        tier, task = data.draw(st.sampled_from(self.tasks))
        tier.end(task, outcome)

    @rule(number=st.integers(0, 1))
    def fill_up(self, number: int) -> None:
        self.tiers[number].full = not self.tiers[number].full

    @rule(number=st.integers(0, 1), chain=st.integers(0, CHAINS - 1), i=st.integers(0, LENGTH - 1))
    def evict_below(self, number: int, chain: int, i: int) -> None:
        self.tiers[number].delete([bytes([chain, i])])

    @rule(again=st.booleans(), polls=st.integers(0, 4))
    def clear(self, again: bool, polls: int) -> None:
        stored = list(ready_blocks(self.index))
        self.index.clear()
        for demoter in self.demoters:
            demoter.clear()
        for tier in self.tiers:
            tier.clear()
        if again:
            for chain, i in sorted(stored):
                self.store(chain, i + 1, ready=True)
        self.go_on(polls)

    @rule(outcome=OUTCOMES)
    def rest(self, outcome: Outcome) -> None:
        """Nothing stays leased, and the blocks that should leave have left."""
        self.index.publish(self.storing)
        self.storing.clear()
        for _ in range(100):
            self.clock.skip(2.0)  # no tier is paused
            for tier in self.tiers:
                tier.end_all(outcome)
            self.poll()
            busy = self.tasks or any(demoter.busy for demoter in self.demoters)
            if not busy and self.index.free_slots >= SLOTS // 2:
                break
        else:
            raise AssertionError("something stays busy, or does not leave")
        assert not leaving_blocks(self.leaving)
        for demoter in self.demoters:
            assert_idle(demoter)
        assert not writing_blocks(self.index)
        assert not any(block.leases for block in ready_blocks(self.index).values())
        assert_no_slot_is_lost(self.index)


TestLeaving = LeavingModel.TestCase
TestLeaving.settings = settings(max_examples=200, stateful_step_count=30)
