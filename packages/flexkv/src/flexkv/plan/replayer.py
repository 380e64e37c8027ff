# SPDX-License-Identifier: Apache-2.0
"""Replays a trace on many caches: the whole trace, or a sample where that would take too long.

A sample keeps all requests of some conversations, and its replay has a smaller cache. Waldspurger
et al. sample single blocks: Efficient MRC Construction with SHARDS. FAST 2015. Prefixes must stay
whole, so this module samples subtrees of the tree of prefixes.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexkv.plan.curve import LRUCurve, Point
from flexkv.plan.distances import UNSEEN
from flexkv.plan.replay import Outcome, Setup, replay
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

LEAST_PROMPTS = 16
"""The least memory of a sample, in requests of average length; a smaller one evicts requests, where
that of the whole trace evicts blocks. On recorded coding agents, memory for 2 requests lost 2
points to that for 5 requests of the whole trace, and memory for 5 lost none to that for 10."""


def conversations(trace: Trace) -> list[int]:
    """Group requests that share more than a prefix of many conversations: for each request, the
    number of the first block of its prefix that belongs to one conversation. If there is none, the
    number of its last block, or `NO_BLOCK`."""
    parents = [NO_BLOCK] * trace.distinct_blocks
    chains = [each.chain for each in trace.requests]
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

    def estimate(self, found: float, of_sample: float, of_whole: float) -> float:
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
    mask = np.repeat(np.array(chosen, dtype=np.bool_), trace.lengths)
    distinct = len({block for each in requests for block in each.chain})
    alone = LRUCurve(part, None)
    of_sample = alone.distances.distance
    hits = alone.distances.counts & (of_sample != UNSEEN)
    plain = Sample(
        part,
        whole,
        alone,
        part.prompt_tokens / trace.prompt_tokens,
        np.sort(whole.distances.distance[mask][hits]),
        np.sort(of_sample[hits]),
        distinct / trace.distinct_blocks,
    )
    return replace(plain, curve=LRUCurve(part, savings, plain.scaled(engine_blocks)))


def _place(group: int) -> float:
    """A random place from 0 to 1, always the same for a group."""
    digest = hashlib.blake2b(group.to_bytes(8, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little") / (1 << 64)


class Replayer:
    """Replays a trace. If a replay has more than `most_uses` uses of blocks, a sample is replayed,
    unless the sample's memory would hold too few requests. `sample` has the conversations that are
    replayed; None for the whole trace."""

    def __init__(
        self,
        trace: Trace,
        curve: LRUCurve,
        savings: Savings | None,
        engine_blocks: int,
        most_uses: int,
    ) -> None:
        self._trace = trace
        self._savings = savings
        self._engine_blocks = engine_blocks
        self._longest = max(trace.lengths, default=0)
        self.sample = sample(trace, curve, savings, most_uses, engine_blocks)

    def outcome(self, setup: Setup) -> Outcome:
        """The results of a cache, whose `engine_blocks` are those of the replayer."""
        setup = replace(setup, engine_blocks=self._engine_blocks)
        if self.sample is None or self._is_small(self.sample, setup):
            found = replay(self._trace, self._bounded(setup), self._savings)
            return replace(found, setup=setup)
        return self._estimate(self.sample, setup)

    def _bounded(self, setup: Setup) -> Setup:
        """The smallest cache with the same results: more room than twice all blocks stays empty,
        and its index would take memory."""
        most = 2 * self._trace.distinct_blocks
        return replace(
            setup,
            memory_blocks=min(setup.memory_blocks, most),
            disk_blocks=min(setup.disk_blocks, most),
            engine_blocks=min(setup.engine_blocks, most),
        )

    def _is_small(self, part: Sample, setup: Setup) -> bool:
        """Whether the sample's memory is too small to stand for that of the whole trace."""
        memory = part.scaled(setup.memory_blocks)
        mean = self._trace.uses / len(self._trace.requests)
        # Blocks of a request that memory has no room for do not get to the disk.
        return memory < LEAST_PROMPTS * mean or (setup.disk_blocks > 0 and memory < self._longest)

    def _estimate(self, part: Sample, setup: Setup) -> Outcome:
        writes = setup.write_blocks
        small = replace(
            setup,
            memory_blocks=part.scaled(setup.memory_blocks),
            disk_blocks=part.scaled(setup.disk_blocks),
            engine_blocks=part.scaled(setup.engine_blocks),
            write_blocks=None if writes is None else round(writes * part.share),
        )
        found = replay(part.trace, self._bounded(small), self._savings)
        of_sample, of_whole = part.points(max(setup.memory_blocks, setup.disk_blocks))
        tokens = part.estimate(found.hit_tokens, of_sample.hit_tokens, of_whole.hit_tokens)
        tokens = min(max(0.0, tokens), float(part.whole.at(part.whole.useful_blocks).hit_tokens))
        saved = None
        if found.saved_seconds is not None and of_sample.saved_seconds is not None:
            saved = part.estimate(
                found.saved_seconds, of_sample.saved_seconds, of_whole.saved_seconds or 0.0
            )
            saved = max(0.0, saved)
        return Outcome(
            setup,
            round(tokens),
            round(found.disk_tokens / part.share),
            tokens / self._trace.prompt_tokens,
            saved,
            round(found.written_blocks / part.share),
            round(found.refused_blocks / part.share),
            part.share,
        )
