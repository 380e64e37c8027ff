# SPDX-License-Identifier: Apache-2.0
"""What FlexKV adds to a step of SGLang's scheduler, for a prompt of 32,768 tokens.

Makes the linker's calls as SGLang does, without SGLang: what SGLang itself does for a linker, such
as its hashes of pages, does not count. Times are those of the calling thread.
`python packages/flexkv-sglang/bench/scheduler_calls.py` prints the rows.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from sglang_world import PATIENCE_SECONDS, HashedPrompt, Rank, hashes_of

from flexkv_sglang.waiting import WINDOW
from packages.inside import cache_of
from packages.inside_adapters import awaited_fetch

TOKENS = 1 << 15
PAGE_SIZES = (1, 16, 64)
_STEPS = 400
"""Steps whose look-ahead is measured. At a page size of 1 pages are left to look up after them."""


def run(repeats: int = 7) -> list[dict[str, Any]]:
    """Microseconds of each call, by page size: medians, and for the look-ahead what 95 of 100 steps
    take at most. Python's garbage collection makes some steps longer."""
    return [
        {"page": size, "name": name, "microseconds": taken, "repeats": count}
        for size in PAGE_SIZES
        for name, (taken, count) in _measure(size, repeats).items()
    ]


def _measure(size: int, repeats: int) -> dict[str, tuple[float, int]]:
    pages = TOKENS // size
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "ssd_cache_gb": 2.0,
            "ssd_cache_dir": (f"{folder}/disk",),
            "ssd_timeout_seconds": PATIENCE_SECONDS,
            "always_load": True,
        }
        taken: dict[str, list[float]] = {}
        rank = _rank(folder, size, settings)
        gc.collect()
        gc.freeze()  # as SGLang does
        try:
            for number in range(repeats):
                hashes = hashes_of(f"{number}", pages)
                _measure_calls(rank, hashes, taken)
        finally:
            gc.unfreeze()
            rank.close()
        rank = _rank(folder, size, settings)
        steps = _look_ahead(rank, hashes_of(f"{repeats - 1}", pages))
        rank.close()
    medians = {name: (statistics.median(each), repeats) for name, each in taken.items()}
    usual = statistics.quantiles(steps, n=20)[-1] if len(steps) > 1 else steps[0]
    return medians | {f"a step's look-ahead, {WINDOW} requests wait": (usual, len(steps))}


def _rank(folder: str, size: int, settings: dict[str, Any]) -> Rank:
    pages = TOKENS // size
    slot = max(4096, 768 * size)
    gb = {"cpu_cache_gb": 1.5 * pages * slot / (1 << 30)}
    return Rank(Path(folder), page_size=size, pages=pages, settings=settings | gb)


def _measure_calls(rank: Rank, hashes: list[str], taken: dict[str, list[float]]) -> None:
    side, pages = rank.side, list(range(1, len(hashes) + 1))

    def timed(name: str, call: Callable[[], object]) -> None:
        start = time.thread_time()
        call()
        taken.setdefault(name, []).append((time.thread_time() - start) * 1e6)

    def offload() -> None:
        side.offload(hashes, lambda: pages)

    timed("lookup, a miss", lambda: rank.lookup("r", hashes))
    for name in ("offload of new pages", "offload of known pages"):
        timed(name, offload)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not side.ended_offloads():
            assert time.monotonic() < deadline
        assert side.take_offload()
    timed("lookup, a hit", lambda: rank.lookup("r", hashes))
    timed("load", lambda: side.load("r", hashes, pages))
    side.cancel("r")
    while cache_of(
        side
    ).busy:  # the next prompt needs the room of blocks that are being written to the disk
        side.ended_offloads()
        time.sleep(0.001)


def _look_ahead(rank: Rank, hashes: list[str]) -> list[float]:
    """Microseconds of each step in which requests are looked up whose pages a disk has."""
    requests, side = rank.requests, rank.side
    taken: list[float] = []
    rids = [f"r {number}" for number in range(WINDOW)]
    for rid in rids:
        requests.waiting.is_new(rid)
        requests.look_ahead(rank.request(rid), HashedPrompt(hashes))
    while requests.waiting.looks_ahead and len(taken) < _STEPS:
        start = time.thread_time()
        requests.waiting.go_on()
        taken.append((time.thread_time() - start) * 1e6)
        side.held(rids)
        side.ended_offloads()
    assert awaited_fetch(side, rids[0]) is not None, "nothing is read"
    side.held([])
    return taken


if __name__ == "__main__":
    for row in run():
        print(f"page {row['page']:2}, {row['name']}: {row['microseconds']:.0f} us")
