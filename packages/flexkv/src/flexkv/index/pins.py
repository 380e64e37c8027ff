# SPDX-License-Identifier: Apache-2.0
"""The pins that owners have on blocks, and the times when these pins end.

The module is pure and single-threaded; callers pass the time. Each pin that ends costs O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from flexkv.index.block_index import Block, BlockIndex

_STALE = 1024
"""The heap of ends may hold twice as many entries as there are pins, and this many more."""


@dataclass(slots=True, eq=False)
class _Pin:
    """One owner's pin of a block."""

    owner: Hashable
    block: Block
    until: float


@dataclass(order=True, slots=True)
class _End:
    """The end of a pin when this entry was made. The pin may end later by now."""

    at: float
    number: int
    pin: _Pin = field(compare=False)


class Pins:
    """The pins of one index.

    A block stays while at least one owner pins it, unless the index is cleared or the block proves
    unreadable.

    Args:
        index: the index of the blocks.
        limit: the largest number of pins at a time.
        owner_limit: the largest number of pins of one owner; None for `limit`.
    """

    def __init__(self, index: BlockIndex, limit: int, owner_limit: int | None = None) -> None:
        self._index = index
        self._limit = limit
        self._owner_limit = limit if owner_limit is None else owner_limit
        self._pins: dict[Hashable, dict[bytes, _Pin]] = {}
        self._count = 0
        self._ends: list[_End] = []
        self._noted = 0

    def pin(self, keys: Iterable[bytes], owner: Hashable, until: float) -> int:
        """Pin the blocks of `keys` that have a slot, or extend the pins that `owner` has on them.

        Args:
            keys: the keys of a prefix, first block first.
            owner: the owner, who may end these pins.
            until: the time when the pins end by themselves, by the clock of `expire`.

        Returns:
            The number of blocks that were not pinned because of the limit.
        """
        refused = 0
        for key in keys:
            known = self._pins.get(owner, {}).get(key)
            if known is not None and self._index.holds(known.block):
                known.until = max(known.until, until)
                continue
            if known is not None:
                self._drop(known)
            own = len(self._pins.get(owner, ()))
            if self._count >= self._limit or own >= self._owner_limit:
                refused += key in self._index
                continue
            block = self._index.pin(key)
            if block is not None:
                pin = _Pin(owner, block, until)
                self._pins.setdefault(owner, {})[key] = pin
                self._count += 1
                self._note_end(pin)
        return refused

    def unpin(self, owner: Hashable, keys: Iterable[bytes] | None = None) -> bool:
        """End the pins of `owner` on the blocks of `keys`; None for all its pins. Returns whether
        it had any of them."""
        own = self._pins.get(owner, {})
        ended = [own[key] for key in (own if keys is None else keys) if key in own]
        for pin in ended:
            self._drop(pin)
        return bool(ended)

    def expire(self, now: float) -> None:
        """End the pins whose time is over at `now`, in seconds of the caller's clock."""
        while self._ends and self._ends[0].at <= now:
            pin = heapq.heappop(self._ends).pin
            if not self._is_pinned(pin):
                continue
            if pin.until > now:
                self._note_end(pin)
            else:
                self._drop(pin)

    def clear(self) -> None:
        """Forget all pins, after the index was cleared."""
        self._pins.clear()
        self._ends.clear()
        self._count = 0

    def recount(self) -> list[Block]:
        """Begin again from the pins in the table, after an error that may have lost one between the
        table, the index and the ends. Returns the pinned blocks, each once for each pin."""
        self._pins = {owner: own for owner, own in self._pins.items() if own}
        pins = [pin for own in self._pins.values() for pin in own.values()]
        self._count = len(pins)
        self._ends = [_End(pin.until, number, pin) for number, pin in enumerate(pins)]
        self._noted = len(pins)
        heapq.heapify(self._ends)
        return [pin.block for pin in pins]

    def _note_end(self, pin: _Pin) -> None:
        self._noted += 1
        heapq.heappush(self._ends, _End(pin.until, self._noted, pin))
        if len(self._ends) > 2 * self._count + _STALE:
            # Their owners have ended the other pins.
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
