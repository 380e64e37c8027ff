# SPDX-License-Identifier: Apache-2.0
"""What a hit takes under vLLM's OffloadingConnector, which asks FlexKV block by block.

Runs vLLM's real scheduler over the tests' world without a model, for hits in host memory. vLLM's
own loops are measured beside, over a manager that answers at once; the rest is FlexKV's share.
`python packages/flexkv-vllm/bench/offload_calls.py` prints the rows.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "flexkv" / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from engine_world import BLOCK_TOKENS, random_prompt
from offloading_world import OffloadingWorld
from step_calls import CallCount
from stopwatch import no_forward
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

PROMPT_BLOCKS = 1312
_LOOKUPS, _SOURCES = "lookups of a prompt", "sources of the hit"


class InstantManager:
    """Has every block."""

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        return LookupResult.HIT

    def get_load_source(self, key: Any, req_context: Any) -> CacheHitSource:
        return CacheHitSource.HOST


class Measured:
    """Of one call of vLLM's connector: all times, those of vLLM's own loops, and calls."""

    def __init__(self) -> None:
        self.microseconds: list[float] = []
        self.own: list[float] = []
        self.calls: list[int] = []
        self.searches: list[int] = []

    def note(self, side: Any, ask: Callable[[], Any], ask_instant: Callable[[], Any]) -> Any:
        """Measure `ask`, and `ask_instant` over `InstantManager`; returns the answer of `ask`."""
        count = CallCount()
        with count.counting():
            ask()
        self.calls.append(count.total)
        self.searches.append(count.searches.total())
        side.manager.on_schedule_end(ScheduleEndContext((), ()))  # as in another step
        answer, taken = _timed(ask)
        self.microseconds.append(taken)
        side.manager, manager = InstantManager(), side.manager
        self.own.append(_timed(ask_instant)[1])
        side.manager = manager
        return answer

    def row(self, name: str) -> dict[str, Any]:
        taken, own = statistics.median(self.microseconds), statistics.median(self.own)
        return {
            "name": name,
            "microseconds": taken,
            "least": min(self.microseconds),
            "own": own,
            "share": taken - own,
            "least share": min(self.microseconds) - min(self.own),
            "calls": statistics.median(self.calls),
            "searches": statistics.median(self.searches),
            "repeats": len(self.microseconds),
        }


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    answer = call()
    return answer, (time.perf_counter() - start) * 1e6


def run(repeats: int = 21) -> list[dict[str, Any]]:
    """Median microseconds, FlexKV's share of them, its calls, and its searches of the index."""
    rng = random.Random(0)
    lookups, sources = Measured(), Measured()
    with tempfile.TemporaryDirectory() as directory:
        world = OffloadingWorld(
            Path(directory),
            num_blocks=3 * PROMPT_BLOCKS,
            slots=2 * PROMPT_BLOCKS,
            budget=32768,
            context=1 << 16,
        )
        try:
            type(world.ranks[0]).forward = no_forward  # type: ignore[method-assign]
            gc.collect()
            gc.freeze()  # as vLLM does
            side: Any = world.connector.connector_scheduler
            match, find_sources = (
                side.get_num_new_matched_tokens,
                side.get_external_cache_hit_sources,
            )

            def note_match(*args: Any, **options: Any) -> Any:
                ask = lambda: match(*args, **options)  # noqa: E731
                return lookups.note(side, ask, ask)

            def note_sources(*args: Any) -> Any:
                ask = lambda: find_sources(*args)  # noqa: E731
                return sources.note(side, ask, ask)

            for _ in range(repeats):
                prompt = random_prompt(rng, PROMPT_BLOCKS * BLOCK_TOKENS + 5)
                world.generate(prompt, max_tokens=1)
                world.forget()
                side.get_num_new_matched_tokens = note_match
                side.get_external_cache_hit_sources = note_sources
                request_id = world.generate(prompt, max_tokens=1)
                del side.get_num_new_matched_tokens, side.get_external_cache_hit_sources
                assert world.external_tokens[request_id] == PROMPT_BLOCKS * BLOCK_TOKENS
                world.forget()
        finally:
            gc.unfreeze()
            world.close()
    return [lookups.row(_LOOKUPS), sources.row(_SOURCES)]


if __name__ == "__main__":
    for row in run(int(sys.argv[1]) if len(sys.argv) > 1 else 21):
        print(row, flush=True)
