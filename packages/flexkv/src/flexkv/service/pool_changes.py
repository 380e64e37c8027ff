# SPDX-License-Identifier: Apache-2.0
"""Which blocks of its pool an engine knows of, and what it is told of changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from flexkv.index.block_index import IndexReader
from flexkv.index.key_set import KeySet
from flexkv.service import messages as wire
from flexkv.service.line import Line
from flexkv.types.changes import Changes, Medium, changes_of, note

_AT_ONCE = 2048
"""Blocks that one `compare` looks at: below a millisecond. Not tuned."""


class PoolChanges:
    """What an engine is told of changes. It remembers the key of each block that it has reported,
    so that it finds those that left while the engine was not attached. Those that came meanwhile
    are repeated. Single-threaded; `watches` says whether the engine wants to know of changes."""

    def __init__(self, reader: IndexReader, line: Line) -> None:
        self._reader = reader
        self._line = line
        self.watches = False
        self._changed: dict[Medium, dict[bytes, bool]] = {medium: {} for medium in Medium}
        self._known: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        self._unsure: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        self._again: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        self._watch = self._ended = 0
        self._is_torn = False
        self._texts: dict[bytes, bytes] = {}

    @property
    def is_empty(self) -> bool:
        """Whether `drain` returns nothing."""
        return not self._is_torn and not any(self._changed.values())

    @property
    def awaits_changes(self) -> bool:
        return self._ended != self._watch

    def drain(self) -> list[Changes]:
        """See `CacheClient.drain_changes`.

        Raises:
            RuntimeError: after `tear`, until `watch`.
        """
        if self._is_torn:
            raise RuntimeError("an error may have lost changes of blocks; watch again to get all")
        changes = [
            each
            for medium, keys in self._changed.items()
            for each in changes_of(medium, keys, self._texts)
        ]
        self._changed = {medium: {} for medium in Medium}
        self._texts = {}
        return changes

    def watch(self, *, lower: bool = False) -> None:
        if not lower:
            self.watches, self._is_torn = True, False
        self._list_again([Medium.DISK] if lower else Medium)

    def resume(self) -> None:
        """Go on with a new connection."""
        if self.watches:
            self._line.put(wire.Watch(self._watch))

    def _list_again(self, media: Iterable[Medium]) -> None:
        """Report all blocks again. Those that the service repeats come first, with their
        descriptions; the others are compared with what is there."""
        for medium in media:
            self._changed[medium] = {}
            self._again[medium] = self._known[medium] | self._unsure[medium]
        self._watch += 1
        self.resume()

    def tear(self) -> None:
        """An error may have lost changes. Their reader has to watch again."""
        self._is_torn = self.watches

    def describe(self, described: Mapping[bytes, bytes]) -> None:
        for part in wire.described_parts(described):
            self._line.put(wire.Describe([*part], [*part.values()]))

    def hear(self, message: wire.Changed | wire.Repeated) -> None:
        """The service tells of a change, or has repeated all that is there."""
        if isinstance(message, wire.Repeated):
            self._end_repetition(message)
            return
        known, unsure = self._known[message.medium], self._unsure[message.medium]
        again = self._again[message.medium]
        removed = [key for key in message.removed if key in known or key in unsure]
        known.difference_update(removed)
        unsure.difference_update(removed)
        new = {key for key in message.added if key not in known and key not in unsure}
        known |= new
        added = [key for key in message.added if key in new or key in again]
        if message.texts:
            texts = dict(zip(message.added, message.texts, strict=True))
            self._texts.update((key, texts[key]) for key in added if texts[key])
        self._report(message.medium, removed, added)

    def _end_repetition(self, message: wire.Repeated) -> None:
        self._ended = message.number
        if message.number == self._watch:
            for medium, again in self._again.items():
                self._known[medium] -= again
                self._unsure[medium] |= again

    def lose(self) -> None:
        """The service is gone, and what it says no more is missed from now on."""
        for medium, unsure in self._unsure.items():
            known = self._known[medium]
            if len(unsure) < len(known):
                known, self._unsure[medium] = unsure, known
            self._unsure[medium] |= known
            self._known[medium] = set()

    def compares(self, below: KeySet) -> bool:
        """Whether `compare` has more to do now."""
        unsure = self._unsure
        return bool(unsure[Medium.HOST] or (unsure[Medium.DISK] and below.is_complete))

    def compare(self, below: KeySet) -> None:
        """Compare some of the blocks that were reported with those that are there. The engine is
        attached again.

        Args:
            below: what the disks have. Nothing is compared with it until it is complete.
        """
        if self._unsure[Medium.HOST]:
            keys = self._some(Medium.HOST)
            self._compare(Medium.HOST, keys, self._reader.present(keys))
        elif below.is_complete:
            keys = self._some(Medium.DISK)
            self._compare(Medium.DISK, keys, below.contains(keys))

    def _some(self, medium: Medium) -> list[bytes]:
        unsure = self._unsure[medium]
        return [unsure.pop() for _ in range(min(_AT_ONCE, len(unsure)))]

    def _compare(self, medium: Medium, keys: Sequence[bytes], there: Sequence[bool]) -> None:
        here = list(zip(keys, there, strict=True))
        self._known[medium].update(key for key, is_there in here if is_there)
        added = [key for key, is_there in here if is_there and key in self._again[medium]]
        self._report(medium, [key for key, is_there in here if not is_there], added)

    def _report(self, medium: Medium, removed: list[bytes], added: Collection[bytes]) -> None:
        changed, again = self._changed[medium], self._again[medium]
        for key in removed:
            if key not in again:
                note(changed, key, False)
        for key in added:
            note(changed, key, True)
        again.difference_update(removed, added)
