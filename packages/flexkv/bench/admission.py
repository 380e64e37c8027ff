# SPDX-License-Identifier: Apache-2.0
"""What each way of admission to the disk gives and costs, on a trace of real requests.

`python admission.py TRACE` reads a trace in Mooncake's format: a JSON object a line, its
`hash_ids` one id per block of the prompt's prefix. Requests run one after the other over the
product: a `KVCache` with its arena and a disk tier, whose blocks are of 4 KiB, behind an engine
whose own cache is an LRU. The disk is never too slow: each request begins when nothing is under
way.

Columns: share of the trace's blocks that were loaded from host memory or disk, each behind those
before it (not found in the engine); the same after a kill in the middle of the trace that leaves
only what is on disk, over the next 1,000 requests; blocks written to disk per block computed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexkv import KVCache
from flexkv.eviction import LRUPolicy
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.tiers.base import AttachedTier
from flexkv.tiers.disk import open_disk_tier
from flexkv.tiers.disk.disk_store import slots_within
from flexkv.types.admission import ADMISSIONS
from flexkv.types.mover import Status

ENGINE_BLOCKS = 500
STEP_BLOCKS = 16
"""Stored at once: 8,192 tokens, what a step computes."""

SIZES = ((1000, 20000), (5000, 20000), (5000, 100000))
"""Blocks of host memory and of the disk."""

AFTER_KILL = 1000
BLOCK_BYTES = 4096
FINGERPRINT = "ad" * 16


@dataclass(slots=True)
class Tally:
    blocks: int = 0
    hits: int = 0
    computed: int = 0


class Node:
    """An engine with host memory and a disk, which has what `folder` holds."""

    def __init__(self, admission: str, host_blocks: int, disk_blocks: int, folder: str) -> None:
        self.arena = Arena.create(ArenaSpec(BlockFormat(1, (BLOCK_BYTES,)), host_blocks), threads=1)
        self.disk = open_disk_tier(
            [folder], FINGERPRINT, BLOCK_BYTES, capacity_of(disk_blocks), stall_seconds=3600.0
        )
        tier = AttachedTier(self.disk, ADMISSIONS[admission], stall_seconds=3600.0)
        self.cache = KVCache(self.arena, LRUPolicy(), [tier])
        self.engine: OrderedDict[bytes, None] = OrderedDict()

    def run(self, keys: Sequence[bytes], tally: Tally) -> None:
        """One request with the prompt `keys`."""
        cache = self.cache
        first = 0
        while first < len(keys) and keys[first] in self.engine:
            first += 1
        fetch = cache.fetch(keys[first:])
        while fetch is not None and not cache.fetch_state(fetch).done:
            self.poll()
        stop = first + cache.lookup(keys[first:])
        cache.record(keys[:stop])
        if stop > first:
            load = cache.load(keys[first:stop])
            assert load is not None
            self.arena.board.report(load.cell, 0, Status.DONE)
        if fetch is not None:
            cache.end_fetch(fetch)
        for end in range(stop, len(keys) + STEP_BLOCKS, STEP_BLOCKS):
            self.store(keys[:end])
        cache.touch(keys)
        self.settle()
        tally.blocks += len(keys)
        tally.hits += stop - first
        tally.computed += len(keys) - stop
        for key in keys:
            self.engine[key] = None
            self.engine.move_to_end(key)
        while len(self.engine) > ENGINE_BLOCKS:
            self.engine.popitem(last=False)

    def store(self, keys: Sequence[bytes]) -> None:
        missing = self.cache.missing(keys)
        store = self.cache.store(keys, missing) if missing else None
        if store is not None:
            self.arena.board.report(store.cell, 0, Status.DONE)
            self.settle()

    def settle(self) -> None:
        while self.cache.busy:
            self.poll()

    def poll(self) -> None:
        self.cache.poll()
        time.sleep(0)

    def close(self) -> int:
        """Blocks that were written."""
        written = self.disk.figures.written_blocks
        assert self.cache.close()
        self.arena.close()
        return written


def capacity_of(blocks: int) -> int:
    """Bytes of a directory with `blocks` blocks."""
    low, high = 0, blocks * (BLOCK_BYTES + 4096) + (1 << 20)
    while low < high:
        middle = (low + high) // 2
        if slots_within(middle, BLOCK_BYTES) < blocks:
            low = middle + 1
        else:
            high = middle
    return low


def read_trace(path: Path) -> list[list[bytes]]:
    with path.open(encoding="utf-8") as lines:
        return [[i.to_bytes(8, "big") for i in json.loads(line)["hash_ids"]] for line in lines]


def play(requests: Sequence[Sequence[bytes]], name: str, host: int, disk: int) -> list[str]:
    whole, after_kill = Tally(), Tally()
    middle = len(requests) // 2
    with tempfile.TemporaryDirectory(prefix="flexkv-bench-") as folder:
        node = Node(name, host, disk, folder)
        for keys in requests:
            node.run(keys, whole)
        written = node.close()
    with tempfile.TemporaryDirectory(prefix="flexkv-bench-") as folder:
        node = Node(name, host, disk, folder)
        for keys in requests[:middle]:
            node.run(keys, Tally())
        node.close()  # nothing was under way: it leaves what a kill would
        node = Node(name, host, disk, folder)
        for keys in requests[middle : middle + AFTER_KILL]:
            node.run(keys, after_kill)
        node.close()
    return [
        f"`{name}`",
        f"{host:,}",
        f"{disk:,}",
        f"{whole.hits / whole.blocks:.3f}",
        f"{after_kill.hits / after_kill.blocks:.3f}",
        f"{written / whole.computed:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, help="only the first of the trace")
    options = parser.parse_args()
    requests = read_trace(options.trace)[: options.requests]
    heads = ["", "host blocks", "disk blocks", "hits", "hits after a kill", "written"]
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for host, disk in SIZES:
        for name in ADMISSIONS:
            print("| " + " | ".join(play(requests, name, host, disk)) + " |", flush=True)


if __name__ == "__main__":
    main()
