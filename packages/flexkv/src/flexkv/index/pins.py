# SPDX-License-Identifier: Apache-2.0
"""What keeps blocks in host memory: pins, and the softer retention that any client may ask for.

The module is pure and single-threaded; callers pass the time. Each pin that ends costs O(log n).
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from flexkv.index.block_index import Block, BlockIndex

logger = logging.getLogger(__name__)

_STALE = 1024
"""The heap of ends may hold twice as many entries as there are pins, and this many more."""

_PIN_SHARE = 2
"""At most half of the arena can be pinned. The other half holds blocks that are being stored or
fetched, and all unpinned blocks. Not tuned."""
_RETAINED_SHARE = 4
"""At most a quarter of the arena can be retained, by an owner half of that: any client may ask for
it, and other blocks must stay, too. Not tuned."""


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
    unreadable. There are at most `limit` pins at a time, and at most `owner_limit` of one owner.
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
        """Pin the blocks of a prefix that have a slot, or extend the pins that `owner` has on them,
        until a time by the clock of `expire`. Returns how many blocks were not pinned because of
        the limit."""
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


class HostPins:
    """The pins and the retained blocks of one index. Callers pass the time, in seconds of their
    clock. A hold lasts `seconds` if no time is given. `refused`: how many blocks were not pinned or
    retained because of a limit."""

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
