# SPDX-License-Identifier: Apache-2.0
"""Which blocks of its pool an engine knows of, and what it is told of changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from flexkv.index.block_index import IndexReader
from flexkv.index.key_set import KeySet
from flexkv.service import messages as wire
from flexkv.service.line import Line
from flexkv.types.changes import Changes, Medium, changes_of, note

_AT_ONCE = 2048
"""Blocks that one `compare` looks at: below a millisecond. Not tuned."""


class PoolChanges:
    """Single-threaded. It remembers the key of each block that it has reported, so that it finds
    those that left while the engine was not attached. Of the blocks that came meanwhile, it reports
    those that the engine has stored itself.

    Args:
        reader: of the pool's index; borrowed.
        line: to the service; borrowed.

    Attributes:
        watches: whether the engine wants to know of changes.
    """

    def __init__(self, reader: IndexReader, line: Line) -> None:
        self._reader = reader
        self._line = line
        self.watches = False
        self._changed: dict[Medium, dict[bytes, bool]] = {medium: {} for medium in Medium}
        self._known: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        self._unsure: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        self._lost: list[bytes] = []
        self._texts: dict[bytes, bytes] = {}
        self._drained_texts: dict[bytes, bytes] = {}

    @property
    def is_empty(self) -> bool:
        """Whether `drain` returns nothing."""
        return not any(self._changed.values())

    def drain(self) -> list[Changes]:
        """See `CacheClient.drain_changes`."""
        changes = [
            each for medium, keys in self._changed.items() for each in changes_of(medium, keys)
        ]
        self._changed = {medium: {} for medium in Medium}
        self._drained_texts, self._texts = self._texts, {}
        return changes

    def watch(self) -> None:
        """See `CacheClient.watch`. Called again, if there is a new connection."""
        self.watches = True
        self._line.put(wire.Watch())

    def watch_lower_again(self) -> bool:
        """See `CacheClient.watch_lower_again`."""
        if not self._line.put(wire.Watch()):
            return False
        self._known[Medium.DISK].clear()
        self._unsure[Medium.DISK].clear()
        return True

    def describe(self, described: Mapping[bytes, bytes]) -> None:
        """See `CacheClient.describe`."""
        for part in wire.described_parts(described):
            self._line.put(wire.Describe([*part], [*part.values()]))

    def take_descriptions(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """See `CacheClient.take_descriptions`."""
        texts = self._drained_texts
        return {key: texts.pop(key) for key in keys if key in texts} if texts else {}

    def hear(self, message: wire.Changed) -> None:
        """The service tells of a change. After its start it repeats which blocks are there."""
        known, unsure = self._known[message.medium], self._unsure[message.medium]
        removed = [key for key in message.removed if key in known or key in unsure]
        known.difference_update(removed)
        unsure.difference_update(removed)
        added = [key for key in message.added if key not in known and key not in unsure]
        known.update(added)
        if message.texts:
            texts = dict(zip(message.added, message.texts, strict=True))
            self._texts.update((key, texts[key]) for key in added if texts[key])
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
            self.hear(wire.Changed(Medium.HOST, [], added, []))
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
        changed = self._changed[medium]
        for key in removed:
            note(changed, key, False)
        for key in added:
            note(changed, key, True)
