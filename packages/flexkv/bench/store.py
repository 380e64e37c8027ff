# SPDX-License-Identifier: Apache-2.0
"""How long it takes to order the store of one block behind a long prefix, in a full arena.

`python packages/flexkv/bench/store.py` prints the rows.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from flexkv import KVCache
from flexkv.eviction import LRUPolicy
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.types.mover import Status

PREFIXES = (1312, 8000)
KEY_BYTES = 32


def run(slots: int = 40_000, repeats: int = 501) -> list[dict[str, Any]]:
    """Median microseconds of `KVCache.store` behind prefixes of so many blocks; each evicts one."""
    arena = Arena.create(ArenaSpec(BlockFormat(1, (4096,)), slots), threads=1)
    cache = KVCache(arena, LRUPolicy())
    try:
        while cache.ready_blocks < slots:
            _store(cache, arena, _keys(PREFIXES[0]), range(PREFIXES[0]))
        return [
            {"name": "store", "prefix": prefix, "repeats": repeats, "microseconds": taken}
            for prefix in PREFIXES
            for taken in [_measure(cache, arena, prefix, repeats)]
        ]
    finally:
        arena.close()


def _measure(cache: KVCache, arena: Arena, prefix: int, repeats: int) -> float:
    keys = _keys(prefix)
    _store(cache, arena, keys, range(prefix))
    taken = []
    for _ in range(repeats):
        keys += _keys(1)
        taken.append(_store(cache, arena, keys, [len(keys) - 1]))
    if cache.lookup(keys) != len(keys):
        raise RuntimeError("the prefix made room for its own end")
    return statistics.median(taken) * 1e6


def _store(cache: KVCache, arena: Arena, keys: list[bytes], positions: Any) -> float:
    start = time.perf_counter()
    transfer = cache.store(keys, positions)
    taken = time.perf_counter() - start
    if transfer is None:
        raise RuntimeError("nothing was stored")
    arena.board.report(transfer.cell, 0, Status.DONE)
    cache.poll()
    return taken


def _keys(count: int) -> list[bytes]:
    return [os.urandom(KEY_BYTES) for _ in range(count)]


if __name__ == "__main__":
    for row in run():
        print(row)
