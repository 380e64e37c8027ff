# SPDX-License-Identifier: Apache-2.0
"""Answers the engine's question before it schedules a request: how much of it can be loaded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from flexkv.client import CacheClient, FetchId, FetchState
from flexkv.engine.choice.chooser import Left
from flexkv.engine.choice.cost import Span
from flexkv.engine.scheduler.engine import EngineRequest
from flexkv.engine.scheduler.engine_cache import EngineCache
from flexkv.engine.scheduler.fetches import Fetches, fetched_blocks, slowest
from flexkv.engine.scheduler.groups import Group, Groups, Reach
from flexkv.engine.scheduler.keys import BlockKeys
from flexkv.engine.scheduler.loads import Loads
from flexkv.engine.scheduler.request import HitTokens, Match, Plan, TrackedRequest, Wanted, flat
from flexkv.types.presence import Presence


class Present(Protocol):
    """Which FlexKV blocks of a request are available, by group and position."""

    def first_missing(self, group: Group, start: int, stop: int) -> int:
        """The first unavailable block from `start` on; `stop` if all before `stop` are
        available."""
        ...

    def last_missing(self, group: Group, start: int, stop: int) -> int | None:
        """The last unavailable block from `start` to before `stop`; None if all are available."""
        ...


def longest_hit(groups: Groups, present: Present, local_tokens: int, limit: int) -> int:
    """The longest prefix, in tokens, that the engine can continue after loading available blocks.

    Args:
        present: asked only about blocks from `local_tokens` on and before `limit`.
        local_tokens: tokens that the engine has in all groups; a multiple of the alignment.

    Returns:
        A multiple of the alignment, or `local_tokens` if no block can be loaded.
    """
    align = groups.alignment
    hit = limit // align * align
    while hit > local_tokens:
        shorter = hit
        for group in groups.members:
            shorter = _supported(group, present, local_tokens, shorter, align)
        if shorter == hit:
            return hit
        hit = shorter
    return local_tokens


def full_reach(groups: Groups, present: Present, local_tokens: int, limit: int) -> int:
    """The same for the groups of full attention alone; `local_tokens` if there is none."""
    members = tuple(group for group in groups.members if group.reach is Reach.ALL)
    if not members:
        return local_tokens
    return longest_hit(Groups(members, groups.hash_tokens), present, local_tokens, limit)


def _supported(group: Group, present: Present, local_tokens: int, hit: int, align: int) -> int:
    """The longest prefix of at most `hit` tokens for which `group` has all blocks it needs."""
    size = group.block_tokens
    first = local_tokens // size
    if group.reach is Reach.ALL:
        gap = present.first_missing(group, first, hit // size)
        return max(local_tokens, gap * size // align * align)
    while hit > local_tokens:
        start = max(first, group.first_needed(hit))
        missing = present.last_missing(group, start, hit // size)
        if missing is None:
            return hit
        # Every prefix that ends behind the missing block needs that block, too.
        hit = missing * size // align * align
    return local_tokens


_FIRST_ASK = 16
"""Blocks in the first question to lower tiers. The number doubles each time that they have all: a
prefix may end anywhere, and each block costs about half a microsecond."""

_MOST_MORE = 64
"""Blocks that a further question asks about beyond the first that is needed."""

_OBTAINABLE = (Presence.HOST, Presence.BELOW)


class Availability:
    """`Present` for one request; with `below`, blocks of lower tiers are available, too. `in_host`
    says whether all blocks found so far are in host memory.

    If calls begin at the same first block of a group, each block is looked up once. The last
    missing block must be asked for with the same end or an earlier one each time, as `longest_hit`
    does.
    """

    def __init__(
        self, cache: CacheClient, tracked: TrackedRequest, keys: BlockKeys, *, below: bool
    ) -> None:
        self._cache = cache
        self._tracked = tracked
        self._keys = keys
        self._below = below and cache.info.may_fetch
        self.in_host = True
        self._gaps: dict[tuple[int, int], tuple[int, int]] = {}
        self._ends: dict[int, tuple[int, list[bool]]] = {}

    def first_missing(self, group: Group, start: int, stop: int) -> int:
        """See `Present.first_missing`."""
        gap, asked = self._gaps.get((group.index, start), (start, start))
        if gap == asked < stop:
            gap = asked + self._reach(self._keys.of(self._tracked, group, asked, stop))
            self._gaps[group.index, start] = gap, stop
        return min(gap, stop)

    def last_missing(self, group: Group, start: int, stop: int) -> int | None:
        """See `Present.last_missing`."""
        # The known part: where it ends, and backwards from there whether each block is available.
        end, known = self._ends.setdefault(group.index, (stop, []))
        first = end - len(known)
        if start < first:
            # Some more, because every prefix that ends behind a missing block needs that block.
            begin = max(0, min(start, first - min(len(known), _MOST_MORE)))
            keys = self._keys.of(self._tracked, group, begin, first)
            there = self._there(keys)
            there += [False] * (first - begin - len(keys))  # the engine has not hashed them
            known += reversed(there)
        try:
            return end - 1 - known.index(False, end - stop, end - start)
        except ValueError:
            return None

    def _reach(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, are available."""
        count, ask = self._cache.lookup(keys), _FIRST_ASK
        while self._below and count < len(keys):
            there = self._there(keys[count : count + ask])
            if False in there:
                return count + there.index(False)
            count, ask = count + len(there), 2 * ask
        return count

    def _there(self, keys: Sequence[bytes]) -> list[bool]:
        presence = self._cache.presence(keys)
        if self._below:
            self.in_host = self.in_host and Presence.BELOW not in presence
            return [each in _OBTAINABLE for each in presence]
        return [each is Presence.HOST for each in presence]


