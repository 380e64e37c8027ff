# SPDX-License-Identifier: Apache-2.0
"""Writes of blocks from the arena to a lower tier.

A block is useful only behind its predecessor. So a block is written only if the tier has its parent
or is writing the parent. Stores need not end in the order in which they began, so a block waits for
a parent that is still being stored.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence

from flexkv.admission import Admission
from flexkv.index import Block, BlockIndex, BlockState
from flexkv.tiers.base import BlockResult
from flexkv.tiers.job import Outcome
from flexkv.transfer.sources import Source

_CHAIN_SHARE = 2
"""The predecessors of blocks that leave are written, too, up to half of the arena. The other half
holds the blocks that are stored and fetched meanwhile. Not tuned."""

_BLOCKS = 16
"""The least number of waiting blocks that one poll begins to write. To begin one takes about
0.01 ms with a disk."""

_BACKLOG_SHARE = 16
"""A poll begins a 16th of the waiting blocks if that is more, which bounds the backlog. Not
tuned."""

_PAUSE_SECONDS = 1.0
"""After a tier has dropped a block, FlexKV offers it only newly stored blocks for this time. Else a
tier whose budget is spent would be offered blocks, and drop them, in every step. Not tuned."""


class Demoter:
    """Writes blocks of the arena to one lower tier. Each block is leased from its offer until its
    write has ended. Single-threaded.

    A prompt may have more blocks than one step of the engine has time for. So blocks that are
    offered wait, and each poll begins to write some of them.

    Args:
        index: index of the arena; the caller's.
        slot_view: returns the memory of an arena slot, `slot_bytes` long.
        source: the tier that blocks are written to.
        admission: chooses the blocks that are written.

    Attributes:
        source: the tier, as given.
        admission: the choice of blocks, as given.
    """

    def __init__(
        self,
        index: BlockIndex,
        slot_view: Callable[[int], memoryview],
        source: Source,
        admission: Admission,
    ) -> None:
        self.source = source
        self.admission = admission
        self._index = index
        self._slot_view = slot_view
        self._waiting: dict[bytes, Block] = {}
        self._writes: dict[int, dict[int, Block]] = {}
        self._writing: set[bytes] = set()
        self._paused_until = 0.0

    @property
    def busy(self) -> bool:
        """Whether a block waits, or its write has no result yet."""
        return bool(self._waiting or self._writes)

    @property
    def paused(self) -> bool:
        """Whether the tier has dropped a block less than `_PAUSE_SECONDS` ago."""
        return time.monotonic() < self._paused_until

    def is_writing(self, key: bytes) -> bool:
        """Whether the block of `key` is being written to the tier, or waits for that."""
        return key in self._writing or key in self._waiting

    def lacks_any(self, keys: Sequence[bytes]) -> bool:
        """Whether the arena has one of these blocks and the tier, as far as known, has not."""
        index = self._index
        return any(
            not has and index.lookup((key,))
            for key, has in zip(keys, self.source.look(keys), strict=True)
        )

    def offer(self, keys: Sequence[bytes]) -> None:
        """Write blocks of a prefix to the tier: those that are ready in the arena, that the tier
        lacks, and whose parent it has or is writing. The first are written at once unless earlier
        blocks wait, and the others by `write_waiting`.

        Args:
            keys: keys of the prefix from some block on, first block first.
        """
        lacking = [key for key, has in zip(keys, self.source.look(keys), strict=True) if not has]
        fresh = dict.fromkeys(key for key in lacking if not self.is_writing(key))
        ready = [key for key, each in zip(fresh, self._index.present(fresh), strict=True) if each]
        at_once = not self._waiting
        self._waiting.update(zip(ready, self._index.lease(ready) or (), strict=True))
        if at_once:
            self.write_waiting()

    def write_waiting(self, *, all_blocks: bool = False) -> None:
        """Begin to write some of the blocks that wait, or all of them. Once each poll, after the
        tier's results: nothing is written behind a block that the tier has dropped."""
        waiting = self._waiting
        most = len(waiting) if all_blocks else max(_BLOCKS, len(waiting) // _BACKLOG_SHARE)
        batch: dict[bytes, Block] = {}
        for key in list(itertools.islice(waiting, most)):
            block = waiting.pop(key)
            before = None if block.parent is None else block.parent.key
            # Answers of a tier that has to ask are forgotten after a while.
            if before is None or before in batch or self._reaches(before, unknown=True):
                batch[key] = block
            elif self._parent_comes(block):
                waiting[key] = block
            else:
                self.source.counters.dropped_demotions += 1
                self._index.release_unused([block])
        self._write(list(batch.values()))

    def clear(self) -> None:
        """Write none of the blocks that wait, because the arena was cleared."""
        self._index.release_unused(list(self._waiting.values()))
        self._waiting.clear()

    def complete(self, keys: Sequence[bytes]) -> None:
        """`offer` a prefix that a request used, unless the tier is `paused`. The tier may have
        dropped or lost parts of it."""
        if not self.paused:
            self.offer(keys)

    def write_leaving(self, victims: Collection[Block]) -> list[Block]:
        """Write blocks that are about to be evicted, each behind those of its predecessors that the
        tier lacks.

        Args:
            victims: blocks that the caller has leased.

        Returns:
            The victims that are being written.
        """
        leaving = {block.key for block in victims}
        batch: dict[bytes, Block] = {}
        for victim in victims:
            chain = self._chain_of(victim, leaving, batch)
            batch.update((block.key, block) for block in chain)
        self._write(list(batch.values()))
        written = [block for block in victims if block.key in batch]
        self.source.counters.dropped_demotions += len(victims) - len(written)
        return written

    def take(self, result: BlockResult) -> Block:
        """Count a result of a write, end the write's lease, and return the block."""
        batch = self._writes[result.ticket]
        block = batch.pop(result.position)
        if not batch:
            del self._writes[result.ticket]
        self._writing.discard(block.key)
        counters, outcome = self.source.counters, result.outcome
        if outcome is Outcome.DONE:
            counters.demoted_blocks += 1
            self.source.note(block.key, True)
        elif outcome is Outcome.DROPPED:
            counters.dropped_demotions += 1
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
        counters.failed_demotions += outcome is Outcome.FAILED
        self._index.release_unused([block])
        return block

    def _parent_comes(self, block: Block) -> bool:
        """Whether the parent of a block is still being stored or fetched, or waits to be
        written."""
        parent = block.parent
        return parent is not None and (
            parent.state is BlockState.WRITING or parent.key in self._waiting
        )

    def _reaches(self, key: bytes, unknown: bool = False) -> bool:
        """Whether the tier has the block of `key` or is writing it; `unknown` if the tier would
        have to be asked."""
        if key in self._writing:
            return True
        has = self.source.look([key])[0]
        return unknown if has is None else has

    def _chain_of(
        self, victim: Block, leaving: Collection[bytes], batch: Collection[bytes]
    ) -> list[Block]:
        """Lease `victim` and those of its predecessors that must be written before it.

        Args:
            victim: a block that is about to be evicted.
            leaving: keys of all blocks that are about to be evicted.
            batch: keys of the blocks that are being written already.

        Returns:
            The leased blocks, `victim` last; none if a predecessor cannot be written.
        """
        chain: list[Block] = []
        held = len(self._waiting) + len(self._writing) + len(batch)
        most = self._index.num_slots // _CHAIN_SHARE - held
        block: Block | None = victim
        while block is not None:
            key = block.key
            if key in batch or (chain and self._reaches(key)):
                break
            known = key in leaving or len(chain) < most
            found = self._index.lease([key]) if known else None
            if found is None:
                self._index.release_unused(chain)
                return []
            chain += found
            block = block.parent
        chain.reverse()
        return chain

    def _write(self, blocks: list[Block]) -> None:
        if not blocks:
            return
        views = [self._slot_view(block.slot) for block in blocks]
        ticket = self.source.tier.write([block.key for block in blocks], views)
        self._writes[ticket] = dict(enumerate(blocks))
        self._writing.update(block.key for block in blocks)
