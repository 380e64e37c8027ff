# SPDX-License-Identifier: Apache-2.0
"""The changes of loadable blocks, for the KV events of vLLM's `OffloadingConnector`."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.kv_offload.base import Locality, OffloadingEvent, OffloadKey

from flexkv import KVCache
from flexkv.changes import Medium
from flexkv_vllm.compat.offloading import EVENT_MEDIA


class OffloadedBlocks:
    """The reported loadable blocks. Single-threaded.

    A disk may name a block by a digest of its key. Such a block is reported only if this process
    has had it in host memory. Blocks that were on disk at the start are reported once they are
    loaded.

    Args:
        cache: the cache of the engine; watched from now on.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._told: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        self._keys: dict[bytes, bytes] = {}
        cache.watch()

    def take(self) -> list[OffloadingEvent]:
        """What changed since the last call."""
        came: dict[Medium, list[OffloadKey]] = {medium: [] for medium in Medium}
        left: dict[Medium, list[OffloadKey]] = {medium: [] for medium in Medium}
        changes = self._cache.take_changes()
        for change in changes:
            if change.medium is Medium.HOST and change.loadable:
                self._keys[self._cache.name_of(change.name, Medium.DISK)] = change.name
        for change in changes:
            key = self._key(change.medium, change.name)
            told = self._told[change.medium]
            if key is None or change.loadable == (key in told):
                continue
            if change.loadable:
                told.add(key)
                came[change.medium].append(OffloadKey(key))
            else:
                told.discard(key)
                left[change.medium].append(OffloadKey(key))
        for keys in left.values():
            self._forget(keys)
        return [
            OffloadingEvent(keys, EVENT_MEDIA[medium], removed, Locality.LOCAL)
            for medium in Medium
            for keys, removed in ((left[medium], True), (came[medium], False))
            if keys
        ]

    def _key(self, medium: Medium, name: bytes) -> bytes | None:
        return name if medium is Medium.HOST else self._keys.get(name)

    def _forget(self, keys: Iterable[bytes]) -> None:
        """Discard the name of a block that no tier has."""
        for key in keys:
            if not any(key in told for told in self._told.values()):
                self._keys.pop(self._cache.name_of(key, Medium.DISK), None)
