# SPDX-License-Identifier: Apache-2.0
"""Batches that lower tiers read into slots of the arena.

Each block has its own chain of sources: what one tier cannot give is read from the next that has
it, as long as somebody waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flexkv.index import Block, BlockIndex, BlockState
from flexkv.tiers.base import BlockResult
from flexkv.tiers.job import Outcome, Priority
from flexkv.transfer.sources import Source


@dataclass(slots=True, eq=False)
class Read:
    """A batch that a tier reads.

    Attributes:
        source: the tier.
        ticket: of the batch there.
        blocks: those without a result, by position.
        priority: of the batch.
        progressed: time.monotonic() when it began, or last gave a block, or one of the batches
            before it did: the clock of its stall.
        cancelled: whether nobody waited for any of it any more.
    """

    source: Source
    ticket: int
    blocks: dict[int, Block]
    priority: Priority
    progressed: float
    cancelled: bool = False

    def goes_before(self, other: Read) -> bool:
        """Whether `other`, of the same tier, may have to wait for this one."""
        return self.ticket <= other.ticket or self.priority < other.priority


class Reads:
    """All batches under way, and the blocks between two tiers. Single-threaded.

    Args:
        index: of the arena; the blocks are reserved in it.
        slot_view: memory of an arena slot.
        sources: lower tiers, the fastest first.
        wanted: how urgently a block is waited for; None if nobody waits.
        settled: told of each key whose block has come, with the tier that gave it, and of each
            that does not come from any tier, with None.
    """

    def __init__(
        self,
        index: BlockIndex,
        slot_view: Callable[[int], memoryview],
        sources: Sequence[Source],
        wanted: Callable[[bytes], Priority | None],
        settled: Callable[[bytes, Source | None], None],
    ) -> None:
        self._index = index
        self._slot_view = slot_view
        self._sources = sources
        self._wanted = wanted
        self._settled = settled
        self._reads: dict[tuple[Source, int], Read] = {}
        self._read_of: dict[bytes, Read] = {}
        self._between: dict[Block, int] = {}
        self._delivered: dict[Read, None] = {}

    def __bool__(self) -> bool:
        """Whether anything is under way."""
        return bool(self._reads or self._between)

    def begin(self, source: Source, blocks: Sequence[Block], priority: Priority) -> None:
        """Read reserved blocks from a tier."""
        keys = [block.key for block in blocks]
        views = [self._slot_view(block.slot) for block in blocks]
        ticket = source.tier.read(keys, views, priority)
        read = Read(source, ticket, dict(enumerate(blocks)), priority, time.monotonic())
        self._reads[source, ticket] = read
        self._read_of.update(dict.fromkeys(keys, read))

    def of(self, key: bytes) -> Read | None:
        """The batch that reads the block of `key`; None if none does."""
        return self._read_of.get(key)

    def hasten(self, keys: Iterable[bytes], priority: Priority) -> None:
        """Raise the batches that read blocks of `keys` to `priority`."""
        reads = {read: None for key in keys if (read := self._read_of.get(key)) is not None}
        for read in reads:
            read.priority = min(read.priority, priority)
            read.source.tier.hasten(read.ticket, priority)

    def cancel_unwanted(self, keys: Iterable[bytes]) -> None:
        """Nobody waits any more for some of the blocks of `keys`: do not read batches of which
        nothing is waited for."""
        reads = {read: None for key in keys if (read := self._read_of.get(key)) is not None}
        for read in reads:
            if all(self._wanted(block.key) is None for block in read.blocks.values()):
                read.cancelled = True
                read.source.tier.cancel(read.ticket)

    def take(self, source: Source, result: BlockResult) -> bool:
        """Note a result of a tier. False if it is not one of a read."""
        read = self._reads.get((source, result.ticket))
        if read is None:
            return False
        block = read.blocks.pop(result.position)
        if not read.blocks:
            del self._reads[source, result.ticket]
        outcome = result.outcome
        done = outcome is Outcome.DONE
        if done:
            self._delivered[read] = None
        if done or outcome is not Outcome.DROPPED:
            source.note(block.key, done)
        if block.state is BlockState.DROPPED:  # the arena was cleared, or another tier gives it
            self._index.abandon([block])
            return True
        del self._read_of[block.key]
        self._count(source, outcome)
        if done:
            self._index.publish([block])
            self._settled(block.key, source)
        else:
            # Nothing is wrong with what a fetch that has ended cancelled: another may want it now.
            same = read.cancelled and outcome is Outcome.DROPPED
            self._between[block] = source.place + (not same)
        return True

    def settle(self) -> None:
        """All results of a poll were taken: move the clocks of stalls, and read what was not given
        from the next tier that has it."""
        now = time.monotonic()
        delivered, self._delivered = self._delivered, {}
        for read in self._reads.values() if delivered else ():
            if any(each.source is read.source and each.goes_before(read) for each in delivered):
                read.progressed = now
        if self._between:
            self._place()

    def is_hung(self, key: bytes, now: float) -> bool:
        """Whether the batch that reads the block of `key` gives nothing, or the part of its tier
        that has the block."""
        read = self._read_of[key]
        stalled = read.progressed < now - read.source.stall_seconds
        return stalled or read.source.look([key])[0] is False

    def leave(self, key: bytes) -> bool:
        """Leave the batch that reads the block of `key` and hangs: read the block, and others that
        it does not give, from the tiers behind it. False if none of them may have it."""
        read = self._read_of[key]
        now = time.monotonic()
        for block in list(read.blocks.values()):
            known = self._read_of.get(block.key) is read
            if known and self.is_hung(block.key, now) and self._may_come(block.key, read.source):
                self._replace(block, read)
        return self._read_of.get(key) is not read

    def clear(self) -> None:
        """The arena was cleared: what is under way arrives nowhere."""
        for read in self._reads.values():
            read.source.tier.cancel(read.ticket)
        self._read_of.clear()

    def _count(self, source: Source, outcome: Outcome) -> None:
        counters = source.counters
        if outcome is Outcome.DONE:
            counters.fetched_blocks += 1
        elif outcome is not Outcome.DROPPED:
            counters.failed_fetches += 1
            counters.damaged_fetches += outcome is Outcome.DAMAGED

    def _place(self) -> None:
        """Find the next tier for each block between two."""
        between, self._between = self._between, {}
        reads: dict[Source, list[Block]] = {}
        questions: dict[Source, list[bytes]] = {}
        for block, place in between.items():
            key = block.key
            if block.state is BlockState.DROPPED:
                self._index.abandon([block])
                continue
            source, has = None, False
            if self._wanted(key) is not None:
                source, has = self._next(key, place)
            if source is None:
                self._index.abandon([block])
                self._settled(key, None)
            elif has:
                reads.setdefault(source, []).append(block)
            else:
                questions.setdefault(source, []).append(key)
                self._between[block] = source.place
        for source, blocks in reads.items():
            priorities = [self._wanted(block.key) for block in blocks]
            urgent = min(each for each in priorities if each is not None)
            self.begin(source, blocks, urgent)
        for source, keys in questions.items():
            source.ask(keys)

    def _next(self, key: bytes, place: int) -> tuple[Source | None, bool]:
        """The first tier from `place` on that has the block, or has to be asked, and which."""
        for source in self._sources[place:]:
            has = source.look([key])[0]
            if has is not False:
                return source, bool(has)
        return None, False

    def _may_come(self, key: bytes, source: Source) -> bool:
        """Whether a tier behind `source` may have the block."""
        return self._next(key, source.place + 1)[0] is not None

    def _replace(self, block: Block, read: Read) -> None:
        """Reserve another slot for a block whose own is borrowed by a read that hangs."""
        key, parent = block.key, block.parent
        self._index.discard([block])
        del self._read_of[key]
        other = self._index.reserve(key, None if parent is None else parent.key)
        if other is None:
            self._settled(key, None)
        else:
            self._between[other] = read.source.place + 1
