# SPDX-License-Identifier: Apache-2.0
"""Lower tiers as sources of blocks, with what is known of the blocks that each has."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexkv.figures.counters import TierCounters
from flexkv.index.block_index import Block
from flexkv.tiers.base import AnyTier, IndexedTier, QueriedTier

HAS_SECONDS = 60.0
"""Seconds for which a block counts as present after the tier has reported or written it. If the
tier has evicted the block since, a read finds nothing."""

LACKS_SECONDS = 5.0
"""Seconds for which a block counts as absent after the tier has reported that. An engine may look
a waiting request up in every step; the tier is queried once in this time. A block that another node
writes meanwhile is a miss until then."""

ANSWERS = 1 << 17
"""The most answers that are remembered, about 20 MB."""


@dataclass(slots=True)
class _TierQuery:
    """The keys of one query to a tier; none once the answer is of no use."""

    keys: Sequence[bytes]
    deadline: float
    late: bool = False


class KeptBlocks(NamedTuple):
    """Blocks of a tier whose call hangs. The call may still write to the memory of those to be
    `read`, which have a slot and cannot be found, and read that of the `written` ones, which are
    leased."""

    read: list[Block]
    written: list[Block]


class Source:
    """One of the tiers of a cache; the cache owns it. An `IndexedTier` is never queried, and
    nothing is remembered of it. Single-threaded.

    Attributes:
        tier_rank: the position among the tiers; 0 for the fastest.
        stall_seconds: see `AttachedTier`.
        counters: counts of the blocks fetched from the tier and written to it.
        kept: the blocks that a call may use which has hung since before the cache recovered from an
            error. The tier counts as empty then, and is not called. None for a tier in use.
    """

    def __init__(self, tier: AnyTier, tier_rank: int, stall_seconds: float) -> None:
        self.tier = tier
        self.medium = tier.medium
        self.tier_rank = tier_rank
        self.stall_seconds = stall_seconds
        self.counters = TierCounters()
        self.kept: KeptBlocks | None = None
        self.indexed: IndexedTier | None = None
        self.queried: QueriedTier | None = None
        if isinstance(tier, QueriedTier):
            self.queried = tier
        else:
            self.indexed = tier
        self._known: dict[bytes, tuple[bool, float]] = {}
        self._querying: dict[bytes, float] = {}
        self._queries: dict[int, _TierQuery] = {}

    @property
    def left_out(self) -> bool:
        """Whether the tier is not used; see `kept`."""
        return self.kept is not None

    @property
    def busy(self) -> bool:
        """Whether a query awaits its answer or its deadline, which `poll` notices, or the tier has
        news."""
        if self.indexed is not None:
            return self.indexed.has_news and self.kept is None
        return any(not query.late for query in self._queries.values())

    @property
    def may_get(self) -> bool:
        """Whether other processes write to the tier, and it can be queried now."""
        return self.queried is not None and self.queried.readable and self.kept is None

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool | None]:
        """For each key whether the tier can give its block now; None if the tier has to be queried,
        or is being queried. No side effect."""
        if self.indexed is not None:
            return [False] * len(keys) if self.kept is not None else self.indexed.contains(keys)
        now, readable = time.monotonic(), self.may_get
        return [self._has(key, now, readable) for key in keys]

    def query(self, keys: Sequence[bytes], scattered: Sequence[bytes] = ()) -> None:
        """Query the tier about keys for which `contains` returned None. Does not wait. The
        arguments are those of `QueriedTier.query`."""
        wanted, others = self._not_queried(keys), self._not_queried(scattered)
        if others:
            first = set(wanted)
            others = [key for key in others if key not in first]
        if wanted and wanted[0] == keys[0]:
            self._begin(wanted, others)
            return
        # Another query is about the first block: its answer is not that of the next one.
        self._begin(wanted, [])
        self._begin([], others)

    def doubt(self, keys: Sequence[bytes]) -> None:
        """Query the tier again about those of these blocks that it lacks as far as is known: it may
        have got them."""
        for key in keys:
            has, _ = self._known.get(key, (True, 0.0))
            if not has:
                del self._known[key]

    def note(self, keys: Sequence[bytes], has: bool) -> None:
        """Remember that reads or writes have shown whether the tier has these blocks."""
        if self.queried is not None:
            now = time.monotonic()
            for key in keys:
                self._remember(key, has, now)

    def poll(self) -> bool:
        """Whether `contains` may know more than at the last call."""
        if self.queried is None:
            return False
        now = time.monotonic()
        news = False
        for answer in self.queried.drain_answers():
            query = self._queries.pop(answer.ticket)
            self.counters.late_questions += answer.late and not query.late
            has = answer.has or [False] * len(query.keys)
            for key, each in zip(query.keys, has, strict=False):
                del self._querying[key]
                self._remember(key, each, now)
            news = True
        for query in self._queries.values():
            if query.deadline <= now and not query.late:
                query.late = news = True
                self.counters.late_questions += 1
        return news

    def clear(self) -> None:
        """Forget all answers, because the tier was cleared."""
        self._known.clear()
        self._querying.clear()
        for query in self._queries.values():
            query.keys = ()

    def forget(self) -> None:
        """Forget all answers and queries, because the tier was drained."""
        self.clear()
        self._queries.clear()

    def _not_queried(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in dict.fromkeys(keys) if key not in self._querying]

    def _begin(self, keys: list[bytes], scattered: list[bytes]) -> None:
        all_keys = keys + scattered
        if not all_keys or self.queried is None:
            return
        deadline = time.monotonic() + self.queried.question_seconds
        self._queries[self.queried.query(keys, scattered)] = _TierQuery(all_keys, deadline)
        self._querying.update(dict.fromkeys(all_keys, deadline))

    def _has(self, key: bytes, now: float, readable: bool) -> bool | None:
        has, until = self._known.get(key, (False, 0.0))
        if until > now:
            return has and readable
        if not readable or self._querying.get(key, now + 1.0) <= now:
            return False
        return None

    def _remember(self, key: bytes, has: bool, now: float) -> None:
        known = self._known
        known.pop(key, None)  # to its end
        known[key] = has, now + (HAS_SECONDS if has else LACKS_SECONDS)
        if len(known) > ANSWERS:
            del known[next(iter(known))]
