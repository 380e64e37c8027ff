# SPDX-License-Identifier: Apache-2.0
"""What engines are told of the blocks of their pool, for KV events: the engine's end, which knows
what it has reported, and the service's end, which keeps the descriptions of blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress, islice
from typing import Protocol

from flexkv.index.block_index import IndexReader
from flexkv.index.key_set import KeySet
from flexkv.service import messages as wire
from flexkv.service.line import Line
from flexkv.service.pool_keys import TierKeys
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
        """See `CacheClient.drain_changes`. Raises RuntimeError after `tear`, until `watch`."""
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
        """Compare some of the blocks that were reported with those that are there, since the engine
        is attached again. Nothing is compared with `below`, what the disks have, until it is
        complete."""
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


ENTRY_BYTES = 200
"""What a description takes besides its text, about: key, objects and their places in two tables."""
_LEAVING = 4096
"""Blocks that have left a tier, and may be on their way to another."""
_PART = 128
"""Blocks that one step of `again` looks at, between two reads of an engine."""


class DescribedCache(Protocol):
    """The cache of a pool; see `SharedCache`."""

    def missing(self, keys: Sequence[bytes], /) -> list[int]: ...
    def describe(self, described: Mapping[bytes, bytes], /) -> None: ...
    def reported(self, keys: Sequence[bytes], /) -> list[bool]: ...
    def listed(self) -> Iterator[list[bytes]]: ...


class PoolDescriptions:
    """The descriptions of blocks in host memory and on disks, up to `most_bytes`; those that have
    been kept for longest give way to others. An engine that stores a block sends its description
    ahead; those of blocks on disk lie beside them, too, and come back with them after a restart of
    the service. Single-threaded."""

    def __init__(self, cache: DescribedCache, below: TierKeys, most_bytes: int) -> None:
        self._cache = cache
        self._below = below
        self._most_bytes = most_bytes
        self._bytes = 0
        self._texts: dict[bytes, bytes] = {}  # a block comes after those that it builds on
        self._leaving: dict[bytes, None] = {}

    def add(self, described: Mapping[bytes, bytes]) -> None:
        """Keep descriptions, also of blocks that are there already."""
        self._cache.describe(described)
        self._keep(described)

    def messages(self, changes: Sequence[Changes]) -> Iterator[wire.Changed]:
        """What engines are told of changes, with the descriptions of the blocks that came."""
        for change in changes:
            for removed in wire.parts(change.removed):
                yield wire.Changed(change.medium, removed, [], [])
            if change.medium is Medium.DISK and change.added:
                self._cache.describe({k: self._texts[k] for k in change.added if k in self._texts})
                self._keep(change.texts)
            yield from _added(change.medium, change.added, self._texts)
            if self._texts and change.removed:
                self._note_leaving(change.removed)

    def again(self) -> Iterator[list[wire.Changed]]:
        """What an engine that begins is told: all blocks, a part at a time; first those that have a
        description. Each part is as old as the last of `messages`: an engine that has read those
        and goes on to read the next ones is told of each block that leaves."""
        for keys in wire.parts(list(self._texts), _PART):
            yield self._repeated(keys)
        for listed in self._cache.listed():
            keys = [key for key in listed if key not in self._texts]
            yield [each for part in wire.parts(keys, _PART) for each in self._repeated(part)]

    def _repeated(self, keys: list[bytes]) -> list[wire.Changed]:
        in_host = compress(keys, self._cache.reported(keys))
        on_disk = compress(keys, self._below.contains(keys))
        return [
            *_added(Medium.HOST, list(in_host), self._texts),
            *_added(Medium.DISK, list(on_disk), self._texts),
        ]

    def _keep(self, described: Mapping[bytes, bytes]) -> None:
        for key, text in described.items():
            self._forget(key)
            self._texts[key] = text
            self._bytes += len(text) + ENTRY_BYTES
        while self._bytes > self._most_bytes:
            self._forget(next(iter(self._texts)))

    def _note_leaving(self, removed: Sequence[bytes]) -> None:
        """Forget the descriptions of blocks that left long ago and are nowhere."""
        self._leaving.update((key, None) for key in removed if key in self._texts)
        keys = list(islice(self._leaving, max(0, len(self._leaving) - _LEAVING)))
        absent, on_disk = self._cache.missing(keys), self._below.contains(keys)
        for key in keys:
            del self._leaving[key]
        for at in absent:
            if not on_disk[at]:
                self._forget(keys[at])

    def _forget(self, key: bytes) -> None:
        text = self._texts.pop(key, None)
        if text is not None:
            self._bytes -= len(text) + ENTRY_BYTES
        self._leaving.pop(key, None)


def _added(
    medium: Medium, keys: Sequence[bytes], texts: Mapping[bytes, bytes]
) -> Iterator[wire.Changed]:
    for part in wire.described_parts({key: texts.get(key, b"") for key in keys}):
        yield wire.Changed(medium, [], [*part], [*part.values()] if any(part.values()) else [])


def joined(change: wire.Changed, later: wire.Changed) -> wire.Changed | None:
    """Two changes that follow each other as one; None if they are none, or too many blocks."""
    alike = change.medium is later.medium and bool(change.texts) == bool(later.texts)
    added, texts = change.added + later.added, change.texts + later.texts
    if not alike or change.removed or later.removed or len(added) > wire.MOST_KEYS:
        return None
    size = sum(map(len, added)) + sum(map(len, texts)) + 2 * wire.HEAD * len(added)
    return None if size > wire.DESCRIBED_BYTES else wire.Changed(change.medium, [], added, texts)
