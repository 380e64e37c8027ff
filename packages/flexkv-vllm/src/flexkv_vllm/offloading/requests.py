# SPDX-License-Identifier: Apache-2.0
"""What the manager knows of a request: the blocks it was asked for, and those it waits for."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.kv_offload.base import LookupResult, ReqContext

from flexkv import Fetch, KVCache, Medium, Presence
from flexkv_vllm.offloading.compat import may_load_from
from flexkv_vllm.scheduler.wishes import Wishes


class RequestBlocks:
    """One request. vLLM looks blocks up one by one, in any order, and again in every step until it
    acts; so what has to be fetched is collected over a step, and fetched as one.

    Each block is fetched once: what does not come then is a miss, until the request has loaded or
    lost what it had.

    Args:
        cache: of the engine.
        context: vLLM's.
        wishes: of the user.

    Attributes:
        wishes: of the user.
        stored: keys of the blocks that vLLM has offered so far, in order.
        stale: whether the cache was reset since the request began: what it computes may build on
            what the reset was to forget.
    """

    def __init__(self, cache: KVCache, context: ReqContext, wishes: Wishes) -> None:
        self._cache = cache
        self._from_host = wishes.load and may_load_from(context, Medium.HOST)
        self._from_disk = wishes.load and may_load_from(context, Medium.DISK)
        self.wishes = wishes
        self.stored: dict[bytes, None] = {}
        self.stale = False
        self._wanted: dict[bytes, None] = {}
        self._lacks = False
        self._fetch: Fetch | None = None
        self._tried: set[bytes] = set()
        self._awaited: set[bytes] = set()

    def lookup(self, key: bytes) -> LookupResult:
        """Whether the block can be loaded, or will be once a lower tier has given it."""
        presence = self._cache.presence(key)
        if presence is Presence.HOST:
            if not (self._from_host or key in self._awaited):
                return LookupResult.MISS
            self._wanted[key] = None
            return LookupResult.HIT
        if self._fetch is not None and not self._fetch.done and key in self._awaited:
            self._wanted[key] = None
            return LookupResult.HIT_PENDING
        if presence is Presence.BELOW and self._from_disk and key not in self._tried:
            self._wanted[key] = None
            self._lacks = True
            return LookupResult.HIT_PENDING
        return LookupResult.MISS

    def fetch_lacking(self) -> None:
        """The step's lookups are over: fetch what lower tiers have of them. What is in host memory
        stays there meanwhile."""
        wanted, self._wanted = list(self._wanted), {}
        if not self._lacks:
            return
        self._lacks = False
        self._tried.update(wanted)
        fetch = self._cache.fetch(wanted)
        self._end_fetch()  # only now, so that what is under way goes on for the new one
        self._fetch = fetch
        if fetch is not None:
            self._awaited.update(fetch.awaited)

    def source_of(self, key: bytes) -> Medium:
        """Where a block that is loaded came from."""
        return Medium.DISK if key in self._awaited else Medium.HOST

    def offer(self, keys: Sequence[bytes]) -> list[bytes]:
        """vLLM wants these blocks stored; the whole prefix that it has offered, these last."""
        for key in keys:
            self.stored.pop(key, None)
        before = list(self.stored)
        self.stored.update(dict.fromkeys(keys))
        return [*before, *keys]

    def settle(self) -> None:
        """The request has what it wanted, or wants nothing any more: blocks are kept for it no
        longer, and may be fetched again."""
        self._end_fetch()
        self._tried.clear()

    def forget(self) -> None:
        """The cache was reset."""
        self.settle()
        self._wanted.clear()
        self._awaited.clear()
        self._lacks = False
        self.stored.clear()
        self.stale = True

    def _end_fetch(self) -> None:
        if self._fetch is not None:
            self._cache.end_fetch(self._fetch)
            self._fetch = None
