# SPDX-License-Identifier: Apache-2.0
"""Keeps the blocks of a hit in a cache that other engines evict from."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.client import CacheClient


class HeldHits:
    """The hits of a step whose load is not ordered. An engine matches a request, and orders the
    load once it has given the request its blocks, a moment later or never. A cache of this engine
    alone evicts nothing meanwhile, and needs no hold.

    Args:
        cache: of the engine.

    Attributes:
        needed: whether `hold` does anything.
    """

    def __init__(self, cache: CacheClient) -> None:
        self._cache = cache
        self.needed = cache.info.is_shared
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        """The number of held hits."""
        return len(self._held)

    def hold(self, request_id: str, keys: Sequence[bytes]) -> bool:
        """Hold the blocks of a request's hit. Returns False if one of them has left meanwhile."""
        if not self.needed:
            return True
        self.release(request_id)
        transfer = self._cache.load(keys)
        if transfer is None:
            return False
        self._held[request_id] = transfer.id
        return True

    def release(self, request_id: str) -> None:
        """The load is ordered, or will not be."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._cache.cancel(held)

    def release_all(self) -> None:
        """The step is scheduled: what was not ordered is matched again."""
        while self._held:
            self._cache.cancel(self._held.popitem()[1])
