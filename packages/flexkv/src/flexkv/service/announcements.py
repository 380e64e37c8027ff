# SPDX-License-Identifier: Apache-2.0
"""Blocks that engines of a pool are storing. Requests of other engines wait for them instead of
computing them."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Collection, Sequence

from flexkv.host.board import CELLS
from flexkv.host.memory_file import Pages, create_file
from flexkv.index.key_set import key_set, key_set_bytes
from flexkv.service.lobby import RefusalError
from flexkv.transfer.fetcher import Fetcher

ANNOUNCED_SECONDS = 10.0
"""An announcement ends after so long: the engine hangs, or computes the blocks for longer than
others should wait. Not tuned."""


_SHARE, _LEAST = 4, 1024
"""Engines are granted a fourth of a pool's slots at most, which bounds what they store at once."""


class AnnouncedKeys:
    """The keys of these blocks in one pool, in memory that its engines read. Single-threaded.

    Args:
        slots: of the pool.
        fetcher: of the pool; its fetches wait for the blocks.

    Attributes:
        fd: descriptor of the memory; owned.
    """

    def __init__(self, slots: int, fetcher: Fetcher) -> None:
        size = key_set_bytes(max(_LEAST, slots // _SHARE))
        self.fd = create_file(size, Pages.ORDINARY)
        self._keys = key_set(mmap.mmap(self.fd, size), is_owner=True)
        self._fetcher = fetcher

    def begin(self, keys: Sequence[bytes]) -> None:
        """An engine stores these blocks. Engines do not see those for which there is no room."""
        self._keys.add(self._fetcher.announce(keys))

    def end(self, keys: Sequence[bytes]) -> None:
        """What was begun with these keys has ended. The blocks are ready or not."""
        self._keys.remove(self._fetcher.retract(keys))

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Announcements:
    """The announcements of one engine. Single-threaded.

    Args:
        keys: of its pool; borrowed.
        most: the most blocks that it may announce at once.
    """

    def __init__(self, keys: AnnouncedKeys, most: int) -> None:
        self._keys = keys
        self._most = most
        self._stores: dict[int, tuple[float, list[bytes]]] = {}
        self._blocks = 0

    def begin(self, cell: int, keys: Sequence[bytes]) -> None:
        """The store of this cell of the board has these blocks, beside others.

        Raises:
            RefusalError: there is no such cell, or so many blocks cannot be.
        """
        if not 0 <= cell < CELLS:
            raise RefusalError(f"cell {cell} is none of the board")
        if self._blocks + len(keys) > self._most:
            raise RefusalError(f"more than {self._most} blocks are announced")
        _, known = self._stores.setdefault(cell, (time.monotonic(), []))
        self._keys.begin(keys)
        known += keys
        self._blocks += len(keys)

    def end(self, cell: int) -> None:
        """The store of this cell has ended. Idempotent."""
        _, keys = self._stores.pop(cell, (0.0, ()))
        if keys:
            self._blocks -= len(keys)
            self._keys.end(keys)

    def end_old(self, now: float) -> None:
        """End announcements whose time is over."""
        old = [cell for cell, (begun, _) in self._stores.items() if now > begun + ANNOUNCED_SECONDS]
        self._end_all(old)

    def clear(self) -> None:
        """End all."""
        self._end_all(list(self._stores))

    def _end_all(self, cells: Collection[int]) -> None:
        for cell in cells:
            self.end(cell)
