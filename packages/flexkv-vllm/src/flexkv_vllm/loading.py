# SPDX-License-Identifier: Apache-2.0
"""A request's load as the scheduler side orders it: in one part, or as its blocks come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexkv import KVCache
from flexkv_vllm.orders import CopyOrder

_PARTS = 8
"""A load that waits for a lower tier is ordered in about as many parts: each costs a place on the
board and a few microseconds, and the last one is what the device copies after the disk is done."""


@dataclass(slots=True)
class Loading:
    """What vLLM was promised to have loaded, and how far that is.

    Attributes:
        keys: of the FlexKV blocks, in order.
        engine_blocks: vLLM's blocks to fill, in order; the first may begin inside a FlexKV block.
        skip: engine blocks of the first FlexKV block that vLLM has itself.
        step: engine blocks of a FlexKV block.
        ordered: FlexKV blocks whose copies are ordered.
    """

    keys: Sequence[bytes]
    engine_blocks: list[int]
    skip: int
    step: int
    ordered: int = 0

    @property
    def rest(self) -> list[int]:
        """vLLM's blocks that no copy is ordered for."""
        return self.engine_blocks[self._place(self.ordered) :]

    def next_part(self, cache: KVCache, more_may_come: bool) -> CopyOrder | None:
        """Order what is there and was not ordered; None if there is nothing, or little as yet.

        Args:
            cache: of the engine.
            more_may_come: whether it is worth waiting for more.
        """
        there = cache.lookup(self.keys[self.ordered :])
        if there == 0 or (more_may_come and there < len(self.keys) // _PARTS):
            return None
        stop = self.ordered + there
        transfer = cache.load(self.keys[self.ordered : stop])
        if transfer is None:
            return None
        order = CopyOrder(
            transfer.id,
            transfer.cell,
            self.engine_blocks[self._place(self.ordered) : self._place(stop)],
            transfer.slots,
            0 if self.ordered else self.skip,
            last=stop == len(self.keys),
        )
        self.ordered = stop
        return order

    def _place(self, block: int) -> int:
        """Where a FlexKV block begins in `engine_blocks`."""
        return max(0, block * self.step - self.skip)
