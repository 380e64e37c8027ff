# SPDX-License-Identifier: Apache-2.0
"""Dynamo's index follows the events under vLLM's real scheduler."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_world import drive_of
from engine_world import BLOCK_TOKENS, MakeWorld, World, random_prompt
from patience import wait_until
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher
from world_config import PLUGIN

from integration.clients import environment
from integration.clients.dynamo import DynamoIndex
from integration.harness.ports import hold_port

PROMPT_TOKENS = 6 * BLOCK_TOKENS


class FollowedEngine:
    """Publishes the events of worlds, one after the other, as one engine to Dynamo's index."""

    def __init__(self, address: str, log: Path) -> None:
        self._publisher = ZmqEventPublisher(0, endpoint=address.replace("127.0.0.1", "*"))
        self.index = DynamoIndex(environment.python(), address, BLOCK_TOKENS, log)
        # A subscriber misses what was published before it had connected.
        first = random_prompt(random.Random(0), BLOCK_TOKENS)
        self.index.wait(lambda: self._has_heard(first))

    def publish(self, world: World) -> None:
        """Publish what a world has told since the last call, but for vLLM's own blocks."""
        events, world.recorder.events = world.recorder.events, []
        self._send([each for each in events if getattr(each, "medium", None) != "GPU"])

    def close(self) -> None:
        self.index.close()
        self._publisher.shutdown()

    def _has_heard(self, tokens: list[int]) -> bool:
        stored: dict[str, Any] = {"block_hashes": [1], "parent_block_hash": None, "lora_id": None}
        stored |= {"token_ids": tokens, "block_size": BLOCK_TOKENS, "medium": "GPU"}
        self._send([BlockStored(**stored, lora_name=None)])
        return any(self.index.tokens(tokens))

    def _send(self, events: list[Any]) -> None:
        if events:
            self._publisher.publish(KVEventBatch(ts=0.0, events=events))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FollowedEngine]:
    with hold_port() as held:
        address = f"tcp://127.0.0.1:{held.getsockname()[1]}"
        engine = FollowedEngine(address, tmp_path / "dynamo.log")
        yield engine
        engine.close()


def test_dynamo_credits_the_disks_blocks_after_a_restart(
    make_world: MakeWorld, engine: FollowedEngine
) -> None:
    options: dict[str, Any] = {
        "slots": 14,
        "disk_slots": 100,
        "events": True,
        "entry": PLUGIN,
        "block_tokens": BLOCK_TOKENS,
    }
    rng = random.Random(4)
    texts = [random_prompt(rng, PROMPT_TOKENS + 5) for _ in range(3)]
    first = make_world(**options)
    for text in texts:
        first.generate(text)
        first.settle()
    first.step()  # tells of the last blocks; nobody hears of this life
    first.close()

    index = engine.index
    assert not any(any(index.tokens(text)) for text in texts)
    world = make_world(**options)
    drive = drive_of(world)
    wait_until(lambda: not drive.index.has_changes, world.step)
    engine.publish(world)
    index.wait(lambda: all(index.tokens(text).disk == PROMPT_TOKENS for text in texts))
    assert all(index.tokens(text).host == 0 for text in texts)

    # Each of the disk's blocks is removed, and vLLM's AllBlocksCleared is not published.
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    world.settle()
    world.step()
    events = world.recorder.events
    world.recorder.events = [each for each in events if isinstance(each, BlockRemoved)]
    engine.publish(world)
    index.wait(lambda: not any(any(index.tokens(text)) for text in texts))
