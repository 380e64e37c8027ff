# SPDX-License-Identifier: Apache-2.0
"""ARC: blocks that were used once and blocks that were used again share the tier adaptively.

Megiddo, Modha: ARC: A Self-Tuning, Low Overhead Replacement Cache. FAST 2003.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from flexkv.eviction.policy import EvictionPolicy, RequestContext


@dataclass(slots=True, eq=False)
class _List:
    """A list of blocks, the least recently used first.

    Attributes:
        order: the blocks in order. A block that is held when its turn comes is taken out, and
            becomes the first again when it is released.
        blocks: the number of its blocks, those that are taken out included.
        ghosts: keys of blocks that were evicted from this list.
    """

    order: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    blocks: int = 0
    ghosts: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


class ARCPolicy(EvictionPolicy):
    """Two lists of blocks and the keys of evicted ones. See `EvictionPolicy`.

    New blocks enter the list of blocks that were used once. A hit moves a block to the list of
    blocks that were used again. If a block returns soon after its eviction, the list that it was
    evicted from was too short and becomes longer.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._once = _List()
        self._again = _List()
        self._list: dict[bytes, _List] = {}
        self._held: set[bytes] = set()
        self._capacity = 0  # the most blocks of the tier so far
        self._goal = 0.0  # the wanted number of blocks in `_once`

    def inserted(self, key: bytes, after: bytes | None, fetched: bool = False) -> None:
        once, again = self._once, self._again
        found = once
        if key in once.ghosts:
            step = max(1.0, len(again.ghosts) / len(once.ghosts))
            self._goal = min(float(self._capacity), self._goal + step)
            del once.ghosts[key]
            found = again
        elif key in again.ghosts:
            step = max(1.0, len(once.ghosts) / len(again.ghosts))
            self._goal = max(0.0, self._goal - step)
            del again.ghosts[key]
            found = again
        found.order[key] = None
        found.blocks += 1
        self._list[key] = found
        self._held.add(key)
        self._capacity = max(self._capacity, len(self._list))

    def hit(self, key: bytes, used: int, context: RequestContext) -> None:
        again, found = self._again, self._list[key]
        if found is not again:
            found.order.pop(key, None)
            found.blocks -= 1
            again.blocks += 1
            self._list[key] = again
        again.order[key] = None
        again.order.move_to_end(key)

    def held(self, key: bytes) -> None:
        self._held.add(key)

    def released(self, key: bytes, used: int) -> None:
        self._held.remove(key)
        order = self._list[key].order
        if key not in order:
            order[key] = None
            order.move_to_end(key, last=False)

    def evicted(self, key: bytes) -> None:
        found = self._list.pop(key)
        self._held.discard(key)
        found.order.pop(key, None)
        found.blocks -= 1
        found.ghosts[key] = None
        once, again = self._once, self._again
        if once.blocks + len(once.ghosts) > self._capacity and once.ghosts:
            once.ghosts.popitem(last=False)
        elif len(self._list) + len(once.ghosts) + len(again.ghosts) > 2 * self._capacity:
            (again if again.ghosts else once).ghosts.popitem(last=False)

    def victim(self) -> bytes | None:
        once, again = self._once, self._again
        while once.order or again.order:
            from_once = once.order and (once.blocks > self._goal or not again.order)
            order = (once if from_once else again).order
            key = next(iter(order))
            if key not in self._held:
                return key
            del order[key]
        return None

    def clear(self) -> None:
        self._begin()
