# SPDX-License-Identifier: Apache-2.0
"""Chooses the settings to use for a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from flexkv.plan.curve import LRUCurve, Point, round_sizes
from flexkv.plan.prefill import PrefillCost
from flexkv.plan.replay import Outcome, Setup, replay
from flexkv.plan.trace import Trace

GIB = 1 << 30
_SIZES = 12
"""Rows of the table, in addition to the sizes that the user names."""
_SMALLEST_SHARE = 64
"""The smallest of these sizes is a 64th of the largest."""

_DISK_POINTS = 0.01
"""A disk is advised if it adds one point of hit rate. Not tuned."""
_DISK_SHARE = 0.99
"""The advised disk gives 99 % of all possible hits, because the last percent often needs much more.
On Mooncake's conversation trace, 99 % need 0.74 of the blocks that 100 % need."""

_SAME_POLICY = 0.002
"""If two policies differ by at most 0.2 points, their order may be chance, and the simpler one is
advised. Not tuned."""
_SAME_ADMISSION = 0.01
"""Among the admissions within one point of the best, the one that writes least is advised. Not
tuned."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The room of the machine, in blocks; None for no limit."""

    memory_blocks: int | None = None
    disk_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Sizing:
    """The advice for a trace.

    Attributes:
        points: the LRU curve at some sizes, the smallest first.
        knee: the point beyond which more memory adds few hits.
        most: the smallest size with all possible hits.
        memory_blocks: host memory to use, in blocks.
        disk_blocks: disk to use, in blocks; 0 if no disk is advised.
        policies: outcome of each policy at `memory_blocks`, the best first.
        admissions: outcome of each admission with the best policy, memory and disk; the one that
            writes least first.
        replayed: the number of requests on which policies and admissions were replayed.
    """

    points: Sequence[Point]
    knee: Point
    most: Point
    memory_blocks: int
    disk_blocks: int
    policies: Sequence[Outcome]
    admissions: Sequence[Outcome]
    replayed: int

    @property
    def policy(self) -> str | None:
        """The policy to use: the best, or LRU if it is about as good; None without memory."""
        if not self.policies:
            return None
        best = self.policies[0]
        for each in self.policies:
            if each.setup.policy == "lru" and best.hit_rate - each.hit_rate <= _SAME_POLICY:
                return "lru"
        return best.setup.policy

    @property
    def admission(self) -> str | None:
        """The admission to use; None without a disk."""
        best = max((each.hit_rate for each in self.admissions), default=0.0)
        good = (each for each in self.admissions if best - each.hit_rate <= _SAME_ADMISSION)
        return next((each.setup.admission for each in good), None)


def size_up(
    trace: Trace,
    curve: LRUCurve,
    cost: PrefillCost | None,
    *,
    limits: Limits,
    sizes: Sequence[int],
    engine_blocks: int,
    policies: Sequence[str],
    admissions: Sequence[str],
    most_replayed: int,
    progress: Callable[[str, float], None],
) -> Sizing:
    """Choose sizes from the curve, then replay policies and admissions at these sizes.

    Args:
        trace: a trace with at least one complete block.
        curve: the curve of the trace.
        cost: cost of computing; None if unknown.
        limits: room of the machine.
        sizes: further sizes for the table, in blocks.
        engine_blocks: blocks of the engine's own cache.
        policies: names of policies to compare.
        admissions: names of admissions to compare, if a disk is advised.
        most_replayed: the most complete blocks of the requests that are replayed.
        progress: called with the name of the next policy or admission, and the finished share.
    """
    knee, most = curve.at(curve.knee), curve.at(curve.useful_blocks)
    memory = _within(knee.blocks, limits.memory_blocks)
    disk = _disk(curve, memory, most, limits)
    largest = max(1, most.blocks)
    wanted = {*round_sizes(max(1, largest // _SMALLEST_SHARE), largest, _SIZES), *sizes}
    wanted |= {each for each in (knee.blocks, memory, disk) if each}
    part = first_blocks(trace, most_replayed)
    setup = Setup(max(1, memory), engine_blocks=engine_blocks)
    setups = [replace(setup, policy=each) for each in policies] if memory else []
    steps = len(setups) + (len(admissions) if disk else 0)

    def outcome_of(number: int, setup: Setup) -> Outcome:
        progress(setup.admission if setup.disk_blocks else setup.policy, number / steps)
        return replay(part, setup, cost)

    compared = [outcome_of(i, each) for i, each in enumerate(setups)]
    compared.sort(key=lambda each: -each.hit_rate)
    points = [curve.at(each) for each in sorted(wanted)]
    replayed = len(part.requests)
    found = Sizing(points, knee, most, memory, disk, compared, (), replayed)
    if not disk:
        return found
    setup = replace(setup, policy=found.policy or "lru", disk_blocks=disk)
    others = [replace(setup, admission=each) for each in admissions]
    by_writes = [outcome_of(i, each) for i, each in enumerate(others, len(compared))]
    by_writes.sort(key=lambda each: each.written_blocks)
    return replace(found, admissions=by_writes)


def first_blocks(trace: Trace, most: int) -> Trace:
    """The first requests of a trace, which together have at most `most` complete blocks. At least
    one request stays."""
    sums = accumulate(len(request.blocks) + len(request.answer) for request in trace.requests)
    count = sum(1 for each in sums if each <= most)
    if count == len(trace.requests):
        return trace
    return replace(trace, requests=trace.requests[: max(1, count)])


def _within(blocks: int, limit: int | None) -> int:
    return blocks if limit is None else min(blocks, limit)


def _disk(curve: LRUCurve, memory: int, most: Point, limits: Limits) -> int:
    """Blocks of the advised disk; 0 if no disk is advised."""
    blocks = _within(curve.smallest_with(_DISK_SHARE), limits.disk_blocks)
    gain = curve.at(blocks).hit_rate - curve.at(memory).hit_rate
    return blocks if gain >= _DISK_POINTS else 0
