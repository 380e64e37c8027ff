# SPDX-License-Identifier: Apache-2.0
"""What FlexKV takes on vLLM's scheduler thread once host memory is full, the steady state.

Runs vLLM's real scheduler over the tests' world without a model; copies end at once.
`python packages/flexkv-vllm/bench/full_arena.py` prints the rows.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "flexkv" / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from engine_world import BLOCK_TOKENS, World, random_prompt
from stopwatch import Stopwatch, leave_out_workers
from vllm import SamplingParams
from vllm.v1.request import Request

from flexkv.types.presence import Presence

PROMPT_BLOCKS = 1312
PRESENCE_BLOCKS = 8000
ARENA_SLOTS = 1 << 18
"""At least: 64 GiB and more of large models' blocks."""
DECODING = ((16, 1312), (64, 1312), (256, 328), (1024, 256))
"""Requests that decode, and blocks of each. Every request fills a block in another step."""
PROMPTS: dict[str, dict[str, Any]] = {
    "one group": {},
    "one group, disk": {"disk_slots": ARENA_SLOTS + 16 * PROMPT_BLOCKS},
    "two groups": {"windows": (1024,)},
    "two groups, disk": {"windows": (1024,), "disk_slots": ARENA_SLOTS + 16 * PROMPT_BLOCKS},
}
"""Worlds with prompts of so many blocks. The second group looks back 1,024 tokens."""
STORING = {
    "ordering the stores": "build_connector_meta",
    "seeing the stores end": "update_connector_output",
}
"""Calls that a long prompt's stores make long. With a disk, writes begin once the stores end."""
_ANSWER_BLOCKS = 24
CONTEXT = 1 << 16


def run(
    repeats: int = 101,
    decoding: Sequence[tuple[int, int]] = DECODING,
    slots: int = ARENA_SLOTS,
) -> list[dict[str, Any]]:
    """Median microseconds, and the least."""
    rows: list[dict[str, Any]] = []
    for requests, blocks in decoding:
        taken = _in_world(
            lambda world, requests=requests, blocks=blocks: _decoding(
                world, requests, blocks, repeats
            ),
            num_blocks=requests * (blocks + _ANSWER_BLOCKS) + 2 * PROMPT_BLOCKS,
            slots=max(slots, requests * blocks),
            max_requests=requests,
        )
        case = f"{requests} requests of {blocks:,} blocks"
        rows.append(_row("a decoding step with stores", case, taken))
    for case, options in PROMPTS.items():
        found = _in_world(
            lambda world: _prompts(world, max(5, repeats // 5)),
            num_blocks=6 * PROMPT_BLOCKS,
            slots=slots,
            **options,
        )
        rows += [_row(name, case, taken) for name, taken in found.items()]
    return rows


def _row(name: str, case: str, taken: Sequence[float]) -> dict[str, Any]:
    return {
        "name": name,
        "case": case,
        "repeats": len(taken),
        "microseconds": statistics.median(taken),
        "least": min(taken),
    }


def _in_world(measure: Callable[[World], Any], **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), budget=32768, context=CONTEXT, **options)
        try:
            leave_out_workers(world)
            gc.collect()
            gc.freeze()  # as vLLM does
            return measure(world)
        finally:
            gc.unfreeze()
            world.close()


def _decoding(world: World, requests: int, blocks: int, repeats: int) -> list[float]:
    rng = random.Random(0)
    while world.cache._index.free_slots > requests * blocks:
        world.generate(_prompt(rng), max_tokens=1)
    for i in range(requests):
        length = blocks * BLOCK_TOKENS - 1 - i % BLOCK_TOKENS
        world.add(random_prompt(rng, length), max_tokens=_ANSWER_BLOCKS * BLOCK_TOKENS)
    while not all(world.outputs.values()) or world.cache._index.free_slots:
        world.step()
    watch = Stopwatch(world.connector)
    taken: list[float] = []
    while len(taken) < repeats:
        stores = world.cache.counters.stores
        watch.clear()
        world.step()
        if world.cache.counters.stores > stores:
            taken.append(watch.total())
    return taken


def _prompts(world: World, repeats: int) -> dict[str, list[float]]:
    rng = random.Random(0)
    found: dict[str, list[float]] = {}
    watch = Stopwatch(world.connector)

    def note(name: str, call: str, request: Request, *args: int) -> None:
        watch.clear()
        getattr(world.connector, call)(request, *args)
        found.setdefault(name, []).append(watch.total())

    oldest: list[str] = []
    while world.cache._index.free_slots:
        oldest.append(world.generate(_prompt(rng), max_tokens=1))
        world.settle()
    for _ in range(repeats):
        prompt = _prompt(rng)
        watch.clear()
        world.generate(prompt, max_tokens=1)
        for name, call in STORING.items():
            found.setdefault(name, []).append(max(watch.taken[call]))
        world.settle()
        for place in ("vLLM's own cache", "host memory", "neither"):
            request = _request(world, prompt if place != "neither" else _prompt(rng))
            note(f"queued, blocks in {place}", "on_new_request", request)
            if place == "host memory":
                note("a lookup", "get_num_new_matched_tokens", request, 0)
                note("the same lookup, next step", "get_num_new_matched_tokens", request, 0)
            world.side.finished(request)
            if place == "vLLM's own cache":
                world.forget()
    if world.cache.info.media and world.side._groups.plain:
        keys = _keys_of_prompts(world, rng, oldest[:2])
        for _ in range(repeats):
            start = time.perf_counter()
            presence = world.cache.presence(keys)
            taken = (time.perf_counter() - start) * 1e6
            found.setdefault(f"presence of {len(keys):,} blocks", []).append(taken)
        if Presence.ABSENT in presence or Presence.BELOW not in presence:
            raise RuntimeError(f"presence found {Counter(presence)}")
    return found


def _keys_of_prompts(world: World, rng: random.Random, oldest: Sequence[str]) -> list[bytes]:
    """Of the oldest prompts, which are on disk alone, and of new ones."""
    keys: list[bytes] = []
    for request_id in oldest:
        keys += world.requests[request_id].block_hashes[:PROMPT_BLOCKS]
    while len(keys) < PRESENCE_BLOCKS:
        request_id = world.generate(_prompt(rng), max_tokens=1)
        keys += world.requests[request_id].block_hashes[:PROMPT_BLOCKS]
        world.settle()
    return keys[:PRESENCE_BLOCKS]


def _prompt(rng: random.Random) -> list[int]:
    return random_prompt(rng, PROMPT_BLOCKS * BLOCK_TOKENS + 5)


def _request(world: World, prompt: list[int]) -> Request:
    """One that vLLM's scheduler does not know."""
    return Request(
        f"asked {uuid.uuid4()}",
        prompt,
        SamplingParams(max_tokens=1),
        None,
        block_hasher=world.hasher,
    )


if __name__ == "__main__":
    for row in run():
        print(row, flush=True)
