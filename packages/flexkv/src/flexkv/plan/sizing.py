# SPDX-License-Identifier: Apache-2.0
"""Chooses the settings to use for a trace, and replays them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexkv.plan.curve import LRUCurve, Point
from flexkv.plan.replay import Outcome, Setup
from flexkv.plan.replayer import Replayer
from flexkv.plan.saving import Savings
from flexkv.plan.trace import Trace

GIB = 1 << 30
LRU = "lru"
DAY_SECONDS = 86400.0
LEAST_SECONDS = 600.0
"""Rates of a shorter trace are not scaled to a day, and its writes are not limited, because ten
minutes say little about a day."""

_SIZES = 12
"""Rows of the table, in addition to the sizes that the user names."""
_SMALLEST_SHARE = 64
"""The smallest of these sizes is a 64th of the largest."""

_DISK_POINTS = 0.01
"""A disk is advised if it adds one point of hit rate."""
_MOST_SHARE = 0.99
"""The advised disk gives 99 % of all possible hits, because the last percent often needs much more.
On Mooncake's conversation trace, 99 % need 0.74 of the blocks that 100 % need. Memory of a curve
without a knee is as large."""

_SAME_POLICY = 0.002
"""If two policies differ by at most 0.2 points, their order may be chance, and the simpler one is
advised."""
_SAME_ADMISSION = 0.01
"""Among the admissions within one point of the best, the one that writes least is advised."""
_WHOLE_MORE = 8
"""Policies are compared at the advised memory on the whole trace up to this many times the uses of
other replays. A replay without a disk takes about a microsecond a use, one with a disk 3 to
17."""


@dataclass(frozen=True, slots=True)
class Row:
    """The results of memory of one size: LRU's, and those of the other policies, in the order of
    their names given."""

    point: Point
    outcomes: Sequence[Outcome]


@dataclass(frozen=True, slots=True)
class Sizing:
    """The advice for a trace."""

    rows: Sequence[Row]
    """Results at some sizes, the smallest first."""
    knee: Point | None
    """The point beyond which more memory adds few hits; None if the curve has no knee."""
    most: Point
    """The smallest size with all possible hits."""
    memory_blocks: int
    """Host memory to use."""
    tried_disk: int
    """Blocks of the disk that was replayed; 0 if none was, or it could not add a point."""
    write_blocks: int | None
    """Blocks that it may write in `write_seconds`; None for no limit."""
    write_seconds: float
    policies: Sequence[Outcome]
    """Outcome of each policy at `memory_blocks`, the best first."""
    admissions: Sequence[Outcome]
    """Outcome of each admission with that policy, memory and disk, the least writes first."""
    without_disk: Outcome | None
    """That policy and memory, replayed as the admissions were; None without such replays."""
    disk_most: Point
    """LRU's results with a disk of this size that takes all blocks."""

    @property
    def policy(self) -> str:
        """The policy to use: the best, or LRU if it is about as good or none was compared."""
        best = max((each.hit_rate for each in self.policies), default=0.0)
        for each in self.policies:
            if each.setup.policy == LRU and best - each.hit_rate <= _SAME_POLICY:
                return LRU
        return self.policies[0].setup.policy if self.policies else LRU

    @property
    def best_admission(self) -> Outcome | None:
        """The outcome of the admission that writes least among the best; None without replays."""
        best = max((each.hit_rate for each in self.admissions), default=0.0)
        good = (each for each in self.admissions if best - each.hit_rate <= _SAME_ADMISSION)
        return next(good, None)

    @property
    def disk_gain(self) -> float:
        """Hit rate that the disk added in the replays."""
        if self.best_admission is None or self.without_disk is None:
            return 0.0
        return self.best_admission.hit_rate - self.without_disk.hit_rate

    @property
    def disk_blocks(self) -> int:
        """Disk to use, in blocks; 0 if its replay added less than a point, or there was none."""
        return self.tried_disk if self.disk_gain >= _DISK_POINTS else 0

    @property
    def advised(self) -> Outcome | None:
        """The replay of the advice; None if no policies were compared, and no disk is advised."""
        if self.disk_blocks:
            return self.best_admission
        return next((each for each in self.policies if each.setup.policy == self.policy), None)


