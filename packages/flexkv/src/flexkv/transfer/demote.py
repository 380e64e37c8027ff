# SPDX-License-Identifier: Apache-2.0
"""Blocks on their way from the arena to a lower tier.

A block is of use only behind the one before it: none is written whose parent is neither in the tier
nor on its way there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from flexkv.admission import Admission
from flexkv.index import Block, BlockIndex
from flexkv.tiers.base import BlockResult
from flexkv.tiers.job import Outcome
from flexkv.transfer.sources import Source

_CHAIN_SHARE = 2
"""For blocks that leave, those before them are written, too, as long as no more than half of the
arena is being written: the other half is for what is stored and fetched."""

_PAUSE_SECONDS = 1.0
"""Once the tier dropped a block, for so long nobody looks for more to write than what was just
stored: with a spent budget it would be looked for, and dropped, in every step."""


class Demoter:
    """Writes blocks of the arena to one lower tier, leased meanwhile. Single-threaded.

    Args:
        index: of the arena.
        slot_view: memory of an arena slot.
        source: the tier that blocks are demoted to.
        admission: what is demoted.

    Attributes:
        source: as given.
        admission: as given.
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
        self._writes: dict[int, dict[int, Block]] = {}
        self._writing: set[bytes] = set()
        self._paused_until = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._writes)

    @property
    def paused(self) -> bool:
        """Whether nothing should be looked for now, because the tier dropped a block."""
        return time.monotonic() < self._paused_until

    def is_writing(self, key: bytes) -> bool:
        """Whether the block of `key` is being written to the tier."""
        return key in self._writing

    def lacks_any(self, keys: Sequence[bytes]) -> bool:
        """Whether the arena has one of these blocks that the tier is not known to have."""
        index = self._index
        return any(
            not has and index.lookup((key,))
            for key, has in zip(keys, self.source.look(keys), strict=True)
        )

    def offer(self, keys: Sequence[bytes]) -> None:
        """Write the blocks of a prefix that are ready, reachable and not in the tier yet."""
        there = {key for key, has in zip(keys, self.source.look(keys), strict=True) if has}
        batch: dict[bytes, Block] = {}
        for key in dict.fromkeys(keys):
            if key in there or key in self._writing:
                continue
            found = self._index.lease([key])
            if found is None:
                continue
            (block,) = found
            before = None if block.parent is None else block.parent.key
            known = before is None or before in there or before in batch
            # Of a tier that has to ask, what was written long ago is forgotten.
            if known or (before is not None and self._reaches(before, unknown=True)):
                batch[key] = block
            else:
                self.source.counters.dropped_demotions += 1
                self._index.release_unused(found)
        self._write(list(batch.values()))

    def complete(self, keys: Sequence[bytes]) -> None:
        """As `offer`, for a prefix that was used: parts of it may have been dropped or lost."""
        if not self.paused:
            self.offer(keys)

    def write_leaving(self, victims: Collection[Block]) -> list[Block]:
        """Write blocks that are about to leave, each behind those before it that the tier lacks.
        Returns those of them that are written."""
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
        """Note a result of the tier; returns its block, which is leased for it no longer."""
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

    def _reaches(self, key: bytes, unknown: bool = False) -> bool:
        """Whether the tier has the block of `key`, or is about to; `unknown` if it has to be
        asked."""
        if key in self._writing:
            return True
        has = self.source.look([key])[0]
        return unknown if has is None else has

    def _chain_of(
        self, victim: Block, leaving: Collection[bytes], batch: Collection[bytes]
    ) -> list[Block]:
        """`victim` behind those before it that must be written for it, leased; none if they cannot.

        Args:
            victim: leaves.
            leaving: keys of all that leave.
            batch: keys of what is written already.
        """
        chain: list[Block] = []
        most = self._index.num_slots // _CHAIN_SHARE - len(self._writing) - len(batch)
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
