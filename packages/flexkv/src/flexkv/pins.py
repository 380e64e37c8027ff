# SPDX-License-Identifier: Apache-2.0
"""Who keeps which blocks from being evicted, and until when.

Pure and single-threaded: the time is passed in. O(log n) for each pin that ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from flexkv.index import Block, BlockIndex

_STALE = 1024
"""Ends of pins that are no more may be noted in so many cases beside twice as many as there are."""


@dataclass(slots=True, eq=False)
class _Pin:
    """One owner's pin of a block."""

    owner: Hashable
    block: Block
    until: float


@dataclass(order=True, slots=True)
class _End:
    """When a pin ends, as it was known when this was noted."""

    at: float
    number: int
    pin: _Pin = field(compare=False)


class Pins:
    """The pins of one index. A block stays as long as one owner pins it, or until the index is
    cleared or the block proves unreadable.

    Args:
        index: of the blocks.
        limit: pins that there can be at a time.
    """

    def __init__(self, index: BlockIndex, limit: int) -> None:
        self._index = index
        self._limit = limit
        self._pins: dict[Hashable, dict[bytes, _Pin]] = {}
        self._count = 0
        self._ends: list[_End] = []
        self._noted = 0

    def pin(self, keys: Iterable[bytes], owner: Hashable, until: float) -> int:
        """Keep those blocks of `keys` that have a slot; those that `owner` keeps already, longer.

        Args:
            keys: of a prefix, first block first.
            owner: who may end these pins.
            until: when they end by themselves.

        Returns:
            How many were not pinned because of the limit.
        """
        refused = 0
        for key in keys:
            known = self._pins.get(owner, {}).get(key)
            if known is not None and self._index.holds(known.block):
                known.until = max(known.until, until)
                continue
            if known is not None:
                self._drop(known)
            if self._count >= self._limit:
                refused += key in self._index
                continue
            block = self._index.pin(key)
            if block is not None:
                pin = _Pin(owner, block, until)
                self._pins.setdefault(owner, {})[key] = pin
                self._count += 1
                self._note_end(pin)
        return refused

    def unpin(self, owner: Hashable) -> None:
        """End all pins of `owner`."""
        for pin in list(self._pins.get(owner, {}).values()):
            self._drop(pin)

    def expire(self, now: float) -> None:
        """End the pins whose time has come."""
        while self._ends and self._ends[0].at <= now:
            pin = heapq.heappop(self._ends).pin
            if not self._is_pinned(pin):
                continue
            if pin.until > now:
                self._note_end(pin)
            else:
                self._drop(pin)

    def clear(self) -> None:
        """The index was cleared."""
        self._pins.clear()
        self._ends.clear()
        self._count = 0

    def _note_end(self, pin: _Pin) -> None:
        self._noted += 1
        heapq.heappush(self._ends, _End(pin.until, self._noted, pin))
        if len(self._ends) > 2 * self._count + _STALE:
            # Pins that were ended by their owners.
            self._ends = [end for end in self._ends if self._is_pinned(end.pin)]
            heapq.heapify(self._ends)

    def _is_pinned(self, pin: _Pin) -> bool:
        return self._pins.get(pin.owner, {}).get(pin.block.key) is pin

    def _drop(self, pin: _Pin) -> None:
        own = self._pins[pin.owner]
        del own[pin.block.key]
        if not own:
            del self._pins[pin.owner]
        self._count -= 1
        self._index.unpin(pin.block)
