# SPDX-License-Identifier: Apache-2.0
"""Which blocks of its pool an engine knows of, and what it is told of changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from flexkv.index.block_index import IndexReader
from flexkv.index.key_set import KeySet
from flexkv.service import messages as wire
from flexkv.types.changes import Changes, Medium

_AT_ONCE = 2048
"""Blocks that one `compare` looks at: below a millisecond. Not tuned."""


class PoolChanges:
    """Single-threaded. It remembers the key of each block that it has reported, so that it finds
    those that left while the engine was not attached. Of the blocks that came meanwhile, it reports
    those that the engine has stored itself.

    Args:
        reader: of the pool's index; borrowed.

    Attributes:
        watches: whether the engine wants to know of changes.
    """

    def __init__(self, reader: IndexReader) -> None:
        self._reader = reader
        self.watches = False
        self._changes: deque[Changes] = deque()
        self._known: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        self._unsure: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        self._lost: list[bytes] = []

    @property
    def is_empty(self) -> bool:
        """Whether `drain` returns nothing."""
        return not self._changes

    def drain(self) -> list[Changes]:
        """See `CacheClient.drain_changes`."""
        changes = list(self._changes)
        self._changes.clear()
        return changes

    def hear(self, message: wire.Changed) -> None:
        """The service tells of a change. After its start it repeats which blocks are there."""
        known, unsure = self._known[message.medium], self._unsure[message.medium]
        removed = [key for key in message.removed if key in known or key in unsure]
        known.difference_update(removed)
        unsure.difference_update(removed)
        added = [key for key in message.added if key not in known and key not in unsure]
        known.update(added)
        self._report(message.medium, removed, added)

    def lose(self, stored: Sequence[Sequence[bytes]]) -> None:
        """The service is gone, and what it says no more is missed from now on.

        Args:
            stored: keys of stores that it has published, or has not.
        """
        if not self.watches:
            return
        self._lost += (key for keys in stored for key in keys)
        for medium, unsure in self._unsure.items():
            known = self._known[medium]
            if len(unsure) < len(known):
                known, self._unsure[medium] = unsure, known
            self._unsure[medium] |= known
            self._known[medium] = set()

    def compares(self, below: KeySet) -> bool:
        """Whether `compare` has more to do now."""
        is_unsure = self._lost or self._unsure[Medium.HOST]
        return bool(is_unsure or (self._unsure[Medium.DISK] and below.is_complete))

    def compare(self, below: KeySet) -> None:
        """Compare some of the blocks that were reported with those that are there. The engine is
        attached again.

        Args:
            below: what the disks have. Nothing is compared with it until it is complete.
        """
        if self._unsure[Medium.HOST]:
            keys = self._some(Medium.HOST)
            self._compare(Medium.HOST, keys, self._reader.present(keys))
        elif self._lost:
            keys, self._lost = self._lost, []
            there = self._reader.present(keys)
            added = [key for key, is_there in zip(keys, there, strict=True) if is_there]
            self.hear(wire.Changed(Medium.HOST, [], added))
        elif below.is_complete:
            keys = self._some(Medium.DISK)
            self._compare(Medium.DISK, keys, below.contains(keys))

    def _some(self, medium: Medium) -> list[bytes]:
        unsure = self._unsure[medium]
        return [unsure.pop() for _ in range(min(_AT_ONCE, len(unsure)))]

    def _compare(self, medium: Medium, keys: Sequence[bytes], there: Sequence[bool]) -> None:
        here = list(zip(keys, there, strict=True))
        self._known[medium].update(key for key, is_there in here if is_there)
        self._report(medium, [key for key, is_there in here if not is_there], ())

    def _report(self, medium: Medium, removed: list[bytes], added: Collection[bytes]) -> None:
        if removed or added:
            self._changes.append(Changes(medium, removed, list(added)))