def size_up(
    trace: Trace,
    curve: LRUCurve,
    savings: Savings | None,
    *,
    most_memory: int | None,
    most_disk: int | None,
    drive_writes: float,
    sizes: Sequence[int],
    engine_blocks: int,
    policies: Sequence[str],
    admissions: Sequence[str],
    most_uses: int,
    settable: Callable[[int, int | None], int],
    progress: Callable[[str, float], None],
) -> Sizing:
    """Choose sizes from the curve of a trace, then replay policies and admissions at these sizes;
    admissions only if a disk is advised. The trace has at least one complete block.

    Args:
        most_memory, most_disk: the room of the machine in blocks; None for no limit.
        drive_writes: how many times a day the advised disk may be written as a whole.
        sizes: further sizes for the table, in blocks.
        most_uses: see `Replayer`.
        settable: the blocks of the next greater size that a setting can name, up to a limit.
        progress: called with the name of the next replay, and the finished share.
    """
    knee = curve.at(settable(curve.knee, None)) if curve.knee else None
    most = curve.at(curve.useful_blocks)
    memory = curve.smallest_with(_MOST_SHARE) if knee is None else knee.blocks
    memory = settable(memory, most_memory)
    disk = settable(curve.smallest_with(_MOST_SHARE), most_disk)
    largest = max(1, most.blocks)
    in_ratios = np.geomspace(max(1, largest // _SMALLEST_SHARE), largest, _SIZES)
    wanted = {*map(int, in_ratios.round()), *sizes}
    wanted |= {memory, disk, 0 if knee is None else knee.blocks}
    wanted.discard(0)
    others = [each for each in policies if each != LRU]
    steps = len(wanted) * len(others) + len(policies) + len(admissions) + 1
    done = 0
    most_whole = most_uses * _WHOLE_MORE
    whole = Replayer(trace, curve, savings, engine_blocks, most_whole)
    if trace.uses <= most_uses:
        quick = whole
    else:
        quick = Replayer(trace, curve, savings, engine_blocks, most_uses)

    def outcome_of(replayer: Replayer, setup: Setup, name: str) -> Outcome:
        nonlocal done
        progress(name, done / steps)
        done += 1
        return replayer.outcome(setup)

    compared = [outcome_of(whole, Setup(memory, each), each) for each in policies if memory]
    known = {each.setup.policy: each for each in compared}
    compared.sort(key=lambda each: -each.hit_rate)
    rows = []
    for blocks in sorted(wanted) if most.blocks else ():
        outcomes = [
            known[each] if blocks == memory else outcome_of(quick, Setup(blocks, each), each)
            for each in others
        ]
        rows.append(Row(curve.at(blocks), outcomes))
    found = Sizing(
        rows, knee, most, memory, 0, None, DAY_SECONDS, compared, (), None, curve.at(disk)
    )
    best = compared[0].hit_rate if compared else curve.at(memory).hit_rate
    if not disk or not admissions or found.disk_most.hit_rate - best < _DISK_POINTS:
        return found
    found = _with_writes(replace(found, tried_disk=disk), trace, drive_writes)
    setup = Setup(memory, found.policy)
    without = known.get(setup.policy)
    if without is None or quick is not whole:
        without = outcome_of(quick, setup, setup.policy)
    setup = replace(
        setup,
        disk_blocks=disk,
        write_blocks=found.write_blocks,
        write_seconds=found.write_seconds,
    )
    by_writes = [outcome_of(quick, replace(setup, admission=each), each) for each in admissions]
    by_writes.sort(key=lambda each: each.written_blocks)
    return replace(found, admissions=by_writes, without_disk=without)


def _with_writes(sizing: Sizing, trace: Trace, drive_writes: float) -> Sizing:
    """Limit the writes by the drive's endurance. A trace of less than a day gets its share of the
    day's writes."""
    if trace.seconds < LEAST_SECONDS:
        return sizing
    seconds = min(DAY_SECONDS, trace.seconds)
    a_day = drive_writes * sizing.tried_disk
    return replace(sizing, write_blocks=int(a_day * seconds / DAY_SECONDS), write_seconds=seconds)
