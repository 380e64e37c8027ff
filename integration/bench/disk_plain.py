# SPDX-License-Identifier: Apache-2.0
"""FlexKV's own file read by threads that do nothing else: the rest is what the tier costs.

Against fio this is the fairer bound for reads: fio reads into the same few buffers again and again,
where a cache fills all of its memory. On a virtual drive plain threads read blocks of 256 KiB and
1 MiB 9 % faster into 8 buffers of their own than into 1 GiB.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from flexkv.tiers.disk.drive import THREADS
from flexkv.tiers.disk.files import DIRECT
from flexkv.tiers.disk.slabs import slab_name, slots_per_slab
from integration.bench.disk_contenders import FlexKV, Transfer


class PlainThreads:
    """Reads each block that `flexkv` wrote last, in the same order from the same place into the
    same memory, in a call of its own; as many threads as the tier has take turns. No checksum, no
    queue, no results."""

    name = "plain threads"
    how = "O_DIRECT, the same file into the same memory, unchecked"

    def __init__(self, flexkv: FlexKV) -> None:
        self._flexkv = flexkv

    def read(self) -> Transfer:
        (drive,) = self._flexkv.drives
        placed = list(self._flexkv.placed())
        size = len(placed[0][1])
        per_slab = slots_per_slab(size)
        slabs = {slot // per_slab for slot, _ in placed}
        files = {
            slab: os.open(os.path.join(drive.path, slab_name(slab)), os.O_RDONLY | DIRECT)
            for slab in slabs
        }
        feed = iter(placed)

        def work(feed: Iterator[tuple[int, memoryview]]) -> int:
            done = 0
            for slot, block in feed:  # a list's iterator serves all threads, each item once
                slab, place = divmod(slot, per_slab)
                done += os.preadv(files[slab], [block], place * size)
            return done

        try:
            with ThreadPoolExecutor(THREADS) as pool:
                began, cpu_began = time.perf_counter(), time.process_time()
                done = sum(pool.map(work, [feed] * THREADS))
                seconds = time.perf_counter() - began
                cpu_seconds = time.process_time() - cpu_began
        finally:
            for fd in files.values():
                os.close(fd)
        if done != len(placed) * size:
            raise RuntimeError(f"plain threads read {done} bytes of {len(placed) * size}")
        return Transfer(done, seconds, cpu_seconds)
