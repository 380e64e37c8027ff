# SPDX-License-Identifier: Apache-2.0
"""Random use of a cache over three lower tiers whose reads and writes fail, hang, drop or come
late. The third has to be asked, and answers late, in vain or never.

Known at any time: which keys are ready in the arena, with which bytes, and why each left; which are
in each tier. Nothing may be written without the block before it, and at rest nothing is leased,
reserved, awaited or lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from memory_tier import MemoryTier, QueriedMemoryTier, Task

from flexkv import KVCache, client
from flexkv.client import Ended, Reset, Transfer
from flexkv.eviction import LRUPolicy
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.host.board import CELLS
from flexkv.layout import BlockFormat
from flexkv.tiers.base import AttachedTier, BlockResult
from flexkv.tiers.job import Outcome
from flexkv.transfer import demote, fetcher, reads, running_fetch, sources
from flexkv.types.admission import ADMISSIONS
from flexkv.types.mover import Direction, Status
from flexkv.types.presence import Presence
from packages.conftest import StillClock
from packages.inside import (
    assert_no_read,
    assert_no_write,
    below_of,
    demoters_of,
    free_cells,
    index_of,
    sources_of,
)
from packages.seen_fetch import SeenFetch, see
from packages.tier_blocks import assert_no_slot_is_lost, ready_blocks, writing_blocks

FORMAT = BlockFormat(1, (64,))
SLOTS = 8
STALL_SECONDS = 5.0
CHAINS, LENGTH = 3, 5
PREFIXES = {"chain": st.integers(0, CHAINS - 1), "length": st.integers(1, LENGTH)}


def prefix_of(chain: int, length: int) -> list[bytes]:
    return [bytes([chain, i]) for i in range(length)]


def before(key: bytes) -> bytes | None:
    return bytes([key[0], key[1] - 1]) if key[1] else None


def content(key: bytes) -> bytes:
    return key * (FORMAT.slot_bytes // len(key))


class CheckedTier(MemoryTier):
    """A tier that is never given a block without the one before it, nor wrong bytes. What it
    drops at once is told with the next poll."""

    def __init__(self) -> None:
        super().__init__()
        self.untold: set[bytes] = set()

    def poll(self) -> list[BlockResult]:
        self.untold.clear()
        return super().poll()

    def write(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        after: Sequence[bytes | None] | None = None,
    ) -> int:
        reached = self.being_written | self.blocks.keys() | self.untold
        for key, buffer in zip(keys, buffers, strict=True):
            assert bytes(buffer) == content(key)
            assert before(key) is None or before(key) in reached, f"{key!r} is out of reach"
            reached.add(key)
        if self.full:
            self.untold.update(keys)
        return super().write(keys, buffers)


class FaultModel(RuleBasedStateMachine):
    """See above."""

    @initialize(admission=st.sampled_from(sorted(ADMISSIONS)))
    def start(self, admission: str) -> None:
        self.clock = StillClock()
        self.patch = pytest.MonkeyPatch()
        for module in (client, fetcher, demote, reads, running_fetch, sources):
            self.patch.setattr(module, "time", self.clock)
        self.patch.setattr(demote, "_BLOCKS", 2)  # some of a chain waits
        self.arena = Arena.create(ArenaSpec(FORMAT, SLOTS), threads=1)
        self.tiers: list[MemoryTier] = [CheckedTier(), CheckedTier(), MemoryTier()]
        self.asked = QueriedMemoryTier(self.tiers[2], STALL_SECONDS / 5)
        tiers = [
            AttachedTier(tier, ADMISSIONS[admission], STALL_SECONDS)
            for tier in (*self.tiers[:2], self.asked)
        ]
        self.cache = KVCache(self.arena, LRUPolicy(), tiers)
        self.transfers: list[Transfer] = []
        self.fetches: list[SeenFetch] = []

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.rest(Outcome.DONE)
        self.arena.close()
        self.patch.undo()

    @property
    def tasks(self) -> list[tuple[MemoryTier, Task]]:
        return [(tier, task) for tier in self.tiers for task in tier.tasks]

    # Engine.

    @rule(**PREFIXES)
    def store(self, chain: int, length: int) -> None:
        prefix = prefix_of(chain, length)
        missing = self.cache.missing(prefix)
        transfer = self.cache.store(prefix, missing) if missing else None
        if transfer is not None:
            stored = len(transfer.keys)
            assert transfer.keys == [prefix[i] for i in missing][:stored]
            self.transfers.append(transfer)
            for slot in transfer.slots:
                self.fill(slot, b"torn")

    @rule(**PREFIXES)
    def load(self, chain: int, length: int) -> None:
        prefix = prefix_of(chain, length)
        hits = prefix[: self.cache.lookup(prefix)]
        self.cache.record(hits)
        transfer = self.cache.load(hits) if hits else None
        if transfer is not None:
            self.transfers.append(transfer)

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), status=st.sampled_from([Status.DONE, Status.DONE, Status.FAILED]))
    def finish_transfer(self, data: st.DataObject, status: Status) -> None:
        self.finish(data.draw(st.sampled_from(self.transfers)), status)

    @rule(**PREFIXES, whole=st.booleans())
    def use(self, chain: int, length: int, whole: bool) -> None:
        (self.cache.touch if whole else self.cache.record)(prefix_of(chain, length))

    @rule(**PREFIXES, early=st.booleans())
    def fetch(self, chain: int, length: int, early: bool) -> None:
        begun = see(self.cache, prefix_of(chain, length), queued=early)
        if begun is not None:
            self.fetches.append(begun)

    @precondition(lambda self: self.fetches)
    @rule(data=st.data(), raise_priority=st.booleans())
    def end_fetch(self, data: st.DataObject, raise_priority: bool) -> None:
        chosen = data.draw(st.sampled_from(self.fetches))
        if raise_priority:
            self.cache.extend_fetch(chosen, raise_priority=True)
            return
        self.cache.end_fetch(chosen)
        self.fetches.remove(chosen)

    @rule()
    def poll(self) -> None:
        self.remove(self.cache.poll())

    @rule()
    def clear(self) -> None:
        self.cache.reset(Reset.CLEAR)
        assert self.cache.ready_blocks == 0
        for tier in self.tiers:
            assert tier.blocks == {}

    # Below.

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), outcome=st.sampled_from([Outcome.DONE, Outcome.DONE, *Outcome]))
    def end_task(self, data: st.DataObject, outcome: Outcome) -> None:
        tier, task = data.draw(st.sampled_from(self.tasks))
        if task.writes and outcome in (Outcome.MISSING, Outcome.DAMAGED):
            outcome = Outcome.FAILED
        tier.end(task, outcome)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def begin_task(self, data: st.DataObject) -> None:
        _, task = data.draw(st.sampled_from(self.tasks))
        task.begun = True

    @rule(number=st.integers(0, 2), chain=st.integers(0, CHAINS - 1), i=st.integers(0, LENGTH - 1))
    def stall(self, number: int, chain: int, i: int) -> None:
        self.tiers[number].stalled ^= {bytes([chain, i])}

    @rule(number=st.integers(0, 2), chain=st.integers(0, CHAINS - 1), i=st.integers(0, LENGTH - 1))
    def lose(self, number: int, chain: int, i: int) -> None:
        if not any(task.key == bytes([chain, i]) for task in self.tiers[number].tasks):
            self.tiers[number].delete([bytes([chain, i])])

    @rule(chain=st.integers(0, CHAINS - 1), length=st.integers(1, LENGTH))
    def appear(self, chain: int, length: int) -> None:
        """The slower tier is one that other engines fill."""
        for tier in self.tiers[1:]:
            tier.blocks.update({key: content(key) for key in prefix_of(chain, length)})

    @precondition(lambda self: self.asked.questions)
    @rule(data=st.data(), known=st.booleans())
    def answer(self, data: st.DataObject, known: bool) -> None:
        self.asked.answer(data.draw(st.sampled_from(sorted(self.asked.questions))), known)

    @rule()
    def open_or_close_circuit(self) -> None:
        self.asked.readable = not self.asked.readable

    @rule()
    def fill_up(self) -> None:
        self.tiers[0].full = not self.tiers[0].full

    @rule()
    def wait(self) -> None:
        """What does not come is given up, after each tier was asked and tried to read it."""
        for _ in range(2 * len(self.tiers)):
            self.clock.skip(STALL_SECONDS + 1)
            self.poll()
        assert all(each.done for each in self.fetches)

    # At rest.

    @rule(outcome=st.sampled_from([Outcome.DONE, Outcome.FAILED, Outcome.DROPPED]))
    def rest(self, outcome: Outcome) -> None:
        for transfer in list(self.transfers):
            self.finish(transfer, Status.DONE)
        self.drain(outcome)
        assert all(each.done for each in self.fetches)
        for each in self.fetches:
            self.cache.end_fetch(each)
        self.fetches.clear()
        self.drain(outcome)
        index = index_of(self.cache)
        assert_no_read(self.cache)
        assert_no_write(self.cache)
        assert not any(demoter.busy for demoter in demoters_of(self.cache))
        assert not self.cache.status.under_way
        assert len(free_cells(self.arena.board)) == CELLS
        assert not writing_blocks(index)
        assert {block.key for block in ready_blocks(index).values() if block.leases} == set()
        assert_no_slot_is_lost(index)

    @rule(**PREFIXES)
    def ask(self, chain: int, length: int) -> None:
        """At rest, all that leads to a key without a gap can be had."""
        self.rest(Outcome.DONE)
        prefix = prefix_of(chain, length)
        # What was known of the tier that others fill is out of date.
        sources_of(self.cache)[2].clear()
        if self.cache.query(prefix):
            self.drain(Outcome.DONE)
        assert not self.cache.query(prefix)
        there = [each is not Presence.ABSENT for each in self.cache.presence(prefix)]
        reached = [*there, False].index(False)
        begun = see(self.cache, prefix)
        self.drain(Outcome.DONE)
        assert self.cache.lookup(prefix) == reached
        if begun is not None:
            assert (begun.done, begun.arrived) == (True, reached)
            self.cache.end_fetch(begun)

    @invariant()
    def what_is_there_has_its_own_bytes(self) -> None:
        if not hasattr(self, "cache"):
            return
        for key, block in ready_blocks(index_of(self.cache)).items():
            with self.arena.slot_view(block.slot) as view:
                assert bytes(view) == content(key)
        for tier in self.tiers:
            assert tier.blocks == {key: content(key) for key in tier.blocks}

    @invariant()
    def what_a_fetch_has_stays(self) -> None:
        """A load that fails takes blocks away, and the state of the fetch shows it."""
        for each in getattr(self, "fetches", ()):
            assert self.cache.lookup(each.keys[: each.arrived]) == each.arrived
            held = [block for block in each.blocks if block is not None]
            assert all(block.leases for block in held)

    def fill(self, slot: int, data: bytes) -> None:
        with self.arena.slot_view(slot) as view:
            view[:] = data.ljust(FORMAT.slot_bytes)

    def finish(self, transfer: Transfer, status: Status) -> None:
        """Copy, as the rank would, and poll."""
        kept = set(ready_blocks(index_of(self.cache)))
        written = {(each.key, each.slot) for each in writing_blocks(index_of(self.cache)).values()}
        own = set()
        for key, slot in zip(transfer.keys, transfer.slots, strict=True):
            if (key, slot) in written:  # not cleared meanwhile
                own.add(key)
            if transfer.direction is Direction.STORE and status is Status.DONE:
                self.fill(slot, content(key))
            elif transfer.direction is Direction.LOAD:
                with self.arena.slot_view(slot) as view:
                    assert bytes(view) == content(key)
        self.arena.board.report(transfer.cell, 0, status)
        polled = self.cache.poll()
        assert Ended(transfer.id, transfer.direction, status is Status.DONE) in polled
        self.remove(polled)
        there = set(ready_blocks(index_of(self.cache)))
        if transfer.direction is Direction.STORE:
            assert not own & kept
            if status is Status.FAILED:
                assert not own & there

    def remove(self, ended: Iterable[Ended]) -> None:
        for each in ended:
            (transfer,) = (own for own in self.transfers if own.id == each.id)
            self.transfers.remove(transfer)

    def drain(self, outcome: Outcome) -> None:
        """Until nothing is under way but fetches that wait for nothing more."""
        below = below_of(self.cache)
        for _ in range(100):
            for tier in self.tiers:
                tier.stalled.clear()
                tier.end_all(outcome)
            self.asked.readable = True
            for ticket in list(self.asked.questions):
                self.asked.answer(ticket)
            self.poll()
            works = self.tasks or self.transfers or below.fetcher.reads or self.asked.questions
            writes = any(each.busy for each in demoters_of(self.cache))
            if not (works or below.uses.waiting or writes):
                return
        raise AssertionError("something is under way for ever")


TestFaults = FaultModel.TestCase
TestFaults.settings = settings(max_examples=300, stateful_step_count=30)
