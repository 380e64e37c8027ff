# SPDX-License-Identifier: Apache-2.0
"""An engine's door under vLLM's real scheduler: its keys are those of vLLM's own requests."""

from __future__ import annotations

from typing import Any

import pytest
from asked_engine import call_engine
from disk_world import PROMPT_BLOCKS, fill, prompts
from engine_world import BLOCK_TOKENS, MakeWorld, World

from flexkv_vllm import keys


def lookup(world: World, **question: Any) -> Any:
    (answer,) = call_engine(world, "/lookup", **question)
    return answer


def blocks(answer: Any) -> dict[str, int]:
    return {each["tier"]: each["blocks"] for each in answer["tiers"]}


@pytest.mark.parametrize("part", [1, 4, 64])
def test_an_idle_engine_has_what_it_has_stored(
    make_world: MakeWorld, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "PART_BLOCKS", part)
    world = make_world(disk_slots=100)
    one, other = prompts(5, 2)
    fill(world, [one])
    answer = lookup(world, tokens=one)
    assert (answer["blocks"], answer["found"]) == (PROMPT_BLOCKS, PROMPT_BLOCKS)
    assert (answer["block_tokens"], answer["engine"]) == (BLOCK_TOKENS, "vllm")
    assert blocks(answer) == {"host": PROMPT_BLOCKS, "disk": PROMPT_BLOCKS}
    assert lookup(world, tokens=other)["found"] == 0
    shared = [*one[: 2 * BLOCK_TOKENS], *other]
    assert lookup(world, tokens=shared)["found"] == 2
    assert lookup(world, tokens=one[: BLOCK_TOKENS - 1])["blocks"] == 0
    hashes = [each.hex() for each in world.requests["r0"].block_hashes]
    assert lookup(world, hashes=hashes[:PROMPT_BLOCKS])["found"] == PROMPT_BLOCKS


def test_a_salt_has_blocks_of_its_own(make_world: MakeWorld) -> None:
    world = make_world()
    (prompt,) = prompts(5, 1)
    world.add(prompt, salt="tenant")
    world.run()
    world.settle()
    assert lookup(world, tokens=prompt)["found"] == 0
    assert lookup(world, tokens=prompt, cache_salt="tenant")["found"] == PROMPT_BLOCKS


def test_nothing_is_found_after_a_reset(make_world: MakeWorld) -> None:
    world = make_world(disk_slots=100)
    (prompt,) = prompts(5, 1)
    fill(world, [prompt])
    assert world.side.reset()
    assert lookup(world, tokens=prompt)["found"] == 0


def test_blocks_of_several_engine_blocks_are_found(make_world: MakeWorld) -> None:
    world = make_world(block_tokens=2 * BLOCK_TOKENS)
    (prompt,) = prompts(5, 1)
    fill(world, [prompt])
    answer = lookup(world, tokens=prompt)
    assert (answer["blocks"], answer["found"]) == (3, 3)
    assert answer["block_tokens"] == 2 * BLOCK_TOKENS
    hashes = [each.hex() for each in world.requests["r0"].block_hashes]
    assert lookup(world, hashes=hashes[:PROMPT_BLOCKS])["found"] == 3


def test_of_several_groups_the_one_of_full_attention_counts(make_world: MakeWorld) -> None:
    world = make_world(windows=(2 * BLOCK_TOKENS,), slots=128)
    (prompt,) = prompts(5, 1)
    fill(world, [prompt])
    assert lookup(world, tokens=prompt)["found"] == PROMPT_BLOCKS
