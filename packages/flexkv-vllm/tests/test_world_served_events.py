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
from subscriber import DISK, HOST, Subscriber, drain

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
