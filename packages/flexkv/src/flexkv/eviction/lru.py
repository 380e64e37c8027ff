# SPDX-License-Identifier: Apache-2.0
"""Least recently used first."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

_STALE_SHARE = 3
_STALE = 4096
"""The heap is built anew once it has so many entries of each key, and so many more. A key leaves
an entry behind whenever its block is leased or built on."""


class LRUPolicy:
    """Evicts the key whose last use is longest ago. See `EvictionPolicy`.

    A heap of uses. What is no longer so is put right when it comes to the top.
    """

    __slots__ = ("_heap", "_used")

    def __init__(self) -> None:
        self._used: dict[bytes, int] = {}
        self._heap: list[tuple[int, bytes]] = []

    def add(self, key: bytes, used: int) -> None:
        self._used[key] = used
        heappush(self._heap, (used, key))
        if len(self._heap) > _STALE_SHARE * len(self._used) + _STALE:
            self._heap = [(used, key) for key, used in self._used.items()]
            heapify(self._heap)

    def remove(self, key: bytes) -> None:
        del self._used[key]

    def touch(self, key: bytes, used: int) -> None:
        self._used[key] = used

    def victim(self) -> bytes | None:
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
