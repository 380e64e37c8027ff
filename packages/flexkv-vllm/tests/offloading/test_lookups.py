# SPDX-License-Identifier: Apache-2.0
"""vLLM asks its manager for each block; the cache is asked once for a prompt."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from disk_world import PROMPT_BLOCKS, fill, hits, prompts
from engine_world import random_prompt
from kv_pages import BLOCK_TOKENS
from offloading_world import SEVERAL_GROUPS, WINDOW, MakeOffloadingWorld, OffloadingWorld

from flexkv import KVCache

LENGTH = 600
BLOCKS = LENGTH // BLOCK_TOKENS


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of the cache for keys, and by `keys in NAME` the keys in them."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> None:
        call = getattr(KVCache, name)

        def count(self: KVCache, keys: Any, *rest: Any) -> Any:
            calls[name] += 1
            calls[f"keys in {name}"] += len(keys)
            return call(self, keys, *rest)

        monkeypatch.setattr(KVCache, name, count)

    for name in ("lookup", "presence", "missing"):
        counted(name)
    return calls


def match(world: OffloadingWorld, prompt: list[int], asked: Counter[str]) -> int | None:
    """vLLM's answer for the hit of a new request, which does not run; `asked` counts its calls
    alone."""
    request = world.requests[world.add(prompt)]
    asked.clear()
    tokens: int | None = world.connector.get_num_new_matched_tokens(request, 0)[0]
    return tokens


def test_a_hit_is_one_call(make_offloading_world: MakeOffloadingWorld, asked: Counter[str]) -> None:
    world = make_offloading_world(num_blocks=128, slots=128)
    prompt = random_prompt(random.Random(1), LENGTH)
    world.generate(prompt)
    world.forget()
    assert match(world, prompt, asked) == BLOCKS * BLOCK_TOKENS
    assert asked == {"lookup": 1, "keys in lookup": BLOCKS}


@pytest.mark.parametrize("disk_slots", [0, 200])
def test_a_miss_is_one_call(
    make_offloading_world: MakeOffloadingWorld, asked: Counter[str], disk_slots: int
) -> None:
    world = make_offloading_world(num_blocks=128, slots=128, disk_slots=disk_slots)
    assert match(world, random_prompt(random.Random(2), LENGTH), asked) == 0
    assert asked["lookup"] == 1
    # Lower tiers are asked for the first blocks alone.
    assert (asked["presence"], asked["keys in presence"]) == ((1, 16) if disk_slots else (0, 0))


def test_a_prompt_on_disk_takes_few_calls(
    make_offloading_world: MakeOffloadingWorld, asked: Counter[str]
) -> None:
    world = make_offloading_world(slots=14, disk_slots=200)
    texts = prompts(3, 6)
    fill(world, texts)
    before = set(world.external_tokens)
    assert match(world, texts[0], asked) is None
    assert (asked["lookup"], asked["presence"]) == (1, 1)
    assert asked["keys in presence"] <= 16
    world.run()
    (request_id,) = world.external_tokens.keys() - before
    assert world.external_tokens[request_id] == PROMPT_BLOCKS * BLOCK_TOKENS
    world.check_outputs()


@SEVERAL_GROUPS
def test_each_group_is_one_call(
    make_offloading_world: MakeOffloadingWorld, asked: Counter[str]
) -> None:
    world = make_offloading_world(num_blocks=128, slots=256, windows=(WINDOW,))
    prompt = random_prompt(random.Random(4), LENGTH)
    world.generate(prompt)
    world.forget()
    assert match(world, prompt, asked) == BLOCKS * BLOCK_TOKENS
    assert (asked["lookup"], asked["presence"]) == (1, 1)


def test_an_offer_is_one_call(
    make_offloading_world: MakeOffloadingWorld, asked: Counter[str]
) -> None:
    world = make_offloading_world(num_blocks=128, slots=128, budget=1024)
    prompt = random_prompt(random.Random(5), LENGTH)
    world.generate(prompt[: 4 * BLOCK_TOKENS + 1], max_tokens=1)
    world.settle()
    world.add(prompt, max_tokens=1)
    asked.clear()
    world.step()
    assert asked["missing"] == 1
    assert asked["keys in missing"] == BLOCKS
    world.run()
    assert world.cache.ready_blocks == BLOCKS


def test_a_request_loads_as_much_as_it_allows(make_offloading_world: MakeOffloadingWorld) -> None:
    world = make_offloading_world(num_blocks=128, slots=128)
    prompt = random_prompt(random.Random(6), LENGTH)
    world.generate(prompt)
    found = {}
    for most in (0, BLOCK_TOKENS - 1, 3 * BLOCK_TOKENS + 1, LENGTH):
        world.forget()
        request = world.generate(prompt, params={"flexkv.max_load_tokens": most})
        found[most] = world.external_tokens[request]
    assert found == {
        0: 0,
        BLOCK_TOKENS - 1: 0,
        3 * BLOCK_TOKENS + 1: 3 * BLOCK_TOKENS,
        LENGTH: BLOCKS * BLOCK_TOKENS,
    }
    world.check_outputs()


def test_a_release_that_hides_the_blocks_of_requests_is_served_block_by_block(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flexkv_vllm.compat.patches._groups_of_request",
        lambda _side, request, *_: ([], request.num_tokens),
    )
    world = make_offloading_world(slots=14, disk_slots=200)
    texts = prompts(7, 6)
    fill(world, texts)
    assert [hits(world, text) for text in texts] == [PROMPT_BLOCKS] * len(texts)
    world.check_outputs()
