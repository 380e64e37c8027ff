# SPDX-License-Identifier: Apache-2.0
"""A fetch as tests see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexkv.cache import KVCache
from flexkv.client import FetchId
from flexkv.types.changes import Medium
from packages.inside import blocks_of_fetch


class SeenFetch(int):
    """The id of a fetch. Its other attributes are those of the fetch's state at that time."""

    def __new__(cls, cache: KVCache, fetch: FetchId, keys: Sequence[bytes]) -> SeenFetch:
        made = super().__new__(cls, fetch)
        made._cache, made._keys = cache, keys  # type: ignore[attr-defined]
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache.fetch_state(FetchId(self)), name)

    @property
    def keys(self) -> list[bytes]:
        """Of the blocks that may come."""
        return list(self._keys[: self.stop])

    @property
    def awaited_keys(self) -> list[bytes]:
        """Of the blocks that the arena lacked when the fetch began."""
        return [key for start, stop, _ in self.awaited for key in self._keys[start:stop]]

    @property
    def media(self) -> dict[bytes, Medium]:
        """Of the awaited blocks."""
        return {
            key: medium for start, stop, medium in self.awaited for key in self._keys[start:stop]
        }

    @property
    def blocks(self) -> list[Any]:
        """See `blocks_of_fetch`."""
        return blocks_of_fetch(self._cache, FetchId(self))


def see(
    cache: KVCache, keys: Sequence[bytes], *, queued: bool = False, priority: int = 0
) -> SeenFetch | None:
    """Begin a fetch; None if no tier has a block to add."""
    fetch = cache.fetch(keys, queued=queued, priority=priority)
    return None if fetch is None else SeenFetch(cache, fetch, keys)
