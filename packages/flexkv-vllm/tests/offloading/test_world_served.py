# SPDX-License-Identifier: Apache-2.0
"""Engines under vLLM's `OffloadingConnector` share one cache by the node's service; every byte is
checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_world import PROMPT_BLOCKS, hits, prompts
from kv_pages import BLOCK_TOKENS
from offloading_release import HYBRID
from patience import PATIENCE_SECONDS, wait_until
from served_offloading_world import ServedOffloadingWorld
from served_world import MakeService, assert_nothing_is_lost
from traffic import Traffic, loaded, loads_more_than, make_stems

from flexkv_vllm.offloading.manager import FlexKVOffloadingManager
from packages.flexkv.tests.service.served import Service
from packages.inside import announced, line_of, stores_of
from packages.inside_adapters import change_weights

MakeServed = Callable[..., ServedOffloadingWorld]


@pytest.fixture
def make_served(tmp_path: Path) -> Iterator[MakeServed]:
    """Makes engines that use a service, and closes them."""
    worlds: list[ServedOffloadingWorld] = []

    def make(service: Service, **options: Any) -> ServedOffloadingWorld:
        settings = {"service": service.root} | options.pop("settings", {})
        world = ServedOffloadingWorld(tmp_path, settings=settings, **options)
        worlds.append(world)
        world.settle()
        return world

    yield make
    for world in worlds:
        world.close()


@HYBRID
def test_an_engine_loads_what_another_has_stored(
    make_service: MakeService, make_served: MakeServed, windows: tuple[int, ...]
) -> None:
    service = make_service(128)
    one, other = (make_served(service, windows=windows) for _ in range(2))
    (text,) = prompts(1, 1)
    one.generate(text)
    one.settle()
    assert hits(other, text) == PROMPT_BLOCKS
    other.check_outputs()
    assert_nothing_is_lost(service)


@HYBRID
def test_an_engine_waits_for_what_another_is_storing(
    make_service: MakeService, make_served: MakeServed, windows: tuple[int, ...]
) -> None:
    service = make_service(128)
    one, other = (make_served(service, windows=windows) for _ in range(2))
    (text,) = prompts(1, 1)
    movers = one.slow_down(random.Random(1), (1 << 30, 1 << 30))
    one.add(text)
    one.step()
    # All are announced, and three of each window: behind a part, `other` would compute the rest.
    count = PROMPT_BLOCKS + 3 * len(windows)
    wait_until(lambda: len(announced(service.pool.cache)) == count, lambda: None)
    request = other.add(text)
    for _ in range(20):
        other.step()
    assert other.outputs[request] == []
    for mover in movers:
        mover.polls = (0, 0)
        mover.catch_up()
    one.run()
    other.run()
    assert other.external_tokens[request] == PROMPT_BLOCKS * BLOCK_TOKENS
    other.check_outputs()
    one.settle()
    assert_nothing_is_lost(service)


@HYBRID
@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_that_evict_each_others_blocks_see_right_bytes(
    make_service: MakeService, make_served: MakeServed, ranks: int, windows: tuple[int, ...]
) -> None:
    # vLLM's connector asserts that no request that begins anew has just been loaded.
    service = make_service(40 * (1 + len(windows)))
    worlds = [make_served(service, ranks=ranks, windows=windows) for _ in range(2)]
    rng = random.Random(ranks)
    stems = make_stems(rng, 6)
    for _ in range(3):
        for world in worlds:
            Traffic(world, rng, stems, restart_rate=0.0).run(12, [loaded, service.evicted])
    for world in worlds:
        world.settle()
    assert_nothing_is_lost(service)


@pytest.mark.parametrize("changes", ["a reset", "other weights"])
def test_a_change_of_one_engine_leaves_the_others_alone(
    make_service: MakeService, make_served: MakeServed, changes: str
) -> None:
    service = make_service()
    one, other = make_served(service), make_served(service)
    (text,) = prompts(2, 1)
    one.generate(text)
    one.settle()
    one.forget()
    if changes == "a reset":
        one.manager.reset_cache()
    else:
        change_weights(one.manager)
    assert hits(one, text) == 0
    assert hits(other, text) == PROMPT_BLOCKS
    one.settle()
    one.forget()
    assert hits(one, text) == PROMPT_BLOCKS, "of its own, under its new keys"
    one.check_outputs()
    other.check_outputs()
    assert_nothing_is_lost(service)


def test_an_engine_whose_keys_mean_nothing_elsewhere_keeps_its_blocks_to_itself(
    make_service: MakeService, make_served: MakeServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service()
    (text,) = prompts(1, 1)
    with monkeypatch.context() as patch:
        patch.setattr("flexkv_vllm.offloading.start.is_durable", lambda _: False)
        one = make_served(service)
    other = make_served(service)
    for world, stranger in ((one, other), (other, one)):
        world.generate(text)
        world.settle()
        world.forget()
        assert hits(world, text) == PROMPT_BLOCKS
        world.forget()
        if world is one:
            assert hits(stranger, text) == 0
            stranger.settle()
            stranger.forget()
        world.check_outputs()
    assert_nothing_is_lost(service)


def test_a_hit_that_cannot_be_held_is_a_miss(
    make_service: MakeService, make_served: MakeServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request must not wait for ever."""
    service = make_service()
    one = make_served(service)
    (text,) = prompts(1, 1)
    one.generate(text)
    one.settle()
    one.forget()
    monkeypatch.setattr(FlexKVOffloadingManager, "_holds", lambda *_: False)
    assert hits(one, text) == 0
    one.check_outputs()
    assert_nothing_is_lost(service)


