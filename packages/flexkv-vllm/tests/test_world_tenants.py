# SPDX-License-Identifier: Apache-2.0
"""Tenants that share host memory, under vLLM's real scheduler; every byte is checked."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engine_world import MakeWorld, World, random_prompt
from served_world import MakeService, ServedWorld, assert_nothing_is_lost
from traffic import ROUNDS

from flexkv.types.tenants import NO_TENANT, tenant_number
from packages.inside import index_of

A, B = tenant_number("a"), tenant_number("b")
SHARES: dict[str, Any] = {"tenant_shares": {"a": 50, "b": 25}}


def flood(world: World, rng: random.Random, salt: str | None = None) -> None:
    for _ in range(12):
        world.generate(random_prompt(rng, 200), salt=salt)
    world.forget()


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    return [random_prompt(rng, 81) for _ in range(count)]


@pytest.mark.parametrize("windows", [(), (64,)], ids=["one group", "two groups"])
def test_each_salt_is_a_tenant(make_world: MakeWorld, windows: tuple[int, ...]) -> None:
    world = make_world(slots=64, settings=SHARES, windows=windows)
    rng = random.Random(1)
    texts = prompts_of(rng, 2)
    for text in texts:
        world.generate(text, salt="a")
    world.settle()
    stored = world.cache.slots_of_tenants[A]
    assert stored >= 10
    flood(world, rng)
    flood(world, rng, "other")
    assert world.cache.slots_of_tenants[A] == stored
    assert [world.external_tokens[world.generate(text, salt="a")] for text in texts] == [80, 80]
    flood(world, rng, "b")
    flood(world, rng, "a")
    counts = world.cache.slots_of_tenants
    assert counts[A] >= 32
    assert counts[B] >= 16
    assert counts[NO_TENANT] >= 15
    world.check_outputs()


def test_the_tenant_of_an_engine_is_that_of_all_its_requests(make_world: MakeWorld) -> None:
    world = make_world(slots=64, settings=SHARES | {"tenant": "b"})
    rng = random.Random(2)
    for salt in (None, "a"):
        world.generate(random_prompt(rng, 81), salt=salt)
    world.settle()
    assert world.cache.slots_of_tenants == {NO_TENANT: 0, A: 0, B: 10}


@pytest.mark.parametrize("own", [None, "a"])
def test_tenants_share_a_pool_of_the_service(
    make_service: MakeService, make_world: MakeWorld, own: str | None
) -> None:
    """Two engines: one of tenant a, whose requests or whose setting say so, and one that floods."""
    service = make_service(96, **SHARES)
    common: dict[str, Any] = {"service": service.root, "always_load": True}
    one = make_world(ServedWorld, settings=common | ({"tenant": own} if own else {}))
    other = make_world(ServedWorld, settings=common)
    for world in (one, other):
        world.settle()
    rng = random.Random(4)
    texts = prompts_of(rng, 4)
    salt = None if own else "a"
    for text in texts:
        one.generate(text, salt=salt)
        one.settle()
    kept = [block.key for block in index_of(service.pool.cache).blocks if block.tenant == A]
    assert len(kept) == 20
    for number in range(ROUNDS):
        if number >= 3 and service.evicted():
            break
        flood(other, rng)
        other.settle()
    assert service.evicted()
    assert all(key in index_of(service.pool.cache) for key in kept)
    one.forget()
    assert [one.external_tokens[one.generate(text, salt=salt)] for text in texts] == [80] * 4
    one.check_outputs()
    assert_nothing_is_lost(service)


def test_without_shares_no_block_has_a_tenant(make_world: MakeWorld, tmp_path: Path) -> None:
    world = make_world(slots=64)
    world.generate(random_prompt(random.Random(5), 81), salt="a")
    world.settle()
    assert {block.tenant for block in index_of(world.cache).blocks} == {NO_TENANT}
    assert not world.cache.info.takes_tenants
