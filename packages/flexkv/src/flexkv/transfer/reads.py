# SPDX-License-Identifier: Apache-2.0
"""Batches of blocks that lower tiers read into slots of the arena.

Each block has a chain of sources. If a tier does not give a block, and a fetch still waits for it,
the next tier that has the block reads it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flexkv.index.block_index import Block, BlockIndex, BlockState
from flexkv.tiers.base import BlockResult
from flexkv.tiers.job import Outcome, Urgency
from flexkv.transfer.sources import Source


@dataclass(slots=True, eq=False)
class Read:
    """A batch that a tier reads.

    Attributes:
        blocks: those without a result, by position in the batch.
        progressed: time.monotonic(), in seconds, when the batch began, or when it or a batch
            before it last gave a block. A stall is measured from then.
        cancelled: whether no fetch waits for a block of the batch any more.
    """

    source: Source
    ticket: int
    blocks: dict[int, Block]
    urgency: Urgency
    progressed: float
    cancelled: bool = False


class Reads:
    """All batches under way, and the blocks between two tiers. `by_key` has the batch that reads
    the block of each key, and is not to be changed. Single-threaded.

    Args:
        slot_view: returns the memory of an arena slot, which tiers borrow until the block has a
            result.
        wanted: returns how urgently fetches wait for the block of a key; None if none waits.
        completed: called with keys whose blocks have arrived and the tier that gave them, or with
            None if no tier gives the blocks.
    """

    def __init__(
        self,
        index: BlockIndex,
        slot_view: Callable[[int], memoryview],
        sources: Sequence[Source],
        wanted: Callable[[bytes], Urgency | None],
        completed: Callable[[Iterable[bytes], Source | None], None],
    ) -> None:
        self._index = index
        self._slot_view = slot_view
        self._sources = sources
        self._wanted = wanted
        self._completed = completed
        self.forget()

    def forget(self) -> None:
        """Forget all batches: the index ends all writes but those that the caller keeps, and no
        result of these batches will be taken."""
        self.by_key: dict[bytes, Read] = {}
        self._reads: dict[tuple[Source, int], Read] = {}
        self._between: dict[Block, int] = {}
        self._delivered: dict[Read, None] = {}
        self._unsure: dict[Source, list[Block]] = {}  # whether the tier has them is not known

    def __bool__(self) -> bool:
        """Whether a block has no result yet, or is between two tiers."""
        return bool(self._reads or self._between)

    def begin(self, source: Source, blocks: Sequence[Block], urgency: Urgency) -> None:
        """Begin to read blocks, which the index has reserved, from a tier. If the tier raises, so
        does this, and the keys are free again. The slots stay unused until the tier is drained,
        because it may have begun to write to them."""
        keys = [block.key for block in blocks]
        unsure = self._unsure.setdefault(source, [])
        unsure += blocks
        with contextlib.ExitStack() as undo:
            undo.callback(self._index.discard, blocks)
            views = [self._slot_view(block.slot) for block in blocks]
            ticket = source.tier.read(keys, views, *urgency)
            undo.pop_all()
        read = Read(source, ticket, dict(enumerate(blocks)), urgency, time.monotonic())
        self._reads[source, ticket] = read
        del unsure[-len(blocks) :]
        self.by_key.update(dict.fromkeys(keys, read))

    def raise_priority(self, keys: Iterable[bytes], urgency: Urgency) -> None:
        """Raise the batches that read blocks of `keys` to `urgency`."""
        reads = {read: None for key in keys if (read := self.by_key.get(key)) is not None}
        for read in reads:
            read.urgency = min(read.urgency, urgency)
            read.source.tier.raise_priority(read.ticket, urgency)

    def cancel_unwanted(self, keys: Iterable[bytes]) -> None:
        """Cancel the batches that read blocks of `keys` and none that a fetch waits for."""
        reads = {read: None for key in keys if (read := self.by_key.get(key)) is not None}
        for read in reads:
            if all(self._wanted(block.key) is None for block in read.blocks.values()):
                read.cancelled = True
                read.source.tier.cancel(read.ticket)

    def take(self, source: Source, results: Iterable[BlockResult]) -> None:
        """Take results of a tier's reads; those of no batch are skipped."""
        arrived: list[Block] = []
        dropped: dict[Block, bool] = {}
        answers: dict[bool, list[bytes]] = {True: [], False: []}
        for ticket, position, outcome in results:
            read = self._reads.get((source, ticket))
            if read is None:
                continue
            block = read.blocks.pop(position)
            if not read.blocks:
                del self._reads[source, ticket]
            done = outcome is Outcome.DONE
            if done:
                self._delivered[read] = None
            if outcome is not Outcome.DROPPED:
                answers[done].append(block.key)
            current = self.by_key.get(block.key) is read
            if current:
                del self.by_key[block.key]
            if block.state is BlockState.DROPPED:
                # The arena was cleared, another tier gives it, or the arena lost what it builds on.
                dropped[block] = current
            elif done:
                arrived.append(block)
            else:
                self._fail(read, block, outcome)
        for has, keys in answers.items():
            source.note(keys, has)
        if arrived:
            self._index.publish(arrived)
            source.counters.fetched_blocks += len(arrived)
            self._completed([block.key for block in arrived], source)
        if dropped:
            self._index.abandon([*dropped])
            self._completed([block.key for block, current in dropped.items() if current], None)

    def retry(self) -> None:
        """After all results of a poll were taken, move the clocks of stalls, and read each block
        that its tier did not give from the next tier that has it."""
        now = time.monotonic()
        delivered, self._delivered = self._delivered, {}
        for read in self._reads.values() if delivered else ():
            # The tier may have to read an earlier or more urgent batch first.
            if any(
                each.source is read.source
                and (each.ticket <= read.ticket or each.urgency < read.urgency)
                for each in delivered
            ):
                read.progressed = now
        if self._between:
            self._find_next()

    def hung_in(self, read: Read, now: float) -> set[bytes]:
        """Keys of the blocks of a batch that nobody should wait for: those that hang, and all if
        the batch has stalled."""
        blocks, stalled = read.blocks, read.progressed < now - read.source.stall_seconds
        positions = blocks if stalled else read.source.tier.hung(read.ticket)
        return {blocks[position].key for position in positions if position in blocks}

    def is_hung(self, key: bytes, now: float) -> bool:
        """Whether the read of the block of `key`, which is under way, hangs or has stalled, or the
        tier cannot give the block now."""
        read = self.by_key[key]
        return key in self.hung_in(read, now) or read.source.contains([key])[0] is False

    def reroute(self, key: bytes) -> bool:
        """Read the block of `key`, whose batch hangs, from a slower tier, and likewise the other
        blocks of that batch. Returns False if no slower tier may have the block."""
        read = self.by_key[key]
        source = read.source
        hung = self.hung_in(read, time.monotonic())
        for block in list(read.blocks.values()):
            known = self.by_key.get(block.key) is read
            hangs = known and (block.key in hung or source.contains([block.key])[0] is False)
            if hangs and self._next(block.key, source.tier_rank + 1)[0] is not None:
                self._replace(block, read)
        return self.by_key.get(key) is not read

    def clear(self) -> None:
        """Cancel all batches, because the arena was cleared. Their results are discarded."""
        for read in self._reads.values():
            read.source.tier.cancel(read.ticket)
        self.by_key.clear()

    def borrowed(self, source: Source) -> list[Block]:
        """The blocks, each once, to whose memory a tier may still write."""
        batches = [read.blocks.values() for (of, _), read in self._reads.items() if of is source]
        unsure = self._unsure.get(source, [])
        return list(dict.fromkeys(itertools.chain(*batches, unsure)))

    def _fail(self, read: Read, block: Block, outcome: Outcome) -> None:
        source = read.source
        if outcome is not Outcome.DROPPED:
            source.counters.failed_fetches += 1
            source.counters.damaged_fetches += outcome is Outcome.DAMAGED
        # The tier still has a block whose read was cancelled; a new fetch may want it now.
        same = read.cancelled and outcome is Outcome.DROPPED
        self._between[block] = source.tier_rank + (not same)

    def _find_next(self) -> None:
        """Find the next tier for each block between two tiers."""
        between, self._between = self._between, {}
        reads: dict[Source, list[Block]] = {}
        queries: dict[Source, list[bytes]] = {}
        for block, tier_rank in between.items():
            key = block.key
            if block.state is BlockState.DROPPED:
                self._index.abandon([block])
                if key not in self._index:
                    self._completed([key], None)
                continue
            source, has = None, False
            if self._wanted(key) is not None:
                source, has = self._next(key, tier_rank)
            if source is None:
                self._index.abandon([block])
                self._completed([key], None)
            elif has:
                reads.setdefault(source, []).append(block)
            else:
                queries.setdefault(source, []).append(key)
                self._between[block] = source.tier_rank
        for source, blocks in reads.items():
            wanted = [self._wanted(block.key) for block in blocks]
            self.begin(source, blocks, min(each for each in wanted if each is not None))
        for source, keys in queries.items():
            source.query(keys)

    def _next(self, key: bytes, tier_rank: int) -> tuple[Source | None, bool]:
        """The first tier from `tier_rank` on that has the block or has to be queried, and whether
        it has the block."""
        for source in self._sources[tier_rank:]:
            has = source.contains([key])[0]
            if has is not False:
                return source, bool(has)
        return None, False

    def _replace(self, block: Block, read: Read) -> None:
        """Reserve another slot for a block, because a read that hangs borrows the block's own."""
        key, tenant = block.key, block.tenant
        self._index.discard([block])
        del self.by_key[key]
        other = self._index.reserve(key, block.parent_key, tenant)
        if other is None:
            self._completed([key], None)
        else:
            self._between[other] = read.source.tier_rank + 1
