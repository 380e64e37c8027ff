# SPDX-License-Identifier: Apache-2.0
"""The manager's state of a request: the blocks that it may load, and those it waits for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    get_offload_group_idx,
)

from flexkv.client import CacheClient, FetchId, FetchState, Hold
from flexkv.engine.choice.cost import Span
from flexkv.engine.scheduler.engine import EngineRequest
from flexkv.engine.scheduler.fetches import note_media
from flexkv.engine.scheduler.hints import EngineHints
from flexkv.engine.scheduler.options import (
    OptionsReader,
    RequestOptions,
    pin_owner,
    tenant_of,
)
from flexkv.engine.scheduler.request import Match
from flexkv.engine.scheduler.spans import TracedWork
from flexkv.figures.meter import Meter
from flexkv.types.changes import Medium
from flexkv.types.presence import Presence
from flexkv_vllm.compat.offloading import may_load_from

_FIRST_PRESENCE = 16
"""Blocks of the first question to lower tiers. The number doubles each time that they have all: a
prefix may end anywhere. Not tuned."""


class GroupBlocks(NamedTuple):
    """A request's blocks in a KV cache group.

    Attributes:
        number: vLLM's number of the group.
        keys: keys of the complete blocks, in order; vLLM's own list, which grows.
        tokens: tokens of a block.
        window: how many blocks before the end of a hit the group needs; None for all.
    """

    number: int
    keys: Sequence[bytes]
    tokens: int
    window: int | None

    def until(self, tokens: int) -> int:
        """The number of blocks that begin before `tokens` tokens."""
        return min(-(-tokens // self.tokens), len(self.keys))


class FetchPlace(NamedTuple):
    """Where in a request the blocks of a fetch are.

    Attributes:
        first: position of the first block of the prefix.
        blocks: the number of blocks of the prefix; blocks of other groups follow.
        tokens: tokens of a block.
        is_plain: whether the model has one group. With several, a part of a fetch is of no use.
    """

    first: int
    blocks: int
    tokens: int
    is_plain: bool

    def end(self, blocks: int) -> int:
        """Tokens of the request before the end of the first `blocks` blocks of the fetch."""
        return (self.first + min(blocks, self.blocks)) * self.tokens


class RequestBlocks:
    """One request. vLLM looks up its blocks again in every step until it acts. The blocks to fetch
    are collected over a step, and fetched together.

    Each block is fetched once. A block that does not arrive is a miss until the request has loaded
    or lost its blocks.

    Args:
        cache: the cache of the engine.
        context: vLLM's context of the request.
        options: the user's options.
        fetch_ended: called with each fetch that has ended.
        traced: gets them, too.

    Attributes:
        options: the user's options.
        request: vLLM's own object; None until vLLM looks for its hit.
        groups: its blocks in each KV cache group, from then on.
        match: the last answer to vLLM; None if there is none.
        waits: whether blocks of lower tiers count as hits.
        stored: keys of the blocks that vLLM has offered so far, in order, each with the key of the
            block before it in its group.
        stale: whether the cache was reset since the request began: its blocks may build on
            discarded ones.
    """

    def __init__(
        self,
        cache: CacheClient,
        context: ReqContext,
        options: RequestOptions,
        fetch_ended: Callable[[FetchId, FetchState], None],
        traced: TracedWork,
    ) -> None:
        self._cache = cache
        self._fetch_ended = fetch_ended
        self._traced = traced
        self._from_host = options.load and may_load_from(context, Medium.HOST)
        # A fetch takes a block from whichever lower tier has it.
        allowed = all(may_load_from(context, medium) for medium in cache.info.media)
        self._from_below = cache.info.may_fetch and options.load and allowed
        self.options = options
        self.request: EngineRequest | None = None
        self.groups: Sequence[GroupBlocks] = ()
        self.match: Match | None = None
        self.waits = True
        self.stored: dict[bytes, bytes | None] = {}
        self._ends: dict[int, bytes] = {}
        self.stale = False
        self._fetch: FetchId | None = None
        self._fetched: Sequence[bytes] = ()
        self._place: FetchPlace | None = None
        self._noted: FetchState | None = None
        self._tried: set[bytes] = set()
        self._awaited: dict[bytes, Medium] = {}
        self._places: dict[int, dict[bytes, int]] = {}

    def find(self, keys: Sequence[bytes]) -> list[LookupResult]:
        """Whether each block can be loaded, or will be once a lower tier has given it."""
        waits = self._is_waiting()
        presence = self._cache.presence(keys)
        return [self._result(key, each, waits) for key, each in zip(keys, presence, strict=True)]

    def find_prefix(self, keys: Sequence[bytes]) -> list[LookupResult]:
        """The results of `find` before the first miss."""
        count = self._cache.lookup(keys) if self._from_host else 0
        found = [LookupResult.HIT] * count
        size = _FIRST_PRESENCE
        while (self._from_below or self._awaited) and len(found) < len(keys):
            more = self.find(keys[len(found) : len(found) + size])
            if LookupResult.MISS in more:
                return found + more[: more.index(LookupResult.MISS)]
            found += more
            size *= 2
        return found

    @property
    def may_load(self) -> bool:
        """Whether blocks may be loaded for it from some tier."""
        return self._from_host or self._from_below

    def waiting(self, local_tokens: int) -> tuple[FetchId, Span] | None:
        """The fetch that it waits for, and the tokens from `local_tokens` to the end of the fetched
        blocks; None if there is none."""
        fetch, place = self._fetch, self._place
        if fetch is None or place is None:
            return None
        state = self._cache.fetch_state(fetch)
        if state.done:
            return None
        whole = place.is_plain or state.stop == state.length
        end = place.end(state.stop) if whole else local_tokens
        return fetch, Span(local_tokens, max(local_tokens, end))

    def fetch_lacking(
        self, wanted: Sequence[bytes], pending: Iterable[bytes], place: FetchPlace
    ) -> None:
        """The step's lookups are over: fetch those of the blocks `wanted` that lower tiers have.
        Blocks in host memory stay there meanwhile.

        Args:
            wanted: the blocks that vLLM has found.
            pending: those of them that are not in host memory.
            place: where in the request they are.
        """
        if self._tried.issuperset(pending):
            return  # they are being fetched
        self._tried.update(wanted)
        fetch = self._cache.fetch(wanted, priority=self.options.priority or 0)
        self._end_fetch()  # only now, so that what is under way goes on for the new one
        self._fetch, self._fetched, self._place = fetch, wanted, place
        self._is_waiting()

    def fetch_nothing(self, wanted: Sequence[bytes]) -> None:
        """In place of `fetch_lacking`, after an error: vLLM waits for no block that this step has
        looked up and no fetch brings."""
        self._tried.update(wanted)

    def offer(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """vLLM wants these blocks stored, again perhaps after a preemption.

        Returns the keys of those that have no slot, each behind that of the last block before it
        in its group that has one or is to get one now; and where in that list they are.
        """
        missing = {keys[i] for i in self._cache.missing(keys)}
        offered = set(keys)

        def has_slot(key: bytes) -> bool:
            return key not in missing if key in offered else not self._cache.missing((key,))

        chain: list[bytes] = []
        places: dict[bytes, int] = {}
        previous: dict[int, bytes] = {}
        for key in keys:
            group = get_offload_group_idx(OffloadKey(key))
            before = self.stored.setdefault(key, previous.get(group, self._ends.get(group)))
            previous[group] = key
            if key not in missing:
                self._ends[group] = key
                continue
            while before is not None and before not in places and not has_slot(before):
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

    def storable(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the blocks that may be stored."""
        most = self.options.max_store_tokens
        if most is None:
            return list(keys)
        allowed = {key for each in self.groups for key in each.keys[: most // each.tokens]}
        return [key for key in keys if key in allowed]

    def places(
        self, keys: Iterable[bytes]
    ) -> Iterator[tuple[GroupBlocks, list[tuple[int, bytes]]]]:
        """The positions of those of the blocks that it has, by group."""
        wanted = list(keys)
        for group in self.groups:
            known = self._places.setdefault(group.number, {})
            for at in range(len(known), len(group.keys)):
                known[group.keys[at]] = at
            yield group, [(known[key], key) for key in wanted if key in known]

    def keep(self, keys: Sequence[bytes]) -> None:
        """Pin or retain blocks that it uses, if it asks for that."""
        options, request = self.options, self.request
        if request is None or not keys:
            return
        if options.pin:
            self._cache.hold(Hold.PIN, keys, pin_owner(request, options), options.pin_seconds)
        if options.retain_seconds is not None:
            self._cache.hold(Hold.RETAIN, keys, tenant_of(request), options.retain_seconds)

    def release(self) -> None:
        """It has ended: retain its blocks no longer, or demote them, if it asks for that."""
        options = self.options
        if self.request is None or not (options.release or options.demote):
            return
        keys = [key for group in self.groups for key in group.keys]
        if options.release:
            self._cache.unhold(Hold.RETAIN, tenant_of(self.request), keys)
        if options.demote:
            self._cache.demote(keys)

    def used(self, tokens: int) -> list[bytes]:
        """Keys of the blocks that a hit of the first `tokens` tokens uses."""
        used: list[bytes] = []
        for group in self.groups:
            end = min(tokens // group.tokens, len(group.keys))
            used += group.keys[max(0, end - group.window) if group.window else 0 : end]
        return used

    def prompt(self) -> Sequence[bytes]:
        """Keys of all of its complete blocks in the group that reaches furthest back."""
        furthest = self._furthest
        return () if furthest is None else list(furthest.keys)

    def others(self) -> list[bytes]:
        """Keys of all of its complete blocks in the other groups."""
        furthest = self._furthest
        return [key for group in self.groups if group is not furthest for key in group.keys]

    @property
    def _furthest(self) -> GroupBlocks | None:
        full = (group for group in self.groups if group.window is None)
        return next(full, max(self.groups, key=lambda group: group.window or 0, default=None))

    def give_up(self) -> None:
        """End the fetch, whose blocks are not worth waiting for. They are not fetched again before
        the request has run."""
        self._end_fetch()

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
        self._awaited.clear()
        self.match = None
        self.stored.clear()
        self._ends.clear()
        self.stale = True

    def media(self) -> dict[bytes, Medium]:
        """The medium of each block that had to come from a lower tier, as far as it is known now.
        HOST for blocks that no tier has given."""
        self._is_waiting()
        return dict(self._awaited)

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

    def _result(self, key: bytes, presence: Presence, waits: bool) -> LookupResult:
        if presence is Presence.HOST:
            loadable = self._from_host or key in self._awaited
            return LookupResult.HIT if loadable else LookupResult.MISS
        if not self.waits:
            return LookupResult.MISS
        if waits and key in self._awaited:
            return LookupResult.HIT_PENDING
        if not self._from_below or key in self._tried or presence is Presence.ABSENT:
            return LookupResult.MISS
        return LookupResult.HIT_PENDING

    def _end_fetch(self) -> None:
        fetch = self._fetch
        if fetch is not None:
            state = self._cache.end_fetch(fetch)
            self._note(state)
            self._fetch = None
            self._fetch_ended(fetch, state)
            self._traced.fetched(self.request, state)


_OPTIONS = (
    *("load", "store", "max_load_tokens", "max_store_tokens"),
    *("pin", "pin_seconds", "pin_name", "unpin"),
    *("session", "returns", "retain_seconds", "release", "priority", "demote"),
)
"""Parameters of requests that FlexKV follows here: all but `load_mode`."""


class RequestMaker:
    """Makes the state of a request from what vLLM and its user say of it.

    Args:
        cache: the cache of the engine.
        allowed: see `OptionsReader`.
        fetch_ended: see `RequestBlocks`.

    Attributes:
        traced: what FlexKV does for the requests.
    """

    def __init__(
        self,
        cache: CacheClient,
        allowed: Collection[str] | None,
        fetch_ended: Callable[[FetchId, FetchState], None],
    ) -> None:
        self._cache = cache
        self._options = OptionsReader(allowed, _OPTIONS, own_tokens=False)
        self._options.set_media(cache.info.media)
        self._fetch_ended = fetch_ended
        self.traced = TracedWork()

    def put_counts(self, meter: Meter) -> None:
        """See `OptionsReader.put_counts`."""
        self._options.put_counts(meter)

    def follow(self, blocks: RequestBlocks, request: EngineRequest) -> None:
        """vLLM's own object of the request is known from now on. Its pins end, if it says so."""
        if blocks.request is request:
            return
        blocks.request, options = request, blocks.options
        blocks.options = self._add_hints(options, request)
        if options.unpin:
            self._cache.unhold(Hold.PIN, pin_owner(request, options))

    def make(self, context: ReqContext) -> RequestBlocks:
        """The state of a new request."""
        hints = EngineHints(envelope=getattr(context, "kv_hints", None))
        options = self._options.read(context.req_id, context.kv_transfer_params, hints)
        return RequestBlocks(self._cache, context, options, self._fetch_ended, self.traced)

    def _add_hints(self, options: RequestOptions, request: EngineRequest) -> RequestOptions:
        """`options`, with hints of vLLM's own object, which its context of the request lacks."""
        session = None if options.session else getattr(request, "session_id", None)
        extra = getattr(getattr(request, "sampling_params", None), "extra_args", None)
        priority = getattr(request, "priority", None) if options.priority is None else None
        hints = EngineHints(session, extra, priority=priority or None)
        found = self._options.read(request.request_id, None, hints)
        returns, seconds = options.returns, options.retain_seconds
        return replace(
            options,
            session=options.session or found.session,
            returns=found.returns if returns is None else returns,
            retain_seconds=found.retain_seconds if seconds is None else seconds,
            priority=found.priority if options.priority is None else options.priority,
        )
