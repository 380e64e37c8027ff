# SPDX-License-Identifier: Apache-2.0
"""Least recently used first."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

from flexkv.eviction.base import EvictionPolicy, RequestContext

_STALE_SHARE = 3
_STALE = 4096
"""The heap is built anew once it has so many entries of each key, and so many more. A key leaves
an entry behind whenever its block is leased or built on."""


class LRUPolicy(EvictionPolicy):
    """Evicts the block whose last use is longest ago. See `EvictionPolicy`.

    It keeps the blocks that are not held, in a heap of uses. An outdated entry is corrected when it
    comes to the top. The index knows when a held block was last used.
    """

    def __init__(self) -> None:
        self._used: dict[bytes, int] = {}
        self._heap: list[tuple[int, bytes]] = []

    def inserted(self, key: bytes, after: bytes | None) -> None:
        """Its number comes with `released`."""

    def hit(self, key: bytes, used: int, context: RequestContext) -> None:
        if key in self._used:
            self._used[key] = used

    def touched(self, key: bytes, used: int) -> None:
        self._used[key] = used

    def held(self, key: bytes) -> None:
        del self._used[key]

    def released(self, key: bytes, used: int) -> None:
        self._used[key] = used
        heappush(self._heap, (used, key))
        if len(self._heap) > _STALE_SHARE * len(self._used) + _STALE:
            self._heap = [(used, key) for key, used in self._used.items()]
            heapify(self._heap)

    def evicted(self, key: bytes) -> None:
        self._used.pop(key, None)

    def victim(self, newcomer: bytes | None = None) -> bytes | None:
        heap = self._heap
        while heap:
            used, key = heap[0]
            last = self._used.get(key)
            if last == used:
                return key
            if last is None:
                heappop(heap)
            else:
                heapreplace(heap, (last, key))
        return None

    def clear(self) -> None:
        self._used.clear()
        self._heap.clear()