class Matcher:
    """Finds the loadable prefix of a request, and starts fetches from lower tiers.

    A model of plain attention is a group that reaches everywhere: its fetch finds the end of the
    hit. With other groups the end has to be known first, because each needs other blocks for it.
    `loads` are those of what is found.
    """

    def __init__(self, engine: EngineCache, load_ahead: bool) -> None:
        self._engine = engine
        self._cache = engine.cache
        self._is_shared = engine.cache.info.is_shared
        self._groups = engine.groups
        self._keys = engine.keys
        self._chooser = engine.chooser
        self._fetches = Fetches(
            engine.cache,
            load_ahead,
            engine.chooser.fetched,
            spans=engine.spans,
            describe=engine.describe,
            plain=engine.groups.plain,
        )
        self.loads = Loads(engine, self._fetches)

    def prefetch(self, tracked: TrackedRequest) -> None:
        """Begin to fetch the blocks that a queued request will need."""
        request, most = tracked.request, tracked.options.max_load_tokens
        local_tokens = self._cached_by_engine(request)
        limit = request.num_tokens if self._groups.plain else request.num_tokens - 1
        if most is not None:
            limit = min(limit, local_tokens + most)
        plan = self._plan(tracked, local_tokens, limit)
        if plan is not None and not plan.in_host:
            keys, announced = plan.keys, plan.announced
            self._fetches.begin(tracked, keys, plan.start, queued=True, announced=announced)
            self._fetches.describe(tracked, plan.wanted)

    def match(
        self, tracked: TrackedRequest, local_tokens: int, others: int
    ) -> tuple[int | None, bool]:
        """See `RequestSide.match`. The engine has `others` other requests. Fetched blocks stay in
        host memory until the load is ordered or the request needs none."""
        tracked.match, loads = None, self.loads
        if loads.half_loaded and loads.shares_half_loaded(tracked.request, local_tokens):
            return None, False
        if not tracked.may_load:
            tracked.match = Match(local_tokens)
            return 0, False
        found = self._find(tracked, local_tokens, others)
        if found is None:
            return None, False
        tokens, match = found
        # What a fetch brings stays until its end.
        if tokens and (tracked.fetch is None or not self._fetches.awaits_more(tracked)):
            blocks = -(-tokens // self._groups.members[0].block_tokens)
            running, mode = loads.running_requests, tracked.options.load_mode
            if self._is_shared and not loads.hold(tracked.id, match.keys[: match.blocks]):
                tokens, match = 0, Match(local_tokens)
            elif self._chooser.is_layerwise(blocks, running, mode):
                # The engine must compute at least one token in the step. The block of this token
                # is loaded all the same, because it holds the same bytes.
                tokens = min(tokens, tracked.request.num_tokens - 1 - local_tokens)
                match = replace(match, layerwise=True)
        tracked.match = match
        if tokens == 0:
            self._fetches.end(tracked)
        return tokens, tokens > 0 and not match.layerwise

    def used_by(
        self, tracked: TrackedRequest, tokens: int
    ) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """The keys of the blocks that a hit of the first `tokens` tokens uses, and of all blocks of
        the prompt in the group that reaches furthest back."""
        match, group = tracked.match, self._groups.furthest
        whole = tracked.request.num_tokens
        if not self._groups.plain:
            return self.blocks_of(tracked, tokens), self.keys_of(tracked, whole)
        prompt = () if match is None or match.local_tokens else match.keys
        if len(prompt) != whole // group.block_tokens:
            prompt = self.keys_of(tracked, whole)
        return prompt[: tokens // group.block_tokens], prompt

    def blocks_of(self, tracked: TrackedRequest, tokens: int) -> Sequence[bytes]:
        """Keys of the blocks that a hit of the first `tokens` tokens uses."""
        return flat(self._needed(tracked, 0, tokens))

    def keys_of(self, tracked: TrackedRequest, tokens: int) -> Sequence[bytes]:
        """Keys of the complete blocks of the first `tokens` tokens in the group that reaches
        furthest back."""
        group = self._groups.furthest
        return self._keys.of(tracked, group, 0, tokens // group.block_tokens)

    def others_of(self, tracked: TrackedRequest, tokens: int) -> Sequence[bytes]:
        """Keys of the complete blocks of the first `tokens` tokens in all other groups."""
        furthest, found = self._groups.furthest, list[bytes]()
        for group in self._groups.members:
            if group is not furthest:
                found += self._keys.of(tracked, group, 0, tokens // group.block_tokens)
        return found

    def _find(
        self, tracked: TrackedRequest, local_tokens: int, others: int
    ) -> tuple[int, Match] | None:
        """The number of tokens that can be loaded beyond `local_tokens`, and their `Match`; None
        while a lower tier reads them."""
        groups, num_tokens = self._groups, tracked.request.num_tokens
        most = tracked.options.max_load_tokens
        limit = min(num_tokens if most is None else local_tokens + most, tracked.failed_at)
        if not groups.plain:
            if local_tokens % groups.alignment:
                return 0, Match(local_tokens)
            limit = min(limit, num_tokens - 1)  # a window needs one more token for the last one
        plan, tracked.plan = self._plan(tracked, local_tokens, limit), None
        if plan is None:
            return None
        found, not_awaited = self._offered(tracked, plan, others)
        if found is None:
            tracked.plan = plan
            return None
        keys, hit = plan.keys, plan.hit
        size = groups.furthest.block_tokens
        if groups.plain:
            hit = (plan.start + found) * size
        elif found < len(keys):
            in_host = Availability(self._cache, tracked, self._keys, below=False)
            hit = longest_hit(groups, in_host, local_tokens, limit)
            keys = flat(self._needed(tracked, local_tokens, hit))
            found = len(keys)
        end = hit = max(local_tokens, hit)
        choice = self._chooser.choose_load(
            Span(local_tokens, hit), found, whole=not groups.plain, others=others
        )
        left: tuple[tuple[Left, int], ...] = ()
        if not_awaited > hit:
            left = ((Left.AWAITED, not_awaited - hit),)
        if choice.left is not None:
            blocks_end = (plan.start + choice.blocks) * size if groups.plain else local_tokens
            end = max(local_tokens, blocks_end)
            if hit > end:
                left = (*left, (choice.left, hit - end))
        fetched: HitTokens = {}
        if tracked.awaited and end > local_tokens:
            fetched = self._fetched(tracked, keys[: choice.blocks], end - local_tokens)
        match = Match(
            local_tokens,
            fetched,
            left=left,
            divergence=plan.divergence,
            keys=keys,
            blocks=choice.blocks,
        )
        return end - local_tokens, match

    def _offered(self, tracked: TrackedRequest, plan: Plan, others: int) -> tuple[int | None, int]:
        """See `Fetches.offer`. And the end of the tokens for which the request does not wait; 0 if
        there are none."""
        fetches, keys, is_plain, not_awaited = self._fetches, plan.keys, self._groups.plain, 0
        if plan.in_host and not (tracked.fetch or tracked.awaited):
            return len(keys), 0

        def is_worth_waiting(fetch: FetchId, state: FetchState, end: int, whole: bool) -> bool:
            nonlocal not_awaited
            if not is_plain and (state.reach if whole else state.stop) < len(keys):
                return False  # a part of the blocks that a window needs is of no use
            stop = end * self._groups.furthest.block_tokens if is_plain else plan.hit
            worth = self._chooser.is_worth_waiting(
                fetch,
                Span(plan.local_tokens, stop),
                others,
                announced=plan.announced > 0,
                whole=whole,
                state=state,
            )
            not_awaited = 0 if worth else stop
            return worth

        found = fetches.offer(tracked, keys, plan.start, is_worth_waiting, plan.announced)
        if tracked.awaited:
            fetches.describe(tracked, plan.wanted)
        return found, not_awaited

    def _plan(self, tracked: TrackedRequest, local_tokens: int, limit: int) -> Plan | None:
        """The blocks to load for a hit of at most `limit` tokens; None while a lower tier is
        queried about them."""
        groups, announced = self._groups, 0
        if tracked.options.announced_tokens:
            announced = self._announced_tokens(tracked, local_tokens, limit)
        if groups.plain:
            group = groups.furthest
            size = group.block_tokens
            start, stop = local_tokens // size, limit // size
            keys = self._keys.of(tracked, group, start, stop)
            wanted, count = [Wanted(group, start, keys)], max(0, announced // size - start)
            return Plan(local_tokens, limit, stop * size, wanted, keys, start, count)
        plan = tracked.plan
        if plan is None and not announced and self._awaits_answers(tracked, limit):
            return None
        if plan is not None and (plan.local_tokens, plan.limit) == (local_tokens, limit):
            return plan
        obtainable = Availability(self._cache, tracked, self._keys, below=True)
        hit = longest_hit(groups, obtainable, local_tokens, limit)
        divergence = 0
        if limit - hit >= groups.alignment:  # else nothing reaches further
            reach = full_reach(groups, obtainable, local_tokens, limit)
            divergence = reach if reach > hit else 0
        in_host = obtainable.in_host
        if announced > hit:
            hit, divergence, in_host = announced, 0, False
        wanted = self._needed(tracked, local_tokens, hit)
        keys = flat(wanted)
        count = len(keys) if announced else 0
        return Plan(
            local_tokens, limit, hit, wanted, keys, local_tokens, count, divergence, in_host
        )

    def _announced_tokens(self, tracked: TrackedRequest, local_tokens: int, limit: int) -> int:
        """The end of the first tokens whose blocks another engine writes to a shared store; 0 if
        nothing is announced that the engine lacks."""
        tokens = tracked.options.announced_tokens
        if not self._cache.info.has_store:
            return 0
        end = min(tokens, limit) // self._groups.alignment * self._groups.alignment
        return end if end > local_tokens else 0

    def _needed(self, tracked: TrackedRequest, local_tokens: int, hit: int) -> list[Wanted]:
        """Blocks to load for a hit that ends at `hit` tokens, by group."""
        wanted = []
        for group in self._groups.members:
            start = max(local_tokens // group.block_tokens, group.first_needed(hit))
            stop = hit // group.block_tokens
            if hit > local_tokens and stop > start:
                wanted.append(Wanted(group, start, self._keys.of(tracked, group, start, stop)))
        return wanted

    def _awaits_answers(self, tracked: TrackedRequest, limit: int) -> bool:
        """Whether a lower tier is queried about blocks of the first `limit` tokens: what a hit
        needs depends on its answer. Queries if need be."""
        if not self._cache.info.must_query:
            return False
        keys: list[bytes] = []
        scattered: list[bytes] = []
        for group in self._groups.members:
            # Windows and states have gaps: only the blocks that a prompt ends with are stored.
            whole = group is self._groups.furthest and group.reach is Reach.ALL
            own = self._keys.of(tracked, group, 0, limit // group.block_tokens)
            (keys if whole else scattered).extend(own)
        return self._cache.query(keys, scattered)

    def _cached_by_engine(self, request: EngineRequest) -> int:
        """Tokens of the request that the engine has itself, as far as full attention goes.

        The engine evicts the ends of prefixes first. If it did not, the prefetch is a guess, and
        the rest is fetched when the request's turn comes.
        """
        pool = self._engine.pool
        if pool is None:
            return 0
        member = self._groups.furthest
        if member.reach is not Reach.ALL:
            return 0
        step = member.block_tokens // self._keys.hash_tokens
        # No slice: it would touch all hashes, which are seldom in the processor's caches.
        hashes = request.block_hashes
        ends = range(step - 1, len(hashes), step)
        if not ends or not pool.has(hashes[ends[0]], member.index):
            return 0  # most new prompts
        count = bisect_left(ends, True, key=lambda end: not pool.has(hashes[end], member.index))
        return count * member.block_tokens // self._groups.alignment * self._groups.alignment

    def _fetched(self, tracked: TrackedRequest, keys: Sequence[bytes], tokens: int) -> HitTokens:
        """How many of the `tokens` that are loaded with the blocks `keys` had to be fetched, by
        tier."""
        came = fetched_blocks(self._fetches.media_of(tracked), keys)
        if not self._groups.plain:
            # Groups have blocks of different lengths: the slowest tier counts for all of the hit.
            return {slowest(came): tokens} if came else {}
        size = self._groups.furthest.block_tokens
        fetched = {medium: count * size for medium, count in came.items()}
        for medium in fetched_blocks(tracked.awaited, keys[:1]):
            # The engine has the beginning of the first block itself.
            fetched[medium] -= len(keys) * size - tokens
        return fetched
