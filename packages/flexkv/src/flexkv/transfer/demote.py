# SPDX-License-Identifier: Apache-2.0
"""Blocks on their way from the arena to lower tiers.

A block is of use only behind the one before it: none is written whose parent is neither in the tier
nor on its way there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from flexkv.counters import Counters
from flexkv.index import Block, BlockIndex
from flexkv.tiers.base import BlockResult, LowerTier
from flexkv.tiers.job import Outcome

_LEAVING_SHARE = 8
"""With admission on eviction, an eighth of the arena is kept free or on its way out: of 16 GiB 2,
what some long prompts store before a disk has written as much. What exceeds it is evicted
unwritten."""

_CHAIN_SHARE = 2
"""For blocks that leave, those before them are written, too, as long as no more than half of the
arena is being written: the other half is for what is stored and fetched."""

_PAUSE_SECONDS = 1.0
"""Once the tier dropped a block, for so long nobody looks for more to write than what was just
stored: with a spent budget it would be looked for, and dropped, in every step."""


class Demoter:
    """Writes blocks of the arena to a lower tier, leased meanwhile. Single-threaded.

    Args:
        index: of the arena.
        slot_view: memory of an arena slot.
        tier: what blocks are demoted to.
        counters: of the cache.
    """

    def __init__(
        self,
        index: BlockIndex,
        slot_view: Callable[[int], memoryview],
        tier: LowerTier,
        counters: Counters,
    ) -> None:
        self._index = index
        self._slot_view = slot_view
        self._tier = tier
        self._counters = counters
        self._writes: dict[int, dict[int, Block]] = {}
        self._writing: set[bytes] = set()
        self._paused_until = 0.0
        self._leaving: dict[Block, None] = {}

    @property
    def busy(self) -> bool:
        return bool(self._writes)

    def is_writing(self, key: bytes) -> bool:
        """Whether the block of `key` is being written to the tier."""
        return key in self._writing

    def offer(self, keys: Sequence[bytes]) -> None:
        """Write the blocks of a prefix that are ready, reachable and not in the tier yet."""
        there = {key for key, has in zip(keys, self._tier.contains(keys), strict=True) if has}
        batch: dict[bytes, Block] = {}
        for key in dict.fromkeys(keys):
            if key in there or key in self._writing:
                continue
            found = self._index.lease([key])
            if found is None:
                continue
            (block,) = found
            before = None if block.parent is None else block.parent.key
            if before in there or before in batch or self._reaches(before):
                batch[key] = block
            else:
                self._refuse(found)
        self._write(list(batch.values()))

    def complete(self, keys: Sequence[bytes]) -> None:
        """As `offer`, for a prefix that was used: parts of it may have been dropped or lost."""
        if time.monotonic() >= self._paused_until:
            self.offer(keys)

    def make_room(self) -> None:
        """Write what would be evicted next, and evict it then."""
        if time.monotonic() < self._paused_until:
            return
        goal = -(-self._index.num_slots // _LEAVING_SHARE)
        victims: dict[bytes, Block] = {}
        while self._index.free_slots + len(self._leaving) < goal:
            victim = self._index.lease_victim()
            if victim is None:
                break
            self._leaving[victim] = None
            victims[victim.key] = victim
        batch: dict[bytes, Block] = {}
        for victim in victims.values():
            chain = self._chain_of(victim, victims, batch)
            batch.update((block.key, block) for block in chain)
        self._refuse([victim for key, victim in victims.items() if key not in batch])
        self._write(list(batch.values()))

    def take(self, result: BlockResult) -> None:
        """Note a result of the tier."""
        batch = self._writes[result.ticket]
        block = batch.pop(result.position)
        if not batch:
            del self._writes[result.ticket]
        self._writing.discard(block.key)
        self._counters.demoted_blocks += result.outcome is Outcome.DONE
        if result.outcome is Outcome.DROPPED:
            self._counters.dropped_demotions += 1
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
        self._counters.failed_demotions += result.outcome is Outcome.FAILED
        self._let_go(block)

    def _reaches(self, key: bytes | None) -> bool:
        """Whether the tier has the block of `key`, or is about to; or there is none."""
        return key is None or key in self._writing or self._tier.contains([key])[0]

    def _chain_of(
        self, victim: Block, victims: dict[bytes, Block], batch: dict[bytes, Block]
    ) -> list[Block]:
        """`victim` behind those before it that must be written for it, leased; none if they cannot.

        Args:
            victim: leased.
            victims: all that leave, leased.
            batch: what is written already.
        """
        if victim.key in batch:
            return []
        chain = [victim]
        most = self._index.num_slots // _CHAIN_SHARE - len(self._writing) - len(batch)
        while (parent := chain[-1].parent) is not None:
            key = parent.key
            if key in batch or self._reaches(key):
                break
            found = None
            if key in victims:
                found = [victims[key]]
            elif len(chain) < most:
                found = self._index.lease([key])
            if found is None:
                self._index.release_unused(block for block in chain if block.key not in victims)
                return []
            chain += found
        chain.reverse()
        return chain

    def _refuse(self, blocks: Iterable[Block]) -> None:
        """These leased blocks are not written."""
        for block in blocks:
            self._counters.dropped_demotions += 1
            self._let_go(block)

    def _let_go(self, block: Block) -> None:
        if block in self._leaving:
            del self._leaving[block]
            self._index.retire(block)
        else:
            self._index.release_unused([block])

    def _write(self, blocks: list[Block]) -> None:
        if not blocks:
            return
        views = [self._slot_view(block.slot) for block in blocks]
        ticket = self._tier.write([block.key for block in blocks], views)
        self._writes[ticket] = dict(enumerate(blocks))
        self._writing.update(block.key for block in blocks)
