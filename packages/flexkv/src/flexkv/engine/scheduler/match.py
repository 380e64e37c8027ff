# SPDX-License-Identifier: Apache-2.0
"""Answers the engine's question before it schedules a request: how much of it can be loaded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Protocol

from flexkv.client import CacheClient, FetchId, FetchState
from flexkv.engine.choice.chooser import Left, LoadChooser
from flexkv.engine.choice.cost import Span
from flexkv.engine.scheduler.engine import EnginePool, EngineRequest
from flexkv.engine.scheduler.engine_cache import EngineCache
from flexkv.engine.scheduler.fetches import Fetches, fetched_blocks, slowest
from flexkv.engine.scheduler.groups import Group, Groups, Reach
from flexkv.engine.scheduler.keys import BlockKeys
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
        groups: the groups of the model.
        present: asked only about blocks from `local_tokens` on and before `limit`.
        local_tokens: tokens that the engine has in all groups; a multiple of the alignment.
        limit: the most tokens of the prefix.

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

_OBTAINABLE = (Presence.HOST, Presence.BELOW)


class Availability:
    """`Present` for one request. If calls begin at the same first block of a group, each block is
    looked up once. The last missing block must be asked for with the same end or an earlier one
    each time, as `longest_hit` does.

    Args:
        cache: the cache of the engine.
        tracked: the request.
        keys: makes the keys of its blocks.
        below: whether blocks of lower tiers count as available, too.

    Attributes:
        in_host: whether all blocks found so far are in host memory.
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
            keys = self._keys.of(self._tracked, group, start, first)
            there = self._there(keys)
            there += [False] * (first - start - len(keys))  # the engine has not hashed them
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

    Args:
        engine: the engine's cache.
        fetches: the fetches of the engine's requests.
        chooser: decides whether a wait or a load is worth its time.
    """

    def __init__(self, engine: EngineCache, fetches: Fetches, chooser: LoadChooser) -> None:
        self._cache = engine.cache
        self._groups = engine.groups
        self._keys = engine.keys
        self._describe = engine.describe
        self._fetches = fetches
        self._chooser = chooser
        self._pool: EnginePool | None = None

    def bind_pool(self, pool: EnginePool) -> None:
        """Set the engine's own prefix cache, whose blocks need no prefetch."""
        self._pool = pool

    def prefetch(self, tracked: TrackedRequest) -> None:
        """Begin to fetch the blocks that a queued request will need."""
        request, most = tracked.request, tracked.options.max_load_tokens
        local_tokens = self._cached_by_engine(request)
        limit: int = request.num_tokens if self._groups.plain else request.num_tokens - 1
        if most is not None:
            limit = min(limit, local_tokens + most)
        if self._groups.plain:
            (group,) = self._groups.members
            start, stop = local_tokens // group.block_tokens, limit // group.block_tokens
            wanted = [Wanted(group, start, self._keys.of(tracked, group, start, stop))]
            announced = self._announced(tracked, start)
        elif hit := self._announced_hit(tracked, local_tokens, limit):
            wanted = self._needed(tracked, local_tokens, hit)
            announced = len(flat(wanted))
        else:
            announced = 0
            if self._awaits_answers(tracked, limit):
                return  # `match` fetches
            obtainable = self._obtainable(tracked)
            hit = longest_hit(self._groups, obtainable, local_tokens, limit)
            if obtainable.in_host:
                return
            wanted = self._needed(tracked, local_tokens, hit)
        self._fetches.begin_early(tracked, flat(wanted), announced)
        self._describe_awaited(tracked, wanted)

    def match(
        self, tracked: TrackedRequest, local_tokens: int, others: int
    ) -> tuple[int, Match] | None:
        """The number of tokens that can be loaded beyond `local_tokens`, and their `Match`. The
        engine has `others` other requests.

        None while a lower tier reads them. Fetched blocks stay in host memory until `Fetches.end`.
        """
        most = tracked.options.max_load_tokens
        limit = tracked.request.num_tokens if most is None else local_tokens + most
        limit = min(limit, tracked.failed_at)
        if self._groups.plain:
            return self._match_plain(tracked, local_tokens, limit, others)
        return self._match_groups(tracked, local_tokens, limit, others)

    def next_part(
        self, tracked: TrackedRequest, keys: Sequence[bytes], first: int, span: Span, others: int
    ) -> int | None:
        """Fetch the blocks of a load that are not ordered: host memory had no room for them before.

        Args:
            tracked: the request; all that has come of its load is ordered.
            keys: of the blocks that are not.
            first: position of the first of them in the request.
            span: their tokens.
            others: the number of other requests that the engine computes.

        Returns:
            How many of the blocks have got a slot, from the first on. None if they cannot come, or
            if waiting for them is not worthwhile.
        """
        group = self._groups.members[0]
        fetch = self._fetches.fetch_next(tracked, keys, first)
        if fetch is None or not self._chooser.is_worth_waiting(fetch, span, others, whole=True):
            return None
        slots = self._cache.fetch_state(fetch).stop
        if slots:
            self._describe_awaited(tracked, [Wanted(group, first, keys)])
        return slots

    def hit_of(self, tracked: TrackedRequest, match: Match, tokens: int) -> Sequence[bytes]:
        """Keys of the blocks to load for a hit of `tokens` tokens behind the engine's own."""
        start, end = match.local_tokens, match.local_tokens + tokens
        if not self._groups.plain:
            return flat(self._needed(tracked, start, end))
        size = self._groups.furthest.block_tokens
        return match.keys[: -(-end // size) - start // size]

    def blocks_of(self, tracked: TrackedRequest, tokens: int) -> Sequence[bytes]:
        """Keys of the blocks that a hit of the first `tokens` tokens uses."""
        return flat(self._needed(tracked, 0, tokens))

    def prompt_of(self, tracked: TrackedRequest) -> Sequence[bytes]:
        """Keys of all blocks of the prompt in the group that reaches furthest back."""
        match, tokens = tracked.match, tracked.request.num_tokens
        if match is not None and match.local_tokens == 0 and match.keys:
            group = self._groups.furthest
            if len(match.keys) == tokens // group.block_tokens:
                return match.keys
        return self.keys_of(tracked, tokens)

    def used_by(
        self, tracked: TrackedRequest, tokens: int
    ) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """See `blocks_of` and `prompt_of`."""
        prompt = self.prompt_of(tracked)
        if self._groups.plain:
            return prompt[: tokens // self._groups.furthest.block_tokens], prompt
        return self.blocks_of(tracked, tokens), prompt

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

    def _match_plain(
        self, tracked: TrackedRequest, local_tokens: int, limit: int, others: int
    ) -> tuple[int, Match] | None:
        (group,) = self._groups.members
        first = local_tokens // group.block_tokens
        keys = self._keys.of(tracked, group, first, limit // group.block_tokens)
        announced = self._announced(tracked, first)

        not_awaited = first

        def is_worth_waiting(fetch: FetchId, _: FetchState, end: int, whole: bool) -> bool:
            nonlocal not_awaited
            span = Span(local_tokens, end * group.block_tokens)
            worth = self._chooser.is_worth_waiting(
                fetch, span, others, announced=announced > 0, whole=whole
            )
            not_awaited = first if worth else end
            return worth

        hits = self._fetches.offer(tracked, keys, first, is_worth_waiting, announced)
        if tracked.awaited:
            self._describe_awaited(tracked, [Wanted(group, first, keys)])
        if hits is None:
            return None
        end = max(local_tokens, (first + hits) * group.block_tokens)
        choice = self._chooser.choose_load(Span(local_tokens, end), hits, others=others)
        loaded = max(local_tokens, (first + choice.blocks) * group.block_tokens)
        left: tuple[tuple[Left, int], ...] = ()
        if not_awaited * group.block_tokens > end:
            left = ((Left.AWAITED, not_awaited * group.block_tokens - end),)
        if choice.left is not None and end > loaded:
            left = (*left, (choice.left, end - loaded))
        tokens = loaded - local_tokens
        fetched: HitTokens = {}
        if tracked.awaited:
            fetched = self._fetched_tokens(tracked, keys[: choice.blocks], tokens)
        return tokens, Match(local_tokens, fetched, left=left, keys=keys)

    def _match_groups(
        self, tracked: TrackedRequest, local_tokens: int, limit: int, others: int
    ) -> tuple[int, Match] | None:
        if local_tokens % self._groups.alignment:
            return 0, Match(local_tokens)
        limit = min(limit, tracked.request.num_tokens - 1)
        announced = self._announced_hit(tracked, local_tokens, limit) > 0
        if tracked.plan is None and not announced and self._awaits_answers(tracked, limit):
            return None
        plan = self._plan(tracked, local_tokens, limit)
        hit = awaited = plan.hit
        keys: Sequence[bytes] = ()
        if plan.in_host and plan is not tracked.plan and not self._fetches.has_begun(tracked):
            blocks = self._count_needed(local_tokens, hit)
        else:
            wanted = plan.wanted or self._needed(tracked, local_tokens, hit)
            keys = flat(wanted)
            blocks = len(keys)
        if keys:

            def is_worth_waiting(fetch: FetchId, state: FetchState, _: int, __: bool) -> bool:
                nonlocal awaited
                # A part of the blocks that a window needs is of no use.
                if state.stop < state.length:
                    return False
                span = Span(local_tokens, plan.hit)
                worth = self._chooser.is_worth_waiting(fetch, span, others, announced=announced)
                awaited = plan.hit if worth else local_tokens
                return worth

            count = len(keys) if announced else 0
            found = self._fetches.offer(tracked, keys, local_tokens, is_worth_waiting, count)
            self._describe_awaited(tracked, wanted)
            if found is None:
                tracked.plan = plan
                return None
            if found < blocks:
                in_host = Availability(self._cache, tracked, self._keys, below=False)
                hit = longest_hit(self._groups, in_host, local_tokens, plan.limit)
                keys = flat(self._needed(tracked, local_tokens, hit))
                blocks = len(keys)
        tracked.plan = None
        span = Span(local_tokens, max(local_tokens, hit))
        left = [(Left.AWAITED, 0 if awaited >= plan.hit else plan.hit - span.stop)]
        choice = self._chooser.choose_load(span, blocks, whole=True, others=others)
        if choice.left is not None:
            left.append((choice.left, span.tokens))
        tokens = 0 if choice.left else span.tokens
        came = fetched_blocks(self._fetches.media_of(tracked), keys) if tokens else {}
        # Groups have blocks of different lengths: the slowest tier counts for all of the hit.
        fetched = {slowest(came): tokens} if came else {}
        return tokens, Match(local_tokens, fetched, left=_some(left), divergence=plan.divergence)

    def _plan(self, tracked: TrackedRequest, local_tokens: int, limit: int) -> Plan:
        """The blocks to load. `limit` ends before the last token: the engine computes that token in
        any case, and needs one more token of a window for it."""
        plan = tracked.plan
        if plan is not None and (plan.local_tokens, plan.limit) == (local_tokens, limit):
            return plan
        obtainable = self._obtainable(tracked)
        hit = longest_hit(self._groups, obtainable, local_tokens, limit)
        divergence = 0
        if limit - hit >= self._groups.alignment:  # else nothing reaches further
            reach = full_reach(self._groups, obtainable, local_tokens, limit)
            divergence = reach if reach > hit else 0
        in_host = obtainable.in_host
        announced = self._announced_hit(tracked, local_tokens, limit)
        if announced > hit:
            hit, divergence, in_host = announced, 0, False
        wanted = [] if in_host else self._needed(tracked, local_tokens, hit)
        return Plan(local_tokens, limit, hit, divergence, in_host, wanted)

    def _announced(self, tracked: TrackedRequest, start: int) -> int:
        """How many blocks from `start` on another engine writes to a shared store, in a model with
        one group."""
        if not (tracked.options.announced_tokens and self._cache.info.has_store):
            return 0
        (group,) = self._groups.members
        return max(0, tracked.options.announced_tokens // group.block_tokens - start)

    def _announced_hit(self, tracked: TrackedRequest, local_tokens: int, limit: int) -> int:
        """The end of the hit, in tokens, whose blocks another engine writes to a shared store; 0 if
        nothing is announced that the engine lacks."""
        if not (tracked.options.announced_tokens and self._cache.info.has_store):
            return 0
        tokens = min(tracked.options.announced_tokens, limit)
        hit = tokens // self._groups.alignment * self._groups.alignment
        return hit if hit > local_tokens else 0

    def _needed(self, tracked: TrackedRequest, local_tokens: int, hit: int) -> list[Wanted]:
        """Blocks to load for a hit that ends at `hit` tokens."""
        return [
            Wanted(group, start, self._keys.of(tracked, group, start, stop))
            for group, start, stop in self._ranges(local_tokens, hit)
        ]

    def _count_needed(self, local_tokens: int, hit: int) -> int:
        """The number of blocks of `_needed`."""
        return sum(stop - start for _, start, stop in self._ranges(local_tokens, hit))

    def _ranges(self, local_tokens: int, hit: int) -> Iterator[tuple[Group, int, int]]:
        """The groups with blocks to load for a hit, with the range of these."""
        for group in self._groups.members:
            start = max(local_tokens // group.block_tokens, group.first_needed(hit))
            stop = hit // group.block_tokens
            if hit > local_tokens and stop > start:
                yield group, start, stop

    def _obtainable(self, tracked: TrackedRequest) -> Availability:
        return Availability(self._cache, tracked, self._keys, below=True)

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
        pool = self._pool
        if pool is None:
            return 0
        member = next((g for g in self._groups.members if g.reach is Reach.ALL), None)
        if member is None:
            return 0
        step = member.block_tokens // self._keys.hash_tokens
        # No slice: it would touch all hashes, which are seldom in the processor's caches.
        hashes = request.block_hashes
        ends = range(step - 1, len(hashes), step)
        if not ends or not pool.has(hashes[ends[0]], member.index):
            return 0  # most new prompts
        count = bisect_left(ends, True, key=lambda end: not pool.has(hashes[end], member.index))
        return count * member.block_tokens // self._groups.alignment * self._groups.alignment

    def _describe_awaited(self, tracked: TrackedRequest, wanted: Sequence[Wanted]) -> None:
        """Describe fetched blocks for events, which report them in full once they have arrived."""
        awaited = tracked.awaited
        if self._describe is None or not awaited:
            return
        for each in wanted:
            absent = set(self._cache.missing(each.keys))
            found = (
                (each.start + i, key)
                for i, key in enumerate(each.keys)
                if key in awaited and i not in absent
            )
            self._describe(tracked.request, each.group, found)

    def _fetched_tokens(
        self, tracked: TrackedRequest, keys: Sequence[bytes], tokens: int
    ) -> HitTokens:
        """How many of the `tokens` that end with the last block of `keys` had to be fetched, by
        tier."""
        media = self._fetches.media_of(tracked)
        (group,) = self._groups.members
        size = group.block_tokens
        came = fetched_blocks(media, keys)
        fetched = {medium: count * size for medium, count in came.items()}
        for medium in fetched_blocks(media, keys[:1]):
            # The engine has the beginning of the first block itself.
            fetched[medium] -= len(keys) * size - tokens
        return fetched


def _some(left: Sequence[tuple[Left, int]]) -> tuple[tuple[Left, int], ...]:
    return tuple((reason, tokens) for reason, tokens in left if tokens > 0)
