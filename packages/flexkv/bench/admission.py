# SPDX-License-Identifier: Apache-2.0
"""What each way of admission to the disk gives and costs, on a trace of real requests.

`python admission.py TRACE` reads a trace in Mooncake's format: a JSON object a line, its
`hash_ids` one id per block of the prompt's prefix. Requests run one after the other, over the
indexes of the product (arena and disk) behind an engine whose own cache is an LRU. No bytes are
moved, and the disk is never too slow.

Columns: share of the trace's blocks that were found in host memory or on disk (not in the engine);
the same after a kill in the middle of the trace that leaves only what is on disk, over the next
1,000 requests; blocks written to disk per block computed.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flexkv.admission import ADMISSIONS, Admission
from flexkv.eviction import LRUPolicy
from flexkv.index import BlockIndex
from flexkv.tiers.disk.index import SlotIndex

ENGINE_BLOCKS = 500
HOST_BLOCKS = (1000, 5000)
DISK_BLOCKS = (5000, 20000, 100000)
AFTER_KILL = 1000
_CHECKSUM = bytes(16)


@dataclass(slots=True)
class Tally:
    blocks: int = 0
    hits: int = 0
    computed: int = 0
    written: int = 0


@dataclass(slots=True)
class Node:
    """An engine with host memory and a disk."""

    admission: Admission
    host_blocks: int
    disk: SlotIndex
    host: BlockIndex = field(init=False)
    engine: OrderedDict[bytes, None] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """With nothing but what is on disk."""
        self.host = BlockIndex(self.host_blocks, LRUPolicy())
        self.engine = OrderedDict()

    def run(self, keys: Sequence[bytes], tally: Tally) -> None:
        """One request with the prompt `keys`."""
        tally.blocks += len(keys)
        first = 0
        while first < len(keys) and keys[first] in self.engine:
            first += 1
        in_host = self.host.lookup(keys[first:])
        stop = first + in_host
        while stop < len(keys) and (self.host.lookup([keys[stop]]) or keys[stop] in self.disk):
            stop += 1
        tally.hits += stop - first
        tally.computed += len(keys) - stop
        self.disk.touch(keys[first:stop])
        hit = keys[first : first + in_host]
        self.host.release(self.host.lease(hit) or [])
        if self.admission.on_hit:
            self.write(hit, tally)
        self.fill_host(keys, keys[stop:], tally)
        for key in keys:
            self.engine[key] = None
            self.engine.move_to_end(key)
        while len(self.engine) > ENGINE_BLOCKS:
            self.engine.popitem(last=False)

    def fill_host(self, keys: Sequence[bytes], computed: Sequence[bytes], tally: Tally) -> None:
        self.host.touch(keys)
        for before, key in zip([None, *keys], keys, strict=False):
            if key not in self.host:
                self.make_room(tally)
                block = self.host.reserve(key, before)
                if block is None:
                    break
                self.host.publish([block])
        if self.admission.on_store:
            self.write(computed, tally)

    def make_room(self, tally: Tally) -> None:
        if self.admission.on_evict and self.host.free_slots == 0:
            victim = self.host.lease_victim()
            if victim is not None:
                self.write([victim.key], tally)
                self.host.retire(victim)

    def write(self, keys: Sequence[bytes], tally: Tally) -> None:
        for key in reversed(keys):
            if not self.disk.has(key):
                slot = self.disk.reserve(key)
                assert slot is not None
                self.disk.publish(slot, _CHECKSUM)
                tally.written += 1


def read_trace(path: Path) -> list[list[bytes]]:
    with path.open(encoding="utf-8") as lines:
        return [[i.to_bytes(8, "big") for i in json.loads(line)["hash_ids"]] for line in lines]


def play(requests: Sequence[Sequence[bytes]], name: str, host: int, disk: int) -> list[str]:
    whole, after_kill = Tally(), Tally()
    node = Node(ADMISSIONS[name], host, SlotIndex(disk))
    for keys in requests:
        node.run(keys, whole)
    node = Node(ADMISSIONS[name], host, SlotIndex(disk))
    middle = len(requests) // 2
    for keys in requests[:middle]:
        node.run(keys, Tally())
    node.start()
    for keys in requests[middle : middle + AFTER_KILL]:
        node.run(keys, after_kill)
    return [
        name,
        f"{host:,}",
        f"{disk:,}",
        f"{whole.hits / whole.blocks:.3f}",
        f"{after_kill.hits / after_kill.blocks:.3f}",
        f"{whole.written / whole.computed:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    requests = read_trace(parser.parse_args().trace)
    heads = ["admission", "host blocks", "disk blocks", "hits", "after a kill", "written"]
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for host in HOST_BLOCKS:
        for disk in DISK_BLOCKS:
            for name in ADMISSIONS:
                print("| " + " | ".join(play(requests, name, host, disk)) + " |", flush=True)


if __name__ == "__main__":
    main()
