# SPDX-License-Identifier: Apache-2.0
"""What FlexKV adds to a step of vLLM's scheduler in which it has nothing to do.

Runs vLLM's real scheduler over the tests' world without a model, and sums up the time spent in
the calls to our connector. `python packages/flexkv-vllm/bench/scheduler_step.py` prints the rows.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from engine_world import BLOCK_TOKENS, World, random_prompt

CALLS = (
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "take_events",
    "has_pending_block_frees",
    "has_pending_push_work",
)
"""What vLLM calls in every step, also when nothing is loaded, stored or admitted."""


class Stopwatch:
    """Adds up the time spent in the connector's calls."""

    def __init__(self, connector: Any) -> None:
        self.seconds = 0.0
        for name in CALLS:
            setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            self.seconds += time.perf_counter() - start
            return result

        return timed


def run(repeats: int = 501, decoding: tuple[int, ...] = (0, 8, 64)) -> list[dict[str, Any]]:
    """Median microseconds per step, with so many requests decoding and no block filling up."""
    return [
        {"name": "idle step", "decoding": count, "repeats": repeats, "microseconds": microseconds}
        for count in decoding
        for microseconds in [measure(count, repeats)]
    ]


def measure(decoding: int, repeats: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), num_blocks=4096, slots=4096, budget=2048, max_requests=64)
        try:
            return _measure(world, decoding, repeats)
        finally:
            world.close()


def _measure(world: World, decoding: int, repeats: int) -> float:
    rng = random.Random(0)
    for _ in range(decoding):
        world.add(random_prompt(rng, BLOCK_TOKENS), max_tokens=1900)
    for _ in range(4):
        world.step()
    watch = Stopwatch(world.connector)
    taken: list[float] = []
    steps = 0
    while len(taken) < repeats:
        stores = world.cache.counters.stores
        watch.seconds = 0.0
        world.step()
        steps += 1
        # Blocks of all requests fill up in the same one of 16 steps; that one is not idle.
        if world.cache.counters.stores == stores:
            taken.append(watch.seconds * 1e6)
    return statistics.median(taken)


if __name__ == "__main__":
    for row in run():
        print(row)
