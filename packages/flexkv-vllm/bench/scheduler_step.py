# SPDX-License-Identifier: Apache-2.0
"""What FlexKV adds to a step of vLLM's scheduler in which it has nothing to do.

Runs vLLM's real scheduler over the tests' world without a model and without workers, and sums up
the time spent in the calls to our connector.
`python packages/flexkv-vllm/bench/scheduler_step.py` prints the rows.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "flexkv" / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from engine_world import BLOCK_TOKENS, World, random_prompt
from stopwatch import Stopwatch, leave_out_workers


def run(
    repeats: int = 501, decoding: tuple[int, ...] = (0, 8, 64, 256, 1024)
) -> list[dict[str, Any]]:
    """Median microseconds per step, with so many requests decoding and no block filling up."""
    return [
        {"name": "idle step", "decoding": count, "repeats": repeats, "microseconds": microseconds}
        for count in decoding
        for microseconds in [measure(count, repeats)]
    ]


def measure(decoding: int, repeats: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        world = World(
            Path(directory), num_blocks=1 << 16, slots=1 << 18, budget=2048, max_requests=1024
        )
        try:
            leave_out_workers(world)
            gc.collect()
            gc.freeze()  # as vLLM does
            return _measure(world, decoding, repeats)
        finally:
            gc.unfreeze()
            world.close()


def _measure(world: World, decoding: int, repeats: int) -> float:
    rng = random.Random(0)
    for _ in range(decoding):
        world.add(random_prompt(rng, BLOCK_TOKENS), max_tokens=1900)
    for _ in range(4 + decoding * BLOCK_TOKENS // 2048):
        world.step()
    watch = Stopwatch(world.connector)
    taken: list[float] = []
    while len(taken) < repeats:
        stores = world.cache.counters.stores
        watch.clear()
        world.step()
        # Blocks of all requests fill up in the same one of 16 steps; that one is not idle.
        if world.cache.counters.stores == stores:
            taken.append(watch.total())
    return statistics.median(taken)


if __name__ == "__main__":
    for row in run():
        print(row)
