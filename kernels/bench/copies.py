# SPDX-License-Identifier: Apache-2.0
"""Copies between pages and an arena against one large memcpy of the same bytes.

``python kernels/bench/copies.py --json out.json`` prints a table and writes the rows.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexkv_kernels import CpuMover, Direction, Status, available_kernels
from flexkv_kernels._library import LIBRARY

KIB = 1024
MIB = 1024 * KIB
PLANES = 32
"""Layers of an 8B model."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured. ``total_bytes`` should be several times the last level cache."""

    page_kib: Sequence[int] = (8, 16, 32, 64)
    threads: Sequence[int] = (1, 2)
    total_bytes: int = 512 * MIB
    repeats: int = 7
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CopyRow:
    """Medians of one direction, page size and number of threads.

    ``ratio`` is the median of copy speed ÷ memcpy speed over the repeats: both of a repeat run
    right after one another, so that other work on the machine meets both.
    """

    name: str
    direction: str
    page_bytes: int
    threads: int
    total_bytes: int
    repeats: int
    gb_per_s: float
    memcpy_gb_per_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class SubmitRow:
    """Median time that one call of submit takes from its caller."""

    name: str
    blocks: int
    input: str
    repeats: int
    microseconds: float


class Buffers:
    """``size`` bytes for pages, as an engine allocates them, and as many for an arena (memfd)."""

    def __init__(self, size: int) -> None:
        self.size = size
        fd = os.memfd_create("flexkv-bench", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            self._maps = [mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE), mmap.mmap(fd, size)]
        finally:
            os.close(fd)
        self.pages, self.arena = (
            ctypes.addressof(ctypes.c_char.from_buffer(mapped)) for mapped in self._maps
        )
        for address in (self.pages, self.arena):
            ctypes.memset(address, 1, size)


def run(settings: Settings = Settings()) -> list[dict[str, Any]]:
    """All rows; takes some 15 seconds and twice ``total_bytes`` of memory."""
    buffers = Buffers(settings.total_bytes)
    rows: list[dict[str, Any]] = []
    for threads in settings.threads:
        for page_kib in settings.page_kib:
            rows += map(asdict, measure_copies(buffers, page_kib * KIB, threads, settings))
    rows += map(asdict, measure_submit(buffers))
    return rows


def measure_copies(
    buffers: Buffers,
    page_bytes: int,
    threads: int,
    settings: Settings,
) -> list[CopyRow]:
    """Both directions, over blocks and slots in random order, interleaved with the yardstick."""
    num_blocks = buffers.size // (page_bytes * PLANES)
    stride = num_blocks * page_bytes
    planes = [
        (buffers.pages + i * stride, page_bytes, 1, page_bytes, page_bytes, i * page_bytes)
        for i in range(PLANES)
    ]
    mover = CpuMover(planes, num_blocks, buffers.arena, buffers.size, threads)
    rng = random.Random(settings.seed)
    blocks = array("Q", rng.sample(range(num_blocks), num_blocks))
    offsets = array("Q", (mover.block_bytes * i for i in rng.sample(range(num_blocks), num_blocks)))
    copied = num_blocks * mover.block_bytes
    seconds: dict[tuple[str, Direction], list[float]] = {}
    for _ in range(settings.repeats + 1):  # the first one warms up
        for direction in Direction:
            store = direction is Direction.STORE
            dst, src = (buffers.arena, buffers.pages) if store else (buffers.pages, buffers.arena)
            seconds.setdefault(("memcpy", direction), []).append(
                time_memcpy(dst, src, copied, threads)
            )
            seconds.setdefault(("copy", direction), []).append(
                time_transfer(mover, direction, blocks, offsets)
            )
    mover.close()
    rows = []
    for direction in Direction:
        copy = seconds["copy", direction][1:]
        memcpy = seconds["memcpy", direction][1:]
        rows.append(
            CopyRow(
                name="copy",
                direction=direction.name.lower(),
                page_bytes=page_bytes,
                threads=threads,
                total_bytes=copied,
                repeats=settings.repeats,
                gb_per_s=copied / statistics.median(copy) / 1e9,
                memcpy_gb_per_s=copied / statistics.median(memcpy) / 1e9,
                ratio=statistics.median(m / c for c, m in zip(copy, memcpy, strict=True)),
            )
        )
    return rows


def time_memcpy(dst: int, src: int, size: int, threads: int) -> float:
    """Seconds of one contiguous memcpy cut into ``threads`` parts."""
    seconds = ctypes.c_double()
    code: int = LIBRARY.waiting.fkv_bench_memcpy(dst, src, size, threads, 1, ctypes.byref(seconds))
    if code != 0:
        raise MemoryError(f"the memcpy of {size} bytes with {threads} threads failed: {code}")
    return seconds.value


def time_transfer(
    mover: CpuMover, direction: Direction, blocks: array[int], offsets: array[int]
) -> float:
    """Seconds from submit to the end."""
    start = time.perf_counter()
    ticket = mover.submit(direction, blocks, offsets)
    status = mover.wait(ticket, float("inf"))
    taken = time.perf_counter() - start
    if status is not Status.DONE:
        raise RuntimeError(f"transfer {ticket} ended as {status.name}")
    return taken


def measure_submit(buffers: Buffers, blocks: int = 4096, repeats: int = 101) -> list[SubmitRow]:
    """The call alone, for the two kinds of input that need no and most conversion."""
    mover = CpuMover([(buffers.pages, 64, 1, 64, 64, 0)], blocks, buffers.arena, buffers.size, 1)
    rows = []
    inputs: list[tuple[str, Sequence[int], Sequence[int]]] = [
        ("array", array("Q", range(blocks)), array("Q", range(0, blocks * 64, 64))),
        ("list", list(range(blocks)), list(range(0, blocks * 64, 64))),
    ]
    for name, block_list, offsets in inputs:
        taken = []
        for _ in range(repeats):
            start = time.perf_counter()
            ticket = mover.submit(Direction.STORE, block_list, offsets)
            taken.append(time.perf_counter() - start)
            mover.wait(ticket, float("inf"))
        rows.append(SubmitRow("submit", blocks, name, repeats, statistics.median(taken) * 1e6))
    mover.close()
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"copy kernels: {', '.join(available_kernels())}")
    print(f"{'':10}{'page':>10}{'threads':>9}{'copy GB/s':>11}{'memcpy GB/s':>13}{'ratio':>7}")
    for row in rows:
        if row["name"] == "copy":
            print(
                f"{row['direction']:10}{row['page_bytes'] // KIB:>6} KiB{row['threads']:>9}"
                f"{row['gb_per_s']:>11.2f}{row['memcpy_gb_per_s']:>13.2f}{row['ratio']:>7.2f}"
            )
        else:
            print(
                f"submit of {row['blocks']} blocks ({row['input']}): {row['microseconds']:.1f} us"
            )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="page copies against one large memcpy")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--total-mib", type=int, default=512, help="bytes of each transfer")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    rows = run(Settings(total_bytes=options.total_mib * MIB, repeats=options.repeats))
    print_table(rows)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
