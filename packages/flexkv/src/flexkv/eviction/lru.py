# SPDX-License-Identifier: Apache-2.0
"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict


class LRUPolicy:
    """Evicts the key whose last use is longest ago. See `EvictionPolicy`."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def add(self, key: bytes) -> None:
        self._order[key] = None

    def remove(self, key: bytes) -> None:
        del self._order[key]

    def touch(self, key: bytes) -> None:
        self._order.move_to_end(key)

    def victim(self) -> bytes | None:
        return next(iter(self._order), None)

    def clear(self) -> None:
        self._order.clear()
