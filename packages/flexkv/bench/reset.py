# SPDX-License-Identifier: Apache-2.0
"""How long a reset takes the scheduler's thread, and the part of it that each later step does.

`python packages/flexkv/bench/reset.py` prints the rows.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from flexkv.eviction import POLICIES
from flexkv.index.block_index import BlockIndex, block_index
from flexkv.index.slot_index import slot_index
from flexkv.tiers.disk.table import CHECKSUM_BYTES

SLOTS = 1_000_000
PREFIX = 500
SWEPT_SLOTS = 512  # of a poll
REPEATS = 3


def run(slots: int = SLOTS) -> list[dict[str, Any]]:
    """Median microseconds of CPU time of a full index's reset, and the most that a sweep took."""
    return [
        *_rows("host memory, lru", [_reset_host("lru", slots) for _ in range(REPEATS)]),
        *_rows("host memory, hazard", [_reset_host("hazard", slots) for _ in range(REPEATS)]),
        *_rows("a directory", [(_reset_disk(slots), [0.0]) for _ in range(REPEATS)]),
    ]


def _rows(index: str, taken: list[tuple[float, list[float]]]) -> list[dict[str, Any]]:
    resets = [reset for reset, _ in taken]
    sweeps = [sweep for _, all_sweeps in taken for sweep in all_sweeps]
    return [
        {
            "name": "reset",
            "index": f"{what} of {index}",
            "repeats": len(times),
            "microseconds": statistics.median(times) * 1e6,
        }
        for what, times in (("reset", resets), ("a later step", sweeps))
        if any(times)
    ]


def _reset_host(policy: str, slots: int) -> tuple[float, list[float]]:
    index = block_index(slots, POLICIES[policy](slots))
    for _ in range(slots // PREFIX):
        keys = [os.urandom(32) for _ in range(PREFIX)]
        index.publish(index.reserve_all(keys, range(PREFIX), (0,)))
    return _time(index.clear), _sweep(index)


def _sweep(index: BlockIndex) -> list[float]:
    taken = []
    while index.stale_blocks:
        taken.append(_time(lambda: index.sweep(SWEPT_SLOTS)))
    return taken


def _reset_disk(slots: int) -> float:
    index = slot_index(slots)
    for _ in range(slots):
        slot = index.reserve(os.urandom(32))
        if slot is None:
            raise RuntimeError("the index has no slot left")
        index.publish(slot, bytes(CHECKSUM_BYTES))
    return _time(index.clear)


def _time(call: Any) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


if __name__ == "__main__":
    for row in run():
        print(row)
