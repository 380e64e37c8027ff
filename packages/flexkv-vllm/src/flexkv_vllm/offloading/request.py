# SPDX-License-Identifier: Apache-2.0
"""What an offloading manager knows of a request: the names of its blocks, and what vLLM has been
promised of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    OffloadKey,
    ReqContext,
    get_offload_group_idx,
)

from flexkv.client import CacheInfo, FetchId, FetchState
from flexkv.engine.scheduler.fetches import note_media
from flexkv.engine.scheduler.hints import EngineHints
from flexkv.engine.scheduler.options import OptionsReader, RequestOptions
from flexkv.eviction import RequestContext
from flexkv.types.changes import Medium
from flexkv.types.presence import Presence
from flexkv_vllm.compat.core import hit_source
from flexkv_vllm.compat.patches import keys_of
from flexkv_vllm.offloading.events import EVENT_MEDIA

_OPTIONS = ("load", "store", "max_store_tokens", "priority")
"""Parameters of requests that FlexKV follows here. Pins and retention need the cache salt, which
vLLM does not show to a manager: a tenant could end those of another."""


class OfferedBlocks(NamedTuple):
    """Blocks that vLLM wants stored.

    Attributes:
        chain: keys, each behind the block that it builds on, if that has a slot.
        positions: where in `chain` the blocks to store are.
        prefix_starts: positions of blocks that build on none of the chain.
    """

    chain: list[bytes]
    positions: list[int]
    prefix_starts: list[int]


class OffloadedRequest:
    """One request. vLLM looks up its blocks again in every step until it acts. Each block is
    fetched once: a block that does not arrive is a miss until the request runs.

    Attributes:
        from_host: whether blocks in host memory may be loaded for it.
        answers: results of this step's lookups; those of all its blocks, once one is looked up.
        asked: the blocks that vLLM has looked up in this step, in order.
        found: the blocks that the last lookups have found, with one KV cache group also those that
            vLLM has itself; None before the first lookup.
        held: ids of the transfers that hold the found blocks in a cache that others share.
        fetch: brings its blocks from lower tiers; None if nothing does.
        stale: whether the cache was reset since the request began: its blocks may build on
            discarded ones.
    """

    def __init__(self, context: ReqContext, options: RequestOptions, info: CacheInfo) -> None:
        self.context = context
        self.options = options
        self.answers: dict[bytes, LookupResult] = {}
        self.asked: list[bytes] = []
        self.found: Sequence[bytes] | None = None
        self.held: list[int] = []
        self.fetch: FetchId | None = None
        self.stale = False
        self.from_host = options.load and may_load_from(context, Medium.HOST)
        # A fetch takes a block from whichever lower tier has it.
        allowed = all(may_load_from(context, medium) for medium in info.media)
        self._from_below = info.may_fetch and options.load and allowed
        self._fetched: Sequence[bytes] = ()
        self._tried: set[bytes] = set()
        self._media: dict[bytes, Medium] = {}
        self._ends: dict[int, bytes] = {}
        self._prompt_tokens = 0

    @property
    def keys(self) -> list[bytes]:
        """The keys of its blocks: in each KV cache group in order."""
        return list(keys_of(self.context))

    # Lookups.

    def answer(self, key: bytes, presence: Presence, *, fetches: bool) -> LookupResult:
        """Whether a block can be loaded, or will be once a lower tier has given it. `fetches`:
        whether its fetch may still bring blocks."""
        if presence is Presence.HOST:
            loads = self.from_host or key in self._media
            return LookupResult.HIT if loads else LookupResult.MISS
        if fetches and key in self._media:
            return LookupResult.HIT_PENDING
        if not self._from_below or key in self._tried or presence is Presence.ABSENT:
            return LookupResult.MISS
        return LookupResult.HIT_PENDING

    def lacking(self) -> list[bytes]:
        """The blocks to fetch, because vLLM has found some that are not in host memory and were not
        fetched before; those in host memory stay there meanwhile. Empty if there are none."""
        found = [key for key in self.asked if self.answers[key] is not LookupResult.MISS]
        pending = [key for key in found if self.answers[key] is LookupResult.HIT_PENDING]
        if self._tried.issuperset(pending):
            return []
        # vLLM looks up windows from their ends on.
        groups: dict[int, list[bytes]] = {}
        for key in dict.fromkeys(found):
            groups.setdefault(get_offload_group_idx(OffloadKey(key)), []).append(key)
        return [key for group in groups.values() for key in sorted(group, key=self._position)]

    def fetches(self, keys: Collection[bytes]) -> None:
        """These blocks are fetched once, from now on."""
        self._tried.update(keys)

    def began_fetch(self, fetch: FetchId | None, keys: Sequence[bytes]) -> None:
        """A fetch of `keys` has begun."""
        self.fetch, self._fetched = fetch, keys

    def note(self, state: FetchState) -> None:
        """Note which tiers give the blocks of its fetch."""
        note_media(self._media, self._fetched, state)

    def may_fetch_again(self) -> None:
        """It has its blocks or needs no more."""
        self._tried.clear()

    def looked_up(self, groups: int) -> None:
        """The lookups of a step are over. `groups`: number of vLLM's KV cache groups."""
        if groups == 1:
            missed = (key for key in self.asked if self.answers[key] is LookupResult.MISS)
            first, keys = next(missed, None), self.keys
            self.found = keys if first is None else keys[: keys.index(first)]
        else:
            self.found = [key for key in self.asked if self.answers[key] is LookupResult.HIT]
        self.answers.clear()
        self.asked.clear()

    def medium(self, key: bytes) -> Medium:
        """The medium from which a block came to host memory, or HOST."""
        return self._media.get(key, Medium.HOST)

    # Its life.

    def began(self) -> tuple[Sequence[bytes], RequestContext]:
        """vLLM computes it from now on. Returns the keys of its blocks that any cache had, and what
        is known of it."""
        self._media.clear()
        keys = self.keys
        # vLLM looks nothing up if it has all itself.
        found = keys if self.found is None else self.found
        self._prompt_tokens = max(map(self._position, keys), default=0)
        hit = max(map(self._position, found), default=0)
        options = self.options
        stores = options.store and options.max_store_tokens is None
        context = RequestContext(
            self._prompt_tokens,
            hit,
            self.context.req_id,
            stores=stores,
            priority=options.priority or 0,
        )
        return found, context

    @property
    def answer_tokens(self) -> int:
        """Tokens of its answer so far, about."""
        tokens = max(map(self._position, self.keys), default=0)
        return max(0, tokens - self._prompt_tokens)

    def forget(self) -> None:
        """The cache was reset."""
        self.stale = True
        self._tried.clear()
        self._media.clear()
        self._ends.clear()

    # Stores.

    def storable(self, keys: Collection[bytes]) -> list[bytes]:
        """Those of the blocks that may be stored."""
        most = self.options.max_store_tokens
        return [key for key in keys if most is None or self._position(key) <= most]

    @property
    def ends(self) -> list[bytes]:
        """In each group the last block that it has and that had a slot."""
        return list(self._ends.values())

    def offer(self, keys: Sequence[bytes], missing: Collection[bytes]) -> OfferedBlocks:
        """Arrange blocks for a store. `missing`: those of them and of `ends` without a slot."""
        before = {group: key for group, key in self._ends.items() if key not in missing}
        offered = OfferedBlocks([], [], [])
        chain, positions, prefix_starts = offered
        for key in keys:
            group = get_offload_group_idx(OffloadKey(key))
            parent = before.get(group)
            before[group] = key
            if key not in missing:
                continue
            if parent is None or chain[-1:] != [parent]:
                prefix_starts.append(len(chain))
            if parent is not None and chain[-1:] != [parent]:
                chain.append(parent)
            positions.append(len(chain))
            chain.append(key)
        return offered

    def have_slots(self, keys: Sequence[bytes]) -> None:
        """These blocks, in order, have slots."""
        for key in keys:
            self._ends[get_offload_group_idx(OffloadKey(key))] = key

    def _position(self, key: bytes) -> int:
        """Tokens of the request before the end of a block."""
        return self.context.get_offload_key_position(OffloadKey(key)) or 0


class RequestMaker(OptionsReader):
    """Makes the state of a request from what vLLM and its user say of it. `allowed`: see
    `OptionsReader`."""

    def __init__(self, allowed: Collection[str] | None, info: CacheInfo) -> None:
        super().__init__(allowed, _OPTIONS, own_tokens=False)
        self._info = info

    def make(self, context: ReqContext) -> OffloadedRequest:
        """The state of a new request."""
        hints = EngineHints(envelope=getattr(context, "kv_hints", None))
        options = self.read(context.req_id, context.kv_transfer_params, hints)
        return OffloadedRequest(context, options, self._info)


def may_load_from(context: ReqContext, medium: Medium) -> bool:
    """Whether the user allows loads from there for a request (`kv_load_tiers`)."""
    locality = Locality.REMOTE if medium.is_shared else Locality.LOCAL
    allowed: bool = context.load_tier_filter.allows(EVENT_MEDIA[medium], locality)
    return allowed


def load_source(request: OffloadedRequest | None, key: bytes) -> Any:
    """vLLM's name of the medium from which a block of a request came."""
    return hit_source(Medium.HOST if request is None else request.medium(key))
