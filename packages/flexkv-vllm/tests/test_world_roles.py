# SPDX-License-Identifier: Apache-2.0
"""vLLM's `kv_role`: which engines store blocks, and which load them. The engines follow each other
over one disk."""

from __future__ import annotations

import pytest
from disk_world import PROMPT_BLOCKS, fill, hits, prompts
from engine_world import MakeWorld
from world_config import BESIDE_OTHER, IN_MULTI, IN_TREE, PLUGIN

ENTRIES = pytest.mark.parametrize("entry", [PLUGIN, IN_TREE, IN_MULTI, BESIDE_OTHER])


@ENTRIES
def test_a_producer_stores_and_a_consumer_loads(make_world: MakeWorld, entry: str) -> None:
    texts = prompts(1, 4)
    producer = make_world(entry=entry, disk_slots=100, role="kv_producer")
    fill(producer, texts[:2])
    assert producer.cache.counters.stores > 0
    assert hits(producer, texts[0]) == 0
    assert producer.cache.counters.loads == producer.cache.counters.fetched_blocks == 0
    producer.settle()
    producer.close()

    consumer = make_world(entry=entry, disk_slots=100, role="kv_consumer")
    assert [hits(consumer, text) for text in texts] == [PROMPT_BLOCKS, PROMPT_BLOCKS, 0, 0]
    consumer.forget()
    assert [hits(consumer, text) for text in texts] == [PROMPT_BLOCKS, PROMPT_BLOCKS, 0, 0]
    assert consumer.cache.counters.stores == 0
    consumer.check_outputs()
    consumer.settle()
    consumer.close()

    both = make_world(entry=entry, disk_slots=100, role="kv_both")
    assert [hits(both, text) for text in texts] == [PROMPT_BLOCKS, PROMPT_BLOCKS, 0, 0]
    both.forget()
    assert [hits(both, text) for text in texts] == [PROMPT_BLOCKS] * 4
    both.check_outputs()


def test_a_request_gets_no_more_than_the_role_allows(make_world: MakeWorld) -> None:
    (text,) = prompts(2, 1)
    producer = make_world(role="kv_producer")
    producer.generate(text, params={"flexkv.load": True, "flexkv.store": False})
    assert producer.cache.counters.stores == 0
    producer.generate(text, params={"flexkv.load": True})
    producer.forget()
    again = producer.generate(text, params={"flexkv.load": True})
    assert producer.external_tokens[again] == 0
    consumer = make_world(role="kv_consumer")
    consumer.generate(text, params={"flexkv.store": True})
    assert consumer.cache.counters.stores == 0
