# SPDX-License-Identifier: Apache-2.0
"""What keeps blocks in host memory: pins, and the softer retention that any client may ask for."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

from flexkv.index.block_index import Block, BlockIndex
from flexkv.index.pins import Pins

logger = logging.getLogger(__name__)

_PIN_SHARE = 2
"""At most half of the arena can be pinned. The other half holds blocks that are being stored or
fetched, and all unpinned blocks. Not tuned."""
_RETAINED_SHARE = 4
"""At most a quarter of the arena can be retained, by an owner half of that: any client may ask for
it, and other blocks must stay, too. Not tuned."""


class HostPins:
    """The pins and the retained blocks of one index; see `Pins`. Callers pass the time, in seconds
    of their clock.

    Args:
        index: the index of the blocks.
        seconds: how long a hold lasts if no time is given.

    Attributes:
        refused: how many blocks were not pinned or retained because of a limit.
    """

    def __init__(self, index: BlockIndex, seconds: float) -> None:
        self._slots, self._seconds = index.num_slots, seconds
        retained = index.num_slots // _RETAINED_SHARE
        self._pinned = Pins(index, index.num_slots // _PIN_SHARE)
        self._retained = Pins(index, retained, max(1, retained // 2))
        self.refused = 0

    def pin(
        self, keys: Sequence[bytes], owner: Hashable, seconds: float | None, now: float
    ) -> None:
        """See `Hold.PIN`."""
        self.expire(now)
        until = now + (self._seconds if seconds is None else seconds)
        refused = self._pinned.pin(keys, owner, until)
        if refused and not self.refused:
            logger.warning(
                "half of the %d blocks of host memory are pinned; no more are (logged once)",
                self._slots,
            )
        self.refused += refused

    def unpin(self, owner: Hashable, now: float) -> bool:
        """See `CacheClient.unhold`."""
        self.expire(now)
        return self._pinned.unpin(owner)

    def retain(
        self, keys: Sequence[bytes], owner: Hashable, seconds: float | None, now: float
    ) -> None:
        """See `Hold.RETAIN`."""
        self.expire(now)
        until = now + (self._seconds if seconds is None else seconds)
        self.refused += self._retained.pin(keys, owner, until)

    def release(self, keys: Sequence[bytes], owner: Hashable) -> None:
        """See `CacheClient.unhold`."""
        self._retained.unpin(owner, keys)

    def expire(self, now: float) -> None:
        """End what is over at `now`."""
        self._pinned.expire(now)
        self._retained.expire(now)

    def clear(self) -> None:
        """See `Pins.clear`."""
        self._pinned.clear()
        self._retained.clear()

    def recount(self) -> list[Block]:
        """See `Pins.recount`."""
        return [*self._pinned.recount(), *self._retained.recount()]
