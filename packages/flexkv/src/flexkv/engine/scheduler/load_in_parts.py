# SPDX-License-Identifier: Apache-2.0
"""A load that is ordered in one part, or in parts as its blocks arrive from lower tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.client import CacheClient
from flexkv.engine.orders import CopyOrder

_PARTS = 8
"""About the number of parts of a load that waits for a lower tier. Each part costs a place on the
board and a few microseconds. The device copies the last part after the disk has ended. Not
tuned."""


@dataclass(slots=True)
class Loading:
    """A load that the engine was promised, and its progress.

    Attributes:
        keys: keys of the FlexKV blocks, in order.
        engine_blocks: the engine's blocks to fill, in order; the first may begin inside a FlexKV
            block.
        skip: engine blocks of the first FlexKV block that the engine has itself.
        step: engine blocks of a FlexKV block.
        start: tokens before the load.
        engine_block_tokens: tokens of one engine block; 0 if only the whole load is of use.
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
        """The engine's blocks without an ordered copy."""
        return self.engine_blocks[self._place(self.ordered) :]

    @property
    def tokens_ordered(self) -> int:
        """Tokens of the request up to the end of the ordered blocks; the load's start if only the
        whole load is of use."""
        return self.start + self._place(self.ordered) * self.engine_block_tokens

    @property
    def stop(self) -> int:
        """Tokens of the request up to the end of the load."""
        return self.start + len(self.engine_blocks) * self.engine_block_tokens

    def next_part(self, cache: CacheClient, more_may_come: bool) -> CopyOrder | None:
        """Order blocks that are in host memory and not ordered yet; None if there are none or few.
        Once the order is given, the caller calls `advance`.

        Args:
            cache: of the engine.
            more_may_come: whether to wait for more blocks.
        """
        stop, transfer = len(self.keys), None
        if not more_may_come:
            transfer = cache.load(self.keys[self.ordered :])  # mostly all are there
        if transfer is None:
            there = cache.lookup(self.keys[self.ordered :])
            if there == 0 or (more_may_come and there < len(self.keys) // _PARTS):
                return None
            stop = self.ordered + there
            transfer = cache.load(self.keys[self.ordered : stop])
        if transfer is None:
            return None
        return CopyOrder(
            transfer.id,
            transfer.cell,
            self.engine_blocks[self._place(self.ordered) : self._place(stop)],
            transfer.slots,
            0 if self.ordered else self.skip,
            last=stop == len(self.keys),
        )

    def advance(self, order: CopyOrder) -> None:
        """Note that the order of `next_part` was given."""
        self.ordered += len(order.slots)

    def _place(self, block: int) -> int:
        """The place in `engine_blocks` at which a FlexKV block begins."""
        return max(0, block * self.step - self.skip)
