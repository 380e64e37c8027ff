# SPDX-License-Identifier: Apache-2.0
"""Keys of blocks in memory that the engines of a pool read: of blocks on disks, and of blocks that
engines compute or store. Requests of other engines wait for those instead of computing them."""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.host.board import CELLS
from flexkv.host.memory_file import Pages, create_file
from flexkv.index.key_set import key_set, key_set_bytes
from flexkv.service.lobby import RefusalError
from flexkv.transfer.fetcher import Fetcher
from flexkv.types.changes import Changes, Medium

logger = logging.getLogger(__name__)


class PoolKeys:
    """A set of up to `most` keys in memory that the engines of a pool read, by the descriptor
    `fd`."""

    def __init__(self, most: int) -> None:
        size = key_set_bytes(most)
        self.fd = create_file(size, Pages.ORDINARY)
        self._keys = key_set(mmap.mmap(self.fd, size), is_owner=True)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class TierKeys(PoolKeys):
    """The keys of the blocks that disks have. A key shows a moment after its block is written, and
    for a moment after it has left: a fetch tells."""

    _lacks_some = False

    def note(self, changes: Sequence[Changes], *, are_all: bool) -> None:
        """Note what came and left. `are_all`: all changes so far are known now, of blocks from
        before the start, too."""
        for change in changes:
            if change.medium is Medium.DISK:
                self._keys.remove(change.removed)
                self._add(change.added)
        if are_all and not self._lacks_some:
            self._keys.is_complete = True

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each of `keys` whether a disk has its block."""
        return self._keys.contains(keys)

    def _add(self, keys: Sequence[bytes]) -> None:
        refused = self._keys.add(keys)
        if refused and not self._lacks_some:
            self._lacks_some = True
            self._keys.is_complete = False
            logger.error(
                "the disks have more blocks than the %d that engines know of; engines ask the "
                "service for the others",
                len(self._keys),
            )


ANNOUNCED_SECONDS = 10.0
"""An announcement ends after so long without a block that is published: the engine hangs, or takes
longer for them than others should wait. Not tuned."""


_LEAST = 1024
"""The set has room for as many keys at least, and for those of a whole pool."""


class AnnouncedKeys(PoolKeys):
    """The keys of the blocks that engines of one pool compute or store, for which its fetches wait.
    Single-threaded."""

    def __init__(self, slots: int, fetcher: Fetcher) -> None:
        super().__init__(max(_LEAST, slots))
        self._fetcher = fetcher

    def begin(self, keys: Sequence[bytes]) -> None:
        """An engine stores these blocks. Engines do not see those for which there is no room."""
        self._keys.add(self._fetcher.announce(keys))

    def end(self, keys: Sequence[bytes]) -> None:
        """What was begun with these keys has ended. The blocks are ready or not."""
        self._keys.remove(self._fetcher.retract(keys))


@dataclass(slots=True, eq=False)
class _Computation:
    """A request that computes blocks which the engine is to store: when it began or the last of its
    blocks was published, by time.monotonic(), and the keys of its blocks that are not published."""

    progressed: float
    keys: set[bytes]


class Announcements:
    """The announcements of one engine, at most `most` blocks at once: of stores that are ordered,
    and of prompts that its requests compute. A block may be announced as both. Single-threaded."""

    def __init__(self, keys: AnnouncedKeys, most: int) -> None:
        self._keys = keys
        self._most = most
        self._stores: dict[int, tuple[float, list[bytes]]] = {}
        self._requests: dict[str, _Computation] = {}
        self._by_key: dict[bytes, str] = {}

    def begin(self, cell: int, keys: Sequence[bytes]) -> None:
        """The store of this cell of the board has these blocks, beside others. Raises RefusalError
        if there is no such cell, or so many blocks cannot be."""
        if not 0 <= cell < CELLS:
            raise RefusalError(f"cell {cell} is none of the board")
        if sum(len(known) for _, known in self._stores.values()) + len(keys) > self._most:
            raise RefusalError(f"more than {self._most} blocks are announced")
        _, known = self._stores.setdefault(cell, (time.monotonic(), []))
        known += keys
        self._keys.begin(keys)

    def end(self, cell: int) -> None:
        """The store of this cell has ended. Idempotent."""
        _, keys = self._stores.get(cell, (0.0, ()))
        if keys:
            self._keys.end(keys)
        self._stores.pop(cell, None)

    def begin_request(self, request: str, keys: Sequence[bytes]) -> None:
        """A request computes these blocks of its prompt. Blocks that another one of this engine
        computes, or for which there is no room, are left out."""
        self.end_request(request)
        room = self._most - len(self._by_key)
        new = [key for key in dict.fromkeys(keys[:room]) if key not in self._by_key]
        if not new:
            return
        self._requests[request] = _Computation(time.monotonic(), set(new))
        self._by_key.update(dict.fromkeys(new, request))
        self._keys.begin(new)

    def end_request(self, request: str) -> None:
        """A request computes no more. Idempotent."""
        ended = self._requests.get(request)
        if ended is not None:
            self._keys.end(list(ended.keys))
            for key in ended.keys:
                self._by_key.pop(key, None)
            del self._requests[request]

    def end_requests(self) -> None:
        """What requests compute is not stored."""
        for request in list(self._requests):
            self.end_request(request)

    def published(self, keys: Sequence[bytes]) -> None:
        """These blocks are ready."""
        there = [key for key in dict.fromkeys(keys) if key in self._by_key]
        if not there:
            return
        self._keys.end(there)
        now = time.monotonic()
        for key in there:
            name = self._by_key.pop(key)
            request = self._requests[name]
            request.keys.discard(key)
            request.progressed = now
            if not request.keys:
                del self._requests[name]

    def end_old(self, now: float) -> None:
        """End announcements whose time is over."""
        late = now - ANNOUNCED_SECONDS
        for cell in [cell for cell, (begun, _) in self._stores.items() if begun < late]:
            self.end(cell)
        for name in [name for name, each in self._requests.items() if each.progressed < late]:
            self.end_request(name)

    def clear(self) -> None:
        """End all."""
        for cell in list(self._stores):
            self.end(cell)
        self.end_requests()
