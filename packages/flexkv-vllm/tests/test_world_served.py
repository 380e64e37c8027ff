# SPDX-License-Identifier: Apache-2.0
"""Engines share one cache by the node's service, under vLLM's real scheduler; every byte is
checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_world import PROMPT_BLOCKS, hits, prompts
from engine_world import MakeWorld
from kv_pages import BLOCK_TOKENS, HEAD_BYTES, HEADS, LAYERS
from patience import wait_until
from served_world import ServedWorld, Service
from traffic import Traffic, loaded, make_stems

SLOT_BYTES = 4096 * -(-BLOCK_TOKENS * HEAD_BYTES * HEADS * LAYERS // 4096)

MakeService = Callable[..., Service]


@pytest.fixture
def make_service(tmp_path: Path) -> Iterator[MakeService]:
    """Makes services with memory for so many blocks, and closes them after the worlds: fixtures end
    in the reverse order of a test's arguments."""
    made: list[Service] = []

    def make(slots: int = 64, **settings: Any) -> Service:
        gb = slots * SLOT_BYTES / (1 << 30)
        made.append(Service(tmp_path / f"service{len(made)}", gb, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def served(make_world: MakeWorld, service: Service, **options: Any) -> ServedWorld:
    settings = {"service": service.root, "always_load": True} | options.pop("settings", {})
    world = make_world(ServedWorld, settings=settings, **options)
    wait_until(lambda: bool(world.cache._stores.free), world.poll)
    return world


def test_an_engine_loads_what_another_has_stored(
    make_service: MakeService, make_world: MakeWorld
) -> None:
    service = make_service()
    one, other = served(make_world, service), served(make_world, service)
    (text,) = prompts(1, 1)
    one.generate(text)
    one.settle()
    assert hits(other, text) == PROMPT_BLOCKS
    other.check_outputs()
    assert one.cache.counters.stored_blocks > 0 == other.cache.counters.stored_blocks
    service.assert_no_slot_is_lost()


@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_that_evict_each_others_blocks_see_right_bytes(
    make_service: MakeService, make_world: MakeWorld, ranks: int
) -> None:
    service = make_service(40)
    worlds = [served(make_world, service, ranks=ranks) for _ in range(2)]
    rng = random.Random(ranks)
    stems = make_stems(rng, 6)
    for _ in range(3):
        for world in worlds:
            Traffic(world, rng, stems).run(12, [])
    for world in worlds:
        world.settle()
        assert loaded(world) > 0
    service.assert_no_slot_is_lost()
    assert service.pool.cache.counters.evicted_blocks > 0
