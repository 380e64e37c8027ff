# SPDX-License-Identifier: Apache-2.0
"""The changes of loadable blocks, for the KV events of vLLM's `OffloadingConnector`."""

from __future__ import annotations

from vllm.v1.kv_offload.base import Locality, OffloadingEvent, OffloadKey

from flexkv import KVCache
from flexkv.types.changes import Medium
from flexkv_vllm.compat.offloading import EVENT_MEDIA


class OffloadedBlocks:
    """The reported loadable blocks. Single-threaded.

    Args:
        cache: the cache of the engine; watched from now on. The first calls of `take` report the
            blocks that its disks hold already.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._told: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        self._failed = False
        cache.watch()

    @property
    def pending(self) -> bool:
        """Whether `take` has changes to report. After an error, False until `take` succeeds: an
        engine at rest does not repeat it for ever."""
        return not self._failed and self._cache.has_changes

    def take(self) -> list[OffloadingEvent]:
        """The changes since the last call, removals first within each medium. Many changes take
        several calls; see `pending`."""
        self._failed = True
        came: dict[Medium, list[OffloadKey]] = {medium: [] for medium in Medium}
        left: dict[Medium, list[OffloadKey]] = {medium: [] for medium in Medium}
        for medium, key, loadable in self._cache.drain_changes():
            told = self._told[medium]
            if loadable == (key in told):
                continue
            if loadable:
                told.add(key)
                came[medium].append(OffloadKey(key))
            else:
                told.discard(key)
                left[medium].append(OffloadKey(key))
        self._failed = False
        return [
            OffloadingEvent(keys, EVENT_MEDIA[medium], removed, Locality.LOCAL)
            for medium in Medium
            for keys, removed in ((left[medium], True), (came[medium], False))
            if keys
        ]
