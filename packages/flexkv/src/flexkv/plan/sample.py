# SPDX-License-Identifier: Apache-2.0
"""Samples the conversations of a trace, so that a replay of the sample stands for one of the whole.

A sample keeps all requests of a conversation, and its replay has a smaller cache. Waldspurger et
al. sample single blocks: Efficient MRC Construction with SHARDS. FAST 2015. Prefixes must stay
whole, so this module samples subtrees of the tree of prefixes.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from flexkv.plan.curve import LRUCurve, Point
from flexkv.plan.distances import UNSEEN
from flexkv.plan.saving import Savings
from flexkv.plan.trace import NO_BLOCK, Trace

_GROUPS = 256
_LEAST_LEAVES = 8
"""A block belongs to one conversation if its subtree has at most 8 leaves, or a 256th of all
leaves. A conversation of one thread has one leaf; each further answer to a message adds one. Not
tuned."""

LEAST_REQUESTS = 4_000
"""Requests in a sample, at least. A policy that learns from requests needs some thousands: with a
quarter of the 12,031 requests of Mooncake's conversation trace, `hazard` lost up to 1.5 points of
its hit rate, with an eighth up to 4.4 points."""

_Amount = TypeVar("_Amount", int, float)


def conversations(trace: Trace) -> list[int]:
    """Group requests that share more than a prefix of many conversations: for each request, the
    number of the first block of its prefix that belongs to one conversation. If there is none, the
    number of its last block, or `NO_BLOCK`."""
    parents = [NO_BLOCK] * trace.distinct_blocks
    chains = [[*each.blocks, *each.answer] for each in trace.requests]
    for chain in chains:
        for before, block in itertools.pairwise(chain):
            parents[block] = before
    leaves = [0] * trace.distinct_blocks
    # A block has a greater number than the one before it.
    for block in range(trace.distinct_blocks - 1, -1, -1):
        leaves[block] = leaves[block] or 1
        if parents[block] != NO_BLOCK:
            leaves[parents[block]] += leaves[block]
    whole = sum(n for n, parent in zip(leaves, parents, strict=True) if parent == NO_BLOCK)
    most = max(_LEAST_LEAVES, whole // _GROUPS)
    return [
        next((block for block in chain if leaves[block] <= most), chain[-1] if chain else NO_BLOCK)
        for chain in chains
    ]


@dataclass(frozen=True, slots=True)
class Sample:
    """Some conversations of a trace."""

    trace: Trace
    """Their requests, in order. The blocks have the numbers of the whole trace."""
    whole: LRUCurve
    """The curve of the whole trace."""
    curve: LRUCurve
    share: float
    """Prompt tokens of the sample as a share of all."""
    conversations: int
    all_conversations: int
    _of_whole: npt.NDArray[np.int64]
    """int64 (hits,): ascending distances, in the whole trace, of the uses that can be hits in the
    sample."""
    _of_sample: npt.NDArray[np.int64]
    """int64 (hits,): ascending distances of the same uses in the sample."""
    _ratio: float
    """Distinct blocks of the sample as a share of all."""

    def scaled(self, blocks: int) -> int:
        """The size of a cache for the sample that stands for `blocks` blocks of the whole trace.

        LRU at this size hits as many blocks of the sample as LRU at `blocks` hits of the same
        requests in the whole trace. Prefixes of many conversations therefore need no correction.
        """
        if not blocks:
            return 0
        hits = int(np.searchsorted(self._of_whole, blocks, side="right"))
        least = int(self._of_sample[hits - 1]) if hits else 1
        size = max(least, round(blocks * self._ratio))
        if hits < len(self._of_sample):
            size = min(size, max(least, int(self._of_sample[hits]) - 1))
        return max(1, size)

    def estimate(self, found: _Amount, of_sample: _Amount, of_whole: _Amount) -> float:
        """An amount of the whole trace, from the sample's and from LRU's in both.

        What LRU finds in the whole trace is known. Only the difference to LRU is estimated, which
        varies far less from sample to sample.
        """
        return of_whole + (found - of_sample) / self.share

    def points(self, blocks: int) -> tuple[Point, Point]:
        """LRU's results at the size that stands for `blocks`: of the sample, and of the whole."""
        return self.curve.at(self.scaled(blocks)), self.whole.at(blocks)


def sample(
    trace: Trace, whole: LRUCurve, savings: Savings | None, most_uses: int, engine_blocks: int
) -> Sample | None:
    """Choose conversations at random, whose requests together use about `most_uses` blocks. The
    same trace always gets the same sample. None if the whole trace has no more uses, or only one
    conversation. `whole` is the curve of the trace."""
    if trace.uses <= most_uses:
        return None
    groups = conversations(trace)
    places = {group: _place(group) for group in groups}
    rate = max(most_uses / trace.uses, LEAST_REQUESTS / len(trace.requests))
    kept = {group for group, place in places.items() if place < rate}
    kept = kept or {min(places, key=lambda group: places[group])}
    if len(kept) == len(places):
        return None
    chosen = [group in kept for group in groups]
    requests = [each for each, has in zip(trace.requests, chosen, strict=True) if has]
    part = replace(trace, requests=requests)
    lengths = [len(each.blocks) + len(each.answer) for each in trace.requests]
    mask = np.repeat(np.array(chosen, dtype=np.bool_), lengths)
    distinct = len({block for each in requests for block in (*each.blocks, *each.answer)})
    alone = LRUCurve(part, None)
    of_sample = alone.distances.distance
    hits = alone.distances.counts & (of_sample != UNSEEN)
    plain = Sample(
        part,
        whole,
        alone,
        part.prompt_tokens / trace.prompt_tokens,
        len(kept),
        len(places),
        np.sort(whole.distances.distance[mask][hits]),
        np.sort(of_sample[hits]),
        distinct / trace.distinct_blocks,
    )
    return replace(plain, curve=LRUCurve(part, savings, plain.scaled(engine_blocks)))


def _place(group: int) -> float:
    """A random place from 0 to 1, always the same for a group."""
    digest = hashlib.blake2b(group.to_bytes(8, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little") / (1 << 64)
