# SPDX-License-Identifier: Apache-2.0
"""The manager's state of a request: the blocks that vLLM looked up, and those it waits for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    get_offload_group_idx,
)

from flexkv.client import CacheClient, FetchId, FetchState
from flexkv.engine.scheduler.hit_sources import note_media
from flexkv.engine.scheduler.request_options import OptionsReader, RequestOptions
from flexkv.types.changes import Medium
from flexkv.types.presence import Presence
from flexkv_vllm.compat.offloading import may_load_from


class RequestBlocks:
    """One request. vLLM looks up blocks one by one, in any order, and again in every step until it
    acts. The blocks to fetch are therefore collected over a step, and fetched together.

    Each block is fetched once. A block that does not arrive is a miss until the request has loaded
    or lost its blocks.

    Args:
        cache: the cache of the engine.
        context: vLLM's context of the request.
        options: the user's options.

    Attributes:
        options: the user's options.
        stored: keys of the blocks that vLLM has offered so far, in order, each with the key of the
            block before it in its group.
        stale: whether the cache was reset since the request began: its blocks may build on
            discarded ones.
    """

    def __init__(self, cache: CacheClient, context: ReqContext, options: RequestOptions) -> None:
        self._cache = cache
        self._from_host = options.load and may_load_from(context, Medium.HOST)
        # A fetch takes a block from whichever lower tier has it.
        allowed = all(may_load_from(context, medium) for medium in cache.info.media)
        self._from_below = options.load and allowed
        self.options = options
        self.stored: dict[bytes, bytes | None] = {}
        self._ends: dict[int, bytes] = {}
        self.stale = False
        self._wanted: dict[bytes, None] = {}
        self._lacks = False
        self._fetch: FetchId | None = None
        self._fetched: Sequence[bytes] = ()
        self._noted: FetchState | None = None
        self._tried: set[bytes] = set()
        self._awaited: dict[bytes, Medium] = {}

    def lookup(self, key: bytes) -> LookupResult:
        """Whether the block can be loaded, or will be once a lower tier has given it."""
        # One block a call, thousands for a long prompt: the usual case first.
        if self._cache.lookup((key,)):
            if not (self._from_host or key in self._awaited):
                return LookupResult.MISS
            self._wanted[key] = None
            return LookupResult.HIT
        if key in self._awaited and self._is_waiting():
            self._wanted[key] = None
            return LookupResult.HIT_PENDING
        if not self._from_below or key in self._tried:
            return LookupResult.MISS
        (presence,) = self._cache.presence((key,))
        if presence is Presence.ABSENT:
            return LookupResult.MISS
        self._wanted[key] = None
        self._lacks = True
        return LookupResult.HIT_PENDING

    def fetch_lacking(self) -> None:
        """The step's lookups are over: fetch those blocks that lower tiers have. Blocks in host
        memory stay there meanwhile."""
        wanted, self._wanted = list(self._wanted), {}
        if not self._lacks:
            return
        self._lacks = False
        self._tried.update(wanted)
        fetch = self._cache.fetch(wanted)
        self._end_fetch()  # only now, so that what is under way goes on for the new one
        self._fetch, self._fetched = fetch, wanted
        self._is_waiting()

    def fetch_nothing(self) -> None:
        """In place of `fetch_lacking`, after an error: vLLM waits for no block that this step has
        looked up and no fetch brings."""
        self._tried.update(self._wanted)
        self._wanted.clear()
        self._lacks = False

    def source_of(self, key: bytes) -> Medium:
        """The source of a loaded block."""
        self._is_waiting()
        return self._awaited.get(key, Medium.HOST)

    def offer(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """vLLM wants these blocks stored, again perhaps after a preemption.

        Returns the keys of those that have no slot, each behind that of the last block before it
        in its group that has one or is to get one now; and where in that list they are.
        """
        chain: list[bytes] = []
        places: dict[bytes, int] = {}
        previous: dict[int, bytes] = {}
        for key in keys:
            group = get_offload_group_idx(OffloadKey(key))
            before = self.stored.setdefault(key, previous.get(group, self._ends.get(group)))
            previous[group] = key
            if not self._cache.missing((key,)):
                self._ends[group] = key
                continue
            while before is not None and before not in places and self._cache.missing((before,)):
                before = self.stored[before]
            if before is not None and chain[-1:] != [before]:
                chain.append(before)
            places[key] = len(chain)
            chain.append(key)
        return chain, list(places.values())

    def reserved(self, keys: Iterable[bytes]) -> None:
        """Blocks that vLLM offered have got slots."""
        for key in keys:
            self._ends[get_offload_group_idx(OffloadKey(key))] = key

    def settle(self) -> None:
        """The request has its blocks or needs no more: release them. They may be fetched again."""
        self._end_fetch()
        self._tried.clear()

    def load_no_more(self) -> None:
        """A load has failed: all lookups from now on are misses."""
        self.settle()
        self._from_host = self._from_below = False
        self._awaited.clear()

    def forget(self) -> None:
        """The cache was reset."""
        self.settle()
        self._wanted.clear()
        self._awaited.clear()
        self._lacks = False
        self.stored.clear()
        self._ends.clear()
        self.stale = True

    def _is_waiting(self) -> bool:
        """Whether blocks may still arrive. Notes which tiers give the blocks of the fetch."""
        if self._fetch is None:
            return False
        state = self._cache.fetch_state(self._fetch)
        if state is not self._noted:
            self._note(state)
        return not state.done

    def _note(self, state: FetchState) -> None:
        self._noted = state
        note_media(self._awaited, self._fetched, state)

    def _end_fetch(self) -> None:
        if self._fetch is not None:
            self._note(self._cache.end_fetch(self._fetch))
            self._fetch = None


class RequestMaker:
    """Makes the state of a request from what vLLM and its user say of it.

    Args:
        cache: the cache of the engine.
        allowed: see `OptionsReader`.
    """

    def __init__(self, cache: CacheClient, allowed: Collection[str] | None) -> None:
        self._cache = cache
        self._options = OptionsReader(allowed)

    @property
    def ignored(self) -> int:
        """See `OptionsReader.ignored`."""
        return self._options.ignored

    def make(self, context: ReqContext) -> RequestBlocks:
        """The state of a new request. Its pins end, if it says so."""
        options = self._options.read(context.req_id, context.kv_transfer_params)
        if options.unpin:
            self._cache.unpin(options.pin_name)
        return RequestBlocks(self._cache, context, options)
