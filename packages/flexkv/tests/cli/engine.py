# SPDX-License-Identifier: Apache-2.0
"""A process that owns a cache directory as an engine does, until its standard input ends.

    python engine.py DIR FINGERPRINT MODE

Prints "ready" when it owns the directory. MODE is "hold", or "write" to write new blocks all the
time; the number of blocks written is printed at the end.
"""

from __future__ import annotations

import itertools
import mmap
import select
import sys

from flexkv.tiers.disk import DiskTier, open_disk_tier

BLOCK_BYTES = 64 << 10
CAPACITY = 4 << 20
BATCH = 4
"""Blocks that are written at once, when all slots are taken."""


def opened(
    root: str, fingerprint: str, block_bytes: int = BLOCK_BYTES, capacity: int = CAPACITY
) -> DiskTier:
    """A tier that never takes a busy machine for a disk that hangs."""
    return open_disk_tier([root], fingerprint, block_bytes, capacity, stall_seconds=60.0)


def block(number: int) -> memoryview:
    """A block of bytes that differ from those of every other number."""
    buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    buffer[:] = number.to_bytes(8, "little") * (BLOCK_BYTES // 8)
    return buffer


def write(tier: DiskTier, first: int, count: int) -> None:
    """Write blocks `first..first + count`; their keys are their numbers, 16 bytes long."""
    numbers = range(first, first + count)
    tier.write([number.to_bytes(16, "big") for number in numbers], [block(n) for n in numbers])
    done = 0
    while done < count:
        done += len(tier.poll())


def main(root: str, fingerprint: str, mode: str) -> None:
    tier = opened(root, fingerprint)
    written = 0
    if mode == "write":
        write(tier, 0, 64)  # all slots and more: from now on every write replaces a block
        written = 64
    print("ready", flush=True)
    for first in itertools.count(written, BATCH):
        if select.select([sys.stdin], [], [], 0 if mode == "write" else None)[0]:
            break
        write(tier, first, BATCH)
        written += BATCH
    tier.close()
    print(written)


if __name__ == "__main__":
    main(*sys.argv[1:])
