# SPDX-License-Identifier: Apache-2.0
"""Whom the blocks of a cache count for."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from flexkv import KVCache
from flexkv.eviction import POLICIES, TenantPolicies
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.types.mover import Status
from flexkv.types.tenants import NO_TENANT, tenant_number
from packages.flexkv.tests.tiered_engine import FORMAT, Engine, keys

A, B = tenant_number("a"), tenant_number("b")


def policies(slots: int) -> TenantPolicies:
    return TenantPolicies({"a": 0.5, "b": 0.25}, slots, POLICIES["lru"])


def engine_of(root: Path) -> Engine:
    """An engine with shares of host memory; the disk has none."""
    return Engine(
        root, policy=lambda slots: policies(slots) if slots == 8 else POLICIES["lru"](slots)
    )


@pytest.mark.parametrize("tenant", [A, NO_TENANT])
def test_blocks_from_disk_count_for_the_tenant_that_fetches(tmp_path: Path, tenant: int) -> None:
    engine = engine_of(tmp_path)
    engine.store("a", "b", "c")
    assert engine.cache.slots_of_tenants == {NO_TENANT: 3, A: 0, B: 0}
    for number in range(4):
        engine.store(*(f"{number} {name}" for name in "xy"))
    assert engine.cache.lookup(keys("a")) == 0
    fetch = engine.cache.fetch(keys("a", "b", "c"), tenant=tenant)
    assert fetch is not None
    engine.wait(fetch)
    assert engine.cache.lookup(keys("a", "b", "c")) == 3
    own = 3 if tenant else 0
    assert engine.cache.slots_of_tenants == {NO_TENANT: 8 - own, A: own, B: 0}
    engine.cache.end_fetch(fetch)
    assert engine.cache.info.takes_tenants


def test_a_cache_of_one_tenant_asks_for_none() -> None:
    with (
        closing(Arena.create(ArenaSpec(FORMAT, 8), threads=1)) as arena,
        closing(KVCache(arena, policies(8), tenant=B)) as cache,
    ):
        assert not cache.info.takes_tenants
        transfer = cache.store(keys("a", "b"), range(2))
        assert transfer is not None
        arena.board.report(transfer.cell, 0, Status.DONE)
        cache.poll()
        assert cache.slots_of_tenants == {NO_TENANT: 0, A: 0, B: 2}
        assert cache.store(keys("c"), [0], tenants=[A]) is not None
        assert cache.slots_of_tenants == {NO_TENANT: 0, A: 1, B: 2}
        cache.poll()
