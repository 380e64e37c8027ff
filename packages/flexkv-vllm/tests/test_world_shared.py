# SPDX-License-Identifier: Apache-2.0
"""Two engines share blocks by a bucket and have no disk, under vLLM's real scheduler; every byte is
checked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from disk_world import PROMPT_BLOCKS, prompts
from engine_core import core_of, sleep_and_wake
from engine_world import MakeWorld, World, random_prompt
from kv_pages import BLOCK_TOKENS
from offloading_world import MakeOffloadingWorld
from patience import PATIENCE_SECONDS
from vllm.v1.engine.core import EngineCore

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'flexkv[objects]'")
pytest.importorskip("moto", reason="moto is not installed: pip install moto flask flask-cors")

from flexkv_vllm.compat.core import fails_by_request
from integration.harness.s3_server import BUCKET, S3Server

SETTINGS: dict[str, Any] = {
    "objects_url": f"s3://{BUCKET}/cache",
    "objects_question_seconds": PATIENCE_SECONDS,
    "objects_timeout_seconds": PATIENCE_SECONDS,
    "always_load": True,
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with S3Server() as found:
        for name, value in found.environ.items():
            monkeypatch.setenv(name, value)
        yield found


def test_an_engine_without_a_disk_finds_what_another_has_stored(
    make_world: MakeWorld, server: S3Server
) -> None:
    one = make_world(settings=SETTINGS)
    (text,) = prompts(1, 1)
    one.generate(text)
    one.settle()
    other = make_world(settings=SETTINGS)
    assert other.external_tokens[other.generate(text)] == PROMPT_BLOCKS * BLOCK_TOKENS
    other.check_outputs()


@pytest.mark.skipif(
    not fails_by_request(), reason="this vLLM keeps one KV cache group for connectors"
)
def test_blocks_of_windows_are_found_behind_those_of_full_attention(
    make_world: MakeWorld, server: S3Server
) -> None:
    """The bucket has all blocks of the prompt's full attention, and the last ones of its window."""
    rng = random.Random(4)
    prompt = random_prompt(rng, 20 * BLOCK_TOKENS)
    one = make_world(settings=SETTINGS, windows=(40,), num_blocks=128)
    one.generate(prompt)
    one.settle()
    other = make_world(settings=SETTINGS, windows=(40,), num_blocks=128)
    second = other.generate(prompt + random_prompt(rng, 100))
    assert other.external_tokens[second] == len(prompt)
    other.check_outputs()


def test_offloading_shares_only_what_means_the_same_elsewhere(
    make_offloading_world: MakeOffloadingWorld,
    server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = random_prompt(random.Random(2), 3 * BLOCK_TOKENS)
    one = make_offloading_world(settings=SETTINGS)
    one.generate(text)
    one.settle()
    stored = server.objects("cache/blocks/")
    assert stored > 0
    monkeypatch.setattr("flexkv_vllm.offloading.start.is_durable", lambda _: False)
    other = make_offloading_world(settings=SETTINGS)
    other.generate(random_prompt(random.Random(3), 3 * BLOCK_TOKENS))
    other.settle()
    assert server.objects("cache/blocks/") == stored


@pytest.mark.skipif(not hasattr(EngineCore, "_reset_caches"), reason="this vLLM has no pauses")
def test_an_engine_that_sleeps_goes_on_sharing(make_world: MakeWorld, server: S3Server) -> None:
    """Sleeper, neighbour and newcomer find all blocks of before, and share blocks of later."""
    sleeper = make_world(settings=SETTINGS)
    texts = prompts(1, 4)
    for text in texts:
        sleeper.generate(text)
    sleeper.settle()
    neighbour = make_world(settings=SETTINGS)

    def finds(world: World, text: list[int]) -> bool:
        world.forget()
        hit = world.external_tokens[world.generate(text)]
        world.settle()
        return hit == PROMPT_BLOCKS * BLOCK_TOKENS

    assert finds(neighbour, texts[0])
    sleep_and_wake(core_of(sleeper))
    assert finds(sleeper, texts[1])
    assert finds(neighbour, texts[2])
    newcomer = make_world(settings=SETTINGS)
    assert finds(newcomer, texts[3])
    (later,) = prompts(2, 1)
    assert not finds(sleeper, later)
    assert finds(newcomer, later)
    newcomer.check_outputs()


def test_an_engine_whose_keys_nobody_else_has_shares_nothing(
    make_world: MakeWorld, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a seed, `xxhash` names blocks differently in each process."""
    monkeypatch.setattr("flexkv_vllm.identity._hash_seed", lambda _: "random")
    world = make_world(settings=SETTINGS)
    world.generate(prompts(1, 1)[0])
    world.settle()
    assert not world.cache.info.media
    assert server.objects("cache/blocks/") == 0
