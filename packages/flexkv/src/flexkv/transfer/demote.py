# SPDX-License-Identifier: Apache-2.0
"""Blocks on their way from the arena to lower tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flexkv.counters import Counters
from flexkv.index import Block, BlockIndex
from flexkv.tiers.base import BlockResult, LowerTier
from flexkv.transfer.job import Outcome

_LEAVING_SHARE = 8
"""With admission on eviction, an eighth of the arena is kept free or on its way out: of 16 GiB 2,
what some long prompts store before a disk has written as much. What exceeds it is evicted
unwritten."""


@dataclass(slots=True)
class _Batch:
    """Blocks of a prefix being written, how many without a result, and which stay in the arena."""

    blocks: list[Block]
    missing: int
    staying: list[int] = field(default_factory=list)


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
        self._writes: dict[int, _Batch] = {}
        self._leaving: dict[Block, None] = {}

    @property
    def busy(self) -> bool:
        return bool(self._writes)

    def offer(self, keys: Sequence[bytes]) -> None:
        """Write the blocks of a prefix that are ready and not in the tier yet."""
        present = self._tier.contains(keys)
        absent = [key for key, there in zip(keys, present, strict=True) if not there]
        blocks = [found[0] for key in absent if (found := self._index.lease([key]))]
        if blocks:
            self._write(blocks)

    def make_room(self) -> None:
        """Write what would be evicted next, and evict it then."""
        goal = -(-self._index.num_slots // _LEAVING_SHARE)
        victims = []
        while self._index.free_slots + len(self._leaving) < goal:
            victim = self._index.lease_victim()
            if victim is None:
                break
            self._leaving[victim] = None
            victims.append(victim)
        if victims:
            self._write(victims)

    def take(self, result: BlockResult) -> None:
        """Note a result of the tier."""
        batch = self._writes[result.ticket]
        self._counters.demoted_blocks += result.outcome is Outcome.DONE
        self._counters.dropped_demotions += result.outcome is Outcome.DROPPED
        self._counters.failed_demotions += result.outcome is Outcome.FAILED
        block = batch.blocks[result.position]
        if block in self._leaving:
            del self._leaving[block]
            self._index.retire(block)
        else:
            batch.staying.append(result.position)
        batch.missing -= 1
        if batch.missing == 0:
            del self._writes[result.ticket]
            # All at once and in order: the end of a prefix stays what is evicted first.
            self._index.release([batch.blocks[i] for i in sorted(batch.staying)])

    def _write(self, blocks: list[Block]) -> None:
        views = [self._slot_view(block.slot) for block in blocks]
        ticket = self._tier.write([block.key for block in blocks], views)
        self._writes[ticket] = _Batch(blocks, len(blocks))
