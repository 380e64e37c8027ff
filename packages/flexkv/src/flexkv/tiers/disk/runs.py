# SPDX-License-Identifier: Apache-2.0
"""Runs: blocks of a batch in neighbouring slots, which one system call reads or writes."""

from __future__ import annotations

from collections.abc import Sequence

READ_RUN_BYTES = 2 << 20
"""The most bytes of a run that is read. On a virtual drive of 4 GB/s, two cores and 8 threads, runs
of 1 MiB read blocks of 16, 64, 256 and 512 KiB 4.3, 2.0, 1.16 and 1.06 times as fast as one by
one, and runs of 2 MiB 4.9, 2.2, 1.19 and 1.10 times; blocks of 1 MiB in pairs 1.02 to 1.05 times.
4 MiB brought no more."""

WRITE_RUN_BYTES = 1 << 20
"""The most bytes of a run that is written. On the same drive runs of 1 MiB wrote those blocks 5.7,
3.6, 1.27 and 1.09 times as fast as one by one; runs of 2 MiB within 8 % of that, but blocks of 1
MiB in pairs 3 to 7 % slower than one by one."""

SPREAD_BYTES = 256 << 10
"""Runs are cut so that every thread has one, but not below this size: waking a thread then costs
more than it saves. 16 blocks of 16 KiB were read in 0.47 ms as one run, in 0.67 ms as eight."""


def blocks_per_run(blocks: int, slot_bytes: int, run_bytes: int, threads: int) -> int:
    """How many blocks of a batch a run has at most, at least 1: a block that is larger than
    `run_bytes` is a run of its own."""
    each = max(-(-blocks // threads), SPREAD_BYTES // slot_bytes)
    return max(1, min(each, run_bytes // slot_bytes))


def find_runs(slots: Sequence[int], most: int, slots_per_slab: int) -> list[list[int]]:
    """Cut a batch into runs of at most so many neighbours, in its order. A run goes up or down by
    one slot from block to block, and not over the end of a slab. Returns for each run the positions
    of its blocks in the batch, the one in the lowest slot first."""
    runs: list[list[int]] = []
    step = 0
    for position, slot in enumerate(slots):
        change = slot - slots[position - 1] if position else 0
        if (
            change in (1, -1)
            and change != -step
            and len(runs[-1]) < most
            and slot // slots_per_slab == slots[position - 1] // slots_per_slab
        ):
            runs[-1].append(position)
            step = change
        else:
            runs.append([position])
            step = 0
    for run in runs:
        if slots[run[0]] > slots[run[-1]]:
            run.reverse()
    return runs
