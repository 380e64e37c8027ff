# SPDX-License-Identifier: Apache-2.0
"""What the events of a pool's engines say of blocks that their keys do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, islice
from typing import Protocol

from flexkv.service import messages as wire
from flexkv.service.pool_keys import TierKeys
from flexkv.types.changes import Changes, Medium

ENTRY_BYTES = 200
"""What a description takes besides its text, about: key, objects and their places in two tables."""
_LEAVING = 4096
"""Blocks that have left a tier, and may be on their way to another. Not tuned."""
_PART = 128
"""Blocks that one step of `again` looks at, between two reads of an engine. Not tuned."""


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
