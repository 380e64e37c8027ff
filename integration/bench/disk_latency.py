# SPDX-License-Identifier: Apache-2.0
"""How long loads take while stores saturate the disk, against loads on an idle one."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import statistics
import time
from pathlib import Path

from flexkv.tiers.disk import open_disk_tier
from flexkv.tiers.job import Outcome, Priority
from integration.bench.disk_contenders import FINGERPRINT, KEY_BYTES, blocks_of
from integration.bench.rows import Goal, Row, milliseconds

LOADS = 200
ROUNDS = 5
BLOCK_BYTES = 2 << 20
BLOCKS_PER_LOAD = 16
_SETS = 8
_QUEUE_BYTES = 256 << 20
_STEP_SECONDS = 0.0001
# The sets that are loaded stay: each is loaded again before as many other blocks were written.
_CAPACITY = 2 << 30
# Between two loads the writer is alone for as long as this many blocks take, or as many seconds
# pass on the idle disk: without a pause there would be only loads, as they go first.
_GAP_BLOCKS = (8, 24)
_GAP_SECONDS = (0.005, 0.02)


def latency_row(folder: Path, memory: mmap.mmap) -> Row:
    """p99 of a load of 16 blocks of 2 MiB while the write queue is full ÷ on an idle disk; both in
    turns, so that what else the machine does hits both."""
    bench = _Loads(folder, memory)
    idle: list[float] = []
    busy: list[float] = []
    for _ in range(ROUNDS):
        idle += bench.measure(LOADS // ROUNDS, writing=False)
        busy += bench.measure(LOADS // ROUNDS, writing=True)
    bench.close()
    idle_p99, busy_p99 = _p99(idle), _p99(busy)
    return Row(
        what=f"p99 of loads of {BLOCKS_PER_LOAD} x 2 MiB from disk while stores saturate it ÷ idle",
        value=busy_p99 / idle_p99,
        unit="ratio",
        goal=Goal("<=", 1.5),
        detail=(
            f"{milliseconds(busy_p99)} ÷ {milliseconds(idle_p99)}, {LOADS} loads each; medians "
            f"{milliseconds(statistics.median(busy))} and {milliseconds(statistics.median(idle))}; "
            f"{bench.written * BLOCK_BYTES / 1e9:.0f} GB written meanwhile"
        ),
        samples={"busy": busy, "idle": idle},
    )


class _Loads:
    """One tier, loads from it, and a writer that keeps its queue full, all from one thread."""

    def __init__(self, folder: Path, memory: mmap.mmap) -> None:
        blocks = blocks_of(memory, BLOCK_BYTES)
        self._targets = blocks[:BLOCKS_PER_LOAD]
        self._sources = itertools.cycle(blocks[BLOCKS_PER_LOAD:])
        self._tier = open_disk_tier(
            [str(folder)], FINGERPRINT, BLOCK_BYTES, _CAPACITY, queue_bytes=_QUEUE_BYTES
        )
        self._random = random.Random(0)
        self._queued = 0
        self.written = 0
        # A full cache is the daily state: what is written from then on overwrites.
        for _ in range(_CAPACITY // BLOCK_BYTES):
            self._write(1)
            while self._queued * BLOCK_BYTES >= _QUEUE_BYTES // 2:
                self._step()
        self._drain()
        self._sets = itertools.cycle([self._store_set() for _ in range(_SETS)])
        self.written = 0

    def measure(self, loads: int, writing: bool) -> list[float]:
        """Seconds of each of `loads`."""
        seconds = []
        for _ in range(loads):
            if writing:
                self._write_alone(self._random.randint(*_GAP_BLOCKS))
            else:
                time.sleep(self._random.uniform(*_GAP_SECONDS))
            seconds.append(self._load(next(self._sets), writing))
        self._drain()
        return seconds

    def close(self) -> None:
        self._tier.close()

    def _load(self, keys: list[bytes], writing: bool) -> float:
        began = time.perf_counter()
        ticket = self._tier.read(keys, self._targets, Priority.LOAD)
        waiting = len(keys)
        while waiting:
            waiting -= self._step(ticket)
            if writing:
                self._fill()
        return time.perf_counter() - began

    def _write_alone(self, blocks: int) -> None:
        end = self.written + blocks
        while self.written < end:
            self._fill()
            self._step()

    def _store_set(self) -> list[bytes]:
        keys = self._write(BLOCKS_PER_LOAD)
        self._drain()
        return keys

    def _fill(self) -> None:
        while self._queued * BLOCK_BYTES < _QUEUE_BYTES:
            self._write(1)

    def _write(self, blocks: int) -> list[bytes]:
        keys = [os.urandom(KEY_BYTES) for _ in range(blocks)]
        self._tier.write(keys, [next(self._sources) for _ in keys])
        self._queued += blocks
        return keys

    def _drain(self) -> None:
        while self._queued:
            self._step()

    def _step(self, load: int | None = None) -> int:
        """Sleep, then poll; returns how many blocks of `load` came. All others are writes."""
        time.sleep(_STEP_SECONDS)
        loaded = 0
        for result in self._tier.poll():
            if result.ticket != load:
                self._queued -= 1
                self.written += result.outcome is Outcome.DONE
            elif result.outcome is Outcome.DONE:
                loaded += 1
            else:
                raise RuntimeError(f"the disk tier ended a load with {result.outcome}")
        return loaded


def _p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98]
