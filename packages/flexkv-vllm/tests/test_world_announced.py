# SPDX-License-Identifier: Apache-2.0
"""A decode engine waits for what a prefill engine of another node writes to a bucket that both
share, under vLLM's real scheduler; every byte is checked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from disk_world import PROMPT_BLOCKS, prompts
from engine_world import MakeWorld, World, random_prompt
from kv_pages import BLOCK_TOKENS
from patience import PATIENCE_SECONDS
from world_config import BESIDE_OTHER, IN_MULTI, IN_TREE, PLUGIN

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
TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS
ANNOUNCED = {"flexkv.announced_tokens": TOKENS}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setattr("flexkv.transfer.fetcher._ANNOUNCED_SECONDS", PATIENCE_SECONDS)
    with S3Server() as found:
        for name, value in found.environ.items():
            monkeypatch.setenv(name, value)
        yield found


def is_waiting(world: World, request_id: str) -> bool:
    """Whether some steps pass without the request's being scheduled."""
    for _ in range(20):
        world.step()
    return world.requests[request_id].num_computed_tokens == 0


@pytest.mark.parametrize("entry", [PLUGIN, IN_TREE])
def test_a_decode_engine_waits_for_what_a_prefill_engine_stores(
    make_world: MakeWorld, server: S3Server, entry: str
) -> None:
    producer = make_world(settings=SETTINGS, entry=entry, role="kv_producer")
    consumer = make_world(settings=SETTINGS, entry=entry, role="kv_consumer")
    text, other = prompts(1, 2)
    asked = consumer.add(text, params=ANNOUNCED)
    assert is_waiting(consumer, asked)
    answered = producer.generate(text, max_tokens=1)
    producer.settle()
    assert producer.answers[answered] == ANNOUNCED
    consumer.run()
    assert consumer.external_tokens[asked] == TOKENS
    unannounced = consumer.generate(other)
    assert consumer.external_tokens[unannounced] == 0
    assert consumer.answers == {}
    consumer.check_outputs()


@pytest.mark.skipif(
    not fails_by_request(), reason="this vLLM keeps one KV cache group for connectors"
)
def test_windows_come_with_the_blocks_of_full_attention(
    make_world: MakeWorld, server: S3Server
) -> None:
    prompt = random_prompt(random.Random(4), 20 * BLOCK_TOKENS + 5)
    options: dict[str, Any] = {"settings": SETTINGS, "windows": (40,), "num_blocks": 128}
    producer = make_world(**options, role="kv_producer")
    consumer = make_world(**options, role="kv_consumer")
    tokens = 20 * BLOCK_TOKENS
    asked = consumer.add(prompt, params={"flexkv.announced_tokens": tokens})
    assert is_waiting(consumer, asked)
    answered = producer.generate(prompt, max_tokens=1)
    producer.settle()
    assert producer.answers[answered] == {"flexkv.announced_tokens": tokens}
    consumer.run()
    assert consumer.external_tokens[asked] == tokens
    consumer.check_outputs()


@pytest.mark.parametrize("windows", [(), (40,)])
def test_what_never_comes_is_computed(
    make_world: MakeWorld,
    server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    windows: tuple[int, ...],
) -> None:
    if windows and not fails_by_request():
        pytest.skip("this vLLM keeps one KV cache group for connectors")
    monkeypatch.setattr("flexkv.transfer.fetcher._ANNOUNCED_SECONDS", 0.2)
    world = make_world(settings=SETTINGS, windows=windows, num_blocks=128)
    asked = world.add(prompts(1, 1)[0], params=ANNOUNCED)
    world.run()
    assert world.external_tokens[asked] == 0
    world.check_outputs()


def test_requests_that_a_router_marks_are_announced(
    make_world: MakeWorld, server: S3Server
) -> None:
    world = make_world(settings=SETTINGS)
    marked, plain, kept, short = prompts(1, 4)
    answered = world.generate(marked, params={"do_remote_decode": True})
    world.generate(plain, params={"do_remote_decode": "yes"})
    world.generate(kept, params={"do_remote_decode": True, "flexkv.store": False})
    cut = world.generate(
        short, params={"do_remote_decode": True, "flexkv.max_store_tokens": 2 * BLOCK_TOKENS + 1}
    )
    assert world.answers == {
        answered: ANNOUNCED,
        cut: {"flexkv.announced_tokens": 2 * BLOCK_TOKENS},
    }


@pytest.mark.parametrize("entry", [IN_MULTI, BESIDE_OTHER])
def test_nothing_is_announced_beside_another_connector(
    make_world: MakeWorld, server: S3Server, entry: str
) -> None:
    """vLLM ends if two connectors answer."""
    world = make_world(settings=SETTINGS, entry=entry, role="kv_producer")
    world.generate(prompts(1, 1)[0], params={"do_remote_decode": True})
    assert world.answers == {}


def test_without_a_store_nothing_is_announced(make_world: MakeWorld) -> None:
    world = make_world(disk_slots=100, role="kv_producer")
    world.generate(prompts(1, 1)[0])
    assert world.answers == {}
