# SPDX-License-Identifier: Apache-2.0
"""The changes of loadable blocks, as events for vLLM's `OffloadingConnector`, which describes them
if `self_describing_kv_events` is set."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.kv_offload.base import Locality, OffloadingEvent, OffloadKey
from vllm.v1.kv_offload.base import Medium as EventMedium

from flexkv.client import CacheClient
from flexkv.engine.key_epoch import KeyEpoch
from flexkv.types.changes import Medium
from flexkv_vllm.compat.events import MEDIA

EVENT_MEDIA = {medium: EventMedium(name) for medium, name in MEDIA.items()}
"""The names of media in offloading events."""

_BLOCKS_PER_CALL = 2048
"""The most blocks of an earlier epoch whose removal one call reports: some milliseconds of work, as
for the changes of a tier."""


class OffloadedBlocks:
    """Reports the loadable blocks. Single-threaded. After an error nobody knows what subscribers
    know: all reported blocks are taken back, and all blocks are reported again. `cache` is
    watched from now on. The first calls of `take` report the blocks that its disks hold already."""

    def __init__(self, cache: CacheClient, epoch: KeyEpoch) -> None:
        self._cache = cache
        self._epoch = epoch
        self._end = epoch.end
        self._told: set[tuple[Medium, bytes]] = set()
        self._outdated: list[tuple[Medium, bytes]] = []
        self._outdated_end = 0
        self._failed = False
        cache.watch()

    @property
    def pending(self) -> bool:
        """Whether `take` has changes to report. After an error, False until `take` succeeds."""
        outdated = self._outdated or self._end != self._epoch.end
        return not self._failed and (bool(outdated) or self._cache.status.has_changes)

    def take(self) -> list[OffloadingEvent]:
        """The events of changes since the last call, removals first. Many changes take several
        calls; see `pending`."""
        failed, self._failed = self._failed, True
        if not self._outdated and (failed or self._end != self._epoch.end):
            self._cache.watch()
            self._outdated, self._outdated_end = list(self._told), len(self._end)
            self._told, self._end = set(), self._epoch.end
        if self._outdated:
            some = self._outdated[-_BLOCKS_PER_CALL:]
            events = list(_events(some, self._outdated_end, removed=True))
            del self._outdated[-_BLOCKS_PER_CALL:]
        else:
            events = self._take_changes()
        self._failed = False
        return events

    def _take_changes(self) -> list[OffloadingEvent]:
        changes = self._cache.drain_changes()
        gone = [(each.medium, key) for each in changes for key in each.removed]
        gone = [each for each in gone if each in self._told]
        new = [(each.medium, key) for each in changes for key in each.added if self._epoch.has(key)]
        end = len(self._end)
        events = [*_events(gone, end, removed=True), *_events(new, end, removed=False)]
        self._told.difference_update(gone)
        self._told.update(new)
        return events


def _events(
    blocks: Iterable[tuple[Medium, bytes]], end: int, *, removed: bool
) -> Iterable[OffloadingEvent]:
    """An event for each medium of these blocks, whose keys end with `end` bytes of an epoch."""
    names: dict[Medium, list[OffloadKey]] = {}
    for medium, key in blocks:
        names.setdefault(medium, []).append(OffloadKey(key[: len(key) - end]))
    for medium, keys in names.items():
        yield OffloadingEvent(
            keys, EVENT_MEDIA[medium], removed, Locality.LOCAL, removal_expected=True
        )
