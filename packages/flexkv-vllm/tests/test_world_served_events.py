# SPDX-License-Identifier: Apache-2.0
"""KV events of engines that share one cache: each tells all of it, in full."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_world import MakeWorld, random_prompt
from kv_pages import BLOCK_TOKENS
from patience import PATIENCE_SECONDS, wait_until
from served_world import MakeService, ServedWorld
from subscriber import DISK, HOST, Subscriber, drain, loadable
from traffic import SEEDS, Traffic, make_stems

from flexkv.service import attach as attaching
from flexkv.service import attached, pool_changes
from flexkv_vllm import events
from packages.flexkv.tests.service.served import Service
from packages.inside import stores_of

SLOTS, PROMPTS, PROMPT_BLOCKS = 64, 24, 4

Told = dict[tuple[str, int, tuple[Any, ...]], tuple[Any, list[int], int]]
"""By medium, group and hashes: parent, tokens and block size."""
Listen = Callable[..., Subscriber]


@pytest.fixture
def service(make_service: MakeService, tmp_path: Path) -> Service:
    return make_service(
        SLOTS,
        ssd_cache_gb=0.02,
        ssd_cache_dir=(str(tmp_path / "disk"),),
        ssd_timeout_seconds=2 * PATIENCE_SECONDS,
    )


@pytest.fixture
def listen(make_world: MakeWorld, service: Service) -> Listen:
    """Makes an engine of the service, whose events somebody hears."""

    def make(**options: Any) -> Subscriber:
        settings = {"service": service.root, "always_load": True}
        world = make_world(ServedWorld, settings=settings, events=True, **options)
        world.settle()
        return Subscriber(world)

    return make


def compute(service: Service, subscriber: Subscriber, seed: int) -> None:
    """More than host memory holds, so that some blocks are on disk alone."""
    rng, world = random.Random(seed), subscriber.world
    for _ in range(PROMPTS):
        wait_until(lambda: len(stores_of(world.cache).free) >= PROMPT_BLOCKS, world.poll)
        world.generate(random_prompt(rng, PROMPT_BLOCKS * BLOCK_TOKENS + 5))
        world.settle()
        wait_until(lambda: not service.pool.busy, lambda: None)
        drain(subscriber)


def in_full(subscriber: Subscriber) -> Told:
    """What it was told of the blocks that are there."""
    return {
        (each.medium, each.group_idx, tuple(each.block_hashes)): (
            each.parent_block_hash,
            each.token_ids,
            each.block_size,
        )
        for each in subscriber.stored
        if all((each.group_idx, name) in subscriber.told[each.medium] for name in each.block_hashes)
    }


def hear_alike(subscriber: Subscriber, other: Subscriber) -> None:
    """Until both were told the same in full. Slots that an engine is granted evict blocks."""

    def is_alike() -> bool:
        drain(subscriber)
        drain(other)
        return in_full(subscriber) == in_full(other)

    wait_until(is_alike, lambda: None)
    media = {medium for medium, _, _ in in_full(subscriber)}
    assert media == {HOST, DISK}
    assert all(len(tokens) == BLOCK_TOKENS for _, tokens, _ in in_full(subscriber).values())


@pytest.mark.parametrize("windows", [(), (40,)], ids=["full", "hybrid"])
def test_an_engine_tells_in_full_what_another_has_stored(
    service: Service, listen: Listen, windows: tuple[int, ...]
) -> None:
    one, other = listen(windows=windows), listen(windows=windows)
    compute(service, one, 1)
    hear_alike(other, one)


def test_an_engine_that_begins_tells_in_full_what_was_there(
    service: Service, listen: Listen
) -> None:
    one = listen()
    compute(service, one, 2)
    hear_alike(listen(), one)


def test_what_was_there_is_told_in_full_once_vllm_has_cleared_its_own(
    service: Service, listen: Listen
) -> None:
    one, other = listen(), listen()
    compute(service, one, 3)
    hear_alike(other, one)
    other.stored.clear()
    other.world.forget()
    hear_alike(other, one)


def test_after_a_restart_of_all_the_disk_is_told_in_full(service: Service, listen: Listen) -> None:
    one = listen()
    compute(service, one, 4)
    drain(one)
    told = {key: fields for key, fields in in_full(one).items() if key[0] == DISK}
    one.world.close()
    service.close(PATIENCE_SECONDS)
    service.start()
    again = listen()
    wait_until(lambda: len(again.told[DISK]) >= len(told), lambda: drain(again))
    assert told.items() <= in_full(again).items()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is done in parts takes several, and nobody waits long for a new service."""
    monkeypatch.setattr("flexkv.service.pool_changes._PART", 4)
    monkeypatch.setattr(pool_changes, "_AT_ONCE", 4)
    monkeypatch.setattr(events, "_BLOCKS_PER_CALL", 8)
    monkeypatch.setattr(attaching, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(attached, "_LAST_WRITES_SECONDS", 0.01)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("windows", [(), (40,)], ids=["full", "hybrid"])
@SEEDS
def test_a_router_knows_what_two_engines_load_through_resets_and_restarts(
    make_service: MakeService,
    make_world: MakeWorld,
    tmp_path: Path,
    *,
    seed: int,
    windows: tuple[int, ...],
) -> None:
    """It hears of events alone, and is compared after every request. Blocks are evicted from memory
    and disk, engines reset their own caches and FlexKV's, sleep, and the service ends."""
    service = make_service(
        48 * (1 + len(windows)),
        ssd_cache_gb=0.0008,
        ssd_cache_dir=(str(tmp_path / "disk"),),
        ssd_timeout_seconds=2 * PATIENCE_SECONDS,
    )
    rng = random.Random(seed)
    settings = {"service": service.root, "always_load": True}
    worlds = [
        make_world(ServedWorld, settings=settings, events=True, windows=windows) for _ in range(2)
    ]
    routers = [Subscriber(world) for world in worlds]
    stems = make_stems(rng, 8, longest=150)
    compared: set[str] = set()
    evicted = 0

    def is_alike(router: Subscriber, other: Subscriber) -> bool:
        world = router.world
        world.poll()
        world.recorder.events += world.scheduler.kv_cache_manager.take_events() or []
        world.recorder.events += world.connector.take_events()
        router.listen()
        return router.told == loadable(world, other.world)

    def difference(router: Subscriber, other: Subscriber) -> str:
        there = loadable(router.world, other.world)
        untold = {medium: there[medium] - told for medium, told in router.told.items()}
        gone = {medium: told - there[medium] for medium, told in router.told.items()}
        return f"not told {untold}, told and gone {gone}"

    def compare() -> None:
        nonlocal evicted
        if rng.random() < 0.1:
            evicted += sum(each.cache.counters.evicted_blocks for each in service.server.pools)
            service.close()
            service.start()
        for router, other in (routers, routers[::-1]):
            pair = router, other
            wait_until(
                lambda pair=pair: is_alike(*pair),
                lambda: None,
                lambda pair=pair: difference(*pair),
            )
            compared.update(medium for medium, told in router.told.items() if told)

    for _ in range(3):
        for world in worlds:
            Traffic(world, rng, stems, reset_rate=0.2, disturb=compare).run(10, [])
    assert compared == {HOST, DISK}
    wait_until(
        lambda: service.server.pools,
        lambda: [world.poll() for world in worlds],
        lambda: "no engine attaches again",
    )
    assert evicted + sum(each.cache.counters.evicted_blocks for each in service.server.pools)
