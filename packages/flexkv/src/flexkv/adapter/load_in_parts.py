# SPDX-License-Identifier: Apache-2.0
"""A load that is ordered in one part, or as its blocks come from lower tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.adapter.orders import CopyOrder
from flexkv.cache import KVCache

_PARTS = 8
"""A load that waits for a lower tier is ordered in about as many parts: each costs a place on the
board and a few microseconds, and the last one is what the device copies after the disk is done."""


@dataclass(slots=True)
class Loading:
    """What the engine was promised to have loaded, and how far that is.

    Attributes:
        keys: of the FlexKV blocks, in order.
        engine_blocks: the engine's blocks to fill, in order; the first may begin inside a FlexKV
            block.
        skip: engine blocks of the first FlexKV block that the engine has itself.
        step: engine blocks of a FlexKV block.
        start: tokens before the load.
        engine_block_tokens: of one of the engine's blocks; 0 if the load is worth something only
            whole.
        ordered: FlexKV blocks whose copies are ordered.
    """

    keys: Sequence[bytes]
    engine_blocks: list[int]
    skip: int
    step: int
    start: int
    engine_block_tokens: int
    ordered: int = 0

    @property
    def rest(self) -> list[int]:
        """The engine's blocks that no copy is ordered for."""
        return self.engine_blocks[self._place(self.ordered) :]

    @property
    def tokens_ordered(self) -> int:
        """Tokens of the request up to the end of what is ordered; the load's start if it is worth
        something only whole."""
        return self.start + self._place(self.ordered) * self.engine_block_tokens

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