def test_traffic_goes_on_when_the_service_ends(
    make_service: MakeService, make_served: MakeServed
) -> None:
    service = make_service(40)
    worlds = [make_served(service) for _ in range(2)]
    rng = random.Random(5)
    stems = make_stems(rng, 5)
    for world in worlds:
        Traffic(world, rng, stems, restart_rate=0.0, clear_rate=0.0).run(10, [])
        world.forget()
    service.close()
    for world in worlds:
        loads_more = loads_more_than(loaded(world))
        Traffic(world, rng, stems, restart_rate=0.0, clear_rate=0.0).run(20, [loads_more])
    assert all(line_of(world.cache).is_cut for world in worlds)


@HYBRID
def test_what_left_host_memory_comes_back_from_the_services_disk(
    make_service: MakeService,
    make_served: MakeServed,
    tmp_path: Path,
    windows: tuple[int, ...],
) -> None:
    slots = 64 * (1 + len(windows))
    service = make_service(
        slots,
        ssd_cache_gb=0.02,
        ssd_cache_dir=(str(tmp_path / "disk"),),
        ssd_timeout_seconds=2 * PATIENCE_SECONDS,
    )
    one, other = (make_served(service, windows=windows) for _ in range(2))
    texts = prompts(3, 16)
    needed = PROMPT_BLOCKS * (1 + len(windows))
    for text in texts:
        wait_until(lambda: len(stores_of(one.cache).free) >= needed, one.poll)
        one.generate(text)
        one.settle()
        wait_until(lambda: not service.pool.busy, lambda: None)
    for text in texts:
        assert hits(other, text) == PROMPT_BLOCKS
        other.settle()
        wait_until(lambda: not service.pool.busy, lambda: None)
    other.check_outputs()
    assert service.pool.cache.counters.fetched_blocks > 0
    assert_nothing_is_lost(service)


def test_blocks_that_vllm_has_found_stay_until_it_orders_their_load(
    make_service: MakeService, make_served: MakeServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much another engine stores meanwhile."""
    service = make_service(24, eviction_policy="lru")
    one, other = make_served(service), make_served(service)
    (text,) = prompts(4, 1)
    one.generate(text)
    one.settle()
    one.forget()
    allocate = one.scheduler.kv_cache_manager.allocate_slots
    evicted = []

    def store_much(*args: Any, **options: Any) -> Any:
        if not evicted:
            for another in prompts(5, 100):
                other.generate(another)
                other.settle()
                other.forget()
                if service.pool.cache.counters.evicted_blocks >= 48:
                    break
            evicted.append(service.pool.cache.counters.evicted_blocks)
        return allocate(*args, **options)

    monkeypatch.setattr(one.scheduler.kv_cache_manager, "allocate_slots", store_much)
    assert hits(one, text) == PROMPT_BLOCKS
    assert evicted[0] >= 48, "of 24"
    assert one.cache.counters.failed_loads == 0
    one.check_outputs()
    assert_nothing_is_lost(service)
