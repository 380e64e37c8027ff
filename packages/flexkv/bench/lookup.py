# SPDX-License-Identifier: Apache-2.0
"""How long a lookup takes: 1,312 blocks, a prompt of 21,000 tokens in blocks of 16.

`python packages/flexkv/bench/lookup.py` prints the rows.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from typing import Any

from flexkv.eviction import LRUPolicy
from flexkv.index.block_index import BlockIndex, block_index

PROMPT_BLOCKS = 1312
KEY_BYTES = 32
"""vLLM's block hashes are SHA-256 digests."""


def run(indexed: int = 200_000, repeats: int = 501) -> list[dict[str, Any]]:
    """Median microseconds of a full hit and of a miss at the first block, in an index of
    `indexed` blocks; each lookup is of another prompt, as keys that were just looked up are
    still in the processor's caches."""
    index = block_index(indexed, LRUPolicy())
    keys = [os.urandom(KEY_BYTES) for _ in range(indexed)]
    blocks = [index.reserve(key, None) for key in keys]
    index.publish([block for block in blocks if block is not None])
    rng = random.Random(0)
    starts = [rng.randrange(indexed - PROMPT_BLOCKS) for _ in range(repeats)]
    hits = [_microseconds(index, keys[s : s + PROMPT_BLOCKS], PROMPT_BLOCKS) for s in starts]
    absent = [os.urandom(KEY_BYTES) for _ in range(PROMPT_BLOCKS)]
    misses = [_microseconds(index, absent, 0) for _ in range(repeats)]
    return [
        {"name": "lookup", "case": case, "blocks": PROMPT_BLOCKS, "indexed": indexed,
         "repeats": repeats, "microseconds": statistics.median(taken)}
        for case, taken in (("hit", hits), ("miss", misses))
    ]  # fmt: skip


def _microseconds(index: BlockIndex, keys: list[bytes], expected: int) -> float:
    start = time.perf_counter()
    found = index.lookup(keys)
    taken = time.perf_counter() - start
    if found != expected:
        raise RuntimeError(f"lookup found {found} blocks instead of {expected}")
    return taken * 1e6


if __name__ == "__main__":
    for row in run():
        print(row)
