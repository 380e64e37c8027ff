# SPDX-License-Identifier: Apache-2.0
"""The changes of loadable blocks, for the KV events of vLLM's `OffloadingConnector`."""

from __future__ import annotations

from vllm.v1.kv_offload.base import Locality, OffloadingEvent, OffloadKey

from flexkv.client import CacheClient
from flexkv_vllm.compat.offloading import EVENT_MEDIA


class OffloadedBlocks:
    """The reported loadable blocks. Single-threaded.

    Args:
        cache: the cache of the engine; watched from now on. The first calls of `take` report the
            blocks that its disks hold already.
    """

    def __init__(self, cache: CacheClient) -> None:
        self._cache = cache
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
        changes = self._cache.drain_changes()
        self._failed = False
        return [
            OffloadingEvent(
                [OffloadKey(key) for key in keys], EVENT_MEDIA[each.medium], removed, Locality.LOCAL
            )
            for each in changes
            for keys, removed in ((each.removed, True), (each.added, False))
            if keys
        ]
