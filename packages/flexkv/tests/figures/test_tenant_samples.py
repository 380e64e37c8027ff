# SPDX-License-Identifier: Apache-2.0
"""Tenants in an engine's metrics."""

from __future__ import annotations

from contextlib import closing

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from flexkv import CacheConfig, KVCache
from flexkv.figures.exposition import Exposition
from flexkv.figures.meter import Reader
from flexkv.figures.tenant_samples import TENANT_METRICS, tenants_in
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.open_tiers import host_policy
from flexkv.types.tenants import tenant_number
from packages.flexkv.tests.tiered_engine import FORMAT, keys

SHARES = (("team-a", 50.0), ("a:b", 25.0))


def shown(registry: CollectorRegistry) -> list[str]:
    text: str = generate_latest(registry).decode()
    return [line for line in text.splitlines() if "tenant" in line and line[0] != "#"]


def exposition(registry: CollectorRegistry, config: CacheConfig) -> Exposition:
    def make(kind: type, *arguments: object, **more: object) -> object:
        return kind(*arguments, **more, registry=registry)

    return Exposition(
        "x:flexkv_",
        lambda *each, **more: make(Counter, *each, **more),
        lambda *each, **more: make(Gauge, *each, **more),
        lambda *each, **more: make(Histogram, *each, **more),
        label_names=("engine",),
        engines={0: ("0",)},
        config=config,
    )


def test_an_engine_shows_its_tenants_and_their_latest_blocks() -> None:
    config, registry, reader = CacheConfig(tenant_shares=SHARES), CollectorRegistry(), Reader()
    metrics = exposition(registry, config)
    assert shown(registry) == []
    _, policy = host_policy(config, 8, follows_requests=False)
    with (
        closing(Arena.create(ArenaSpec(FORMAT, 8), threads=1)) as arena,
        closing(KVCache(arena, policy)) as cache,
    ):
        for number, count in enumerate((2, 1)):
            names = [f"{number} {each}" for each in range(count)]
            tenants = [tenant_number("a:b")] * count
            transfer = cache.store(keys(*names), range(count), tenants=tenants)
            assert transfer is not None
            figures = cache.figures()
            metrics.observe(reader.drain(figures.own | figures.shared), 0)
            blocks = {line for line in shown(registry) if "share" not in line}
            assert blocks == {
                'x:flexkv_tenant_blocks{engine="0",tenant="team-a"} 0.0',
                f'x:flexkv_tenant_blocks{{engine="0",tenant="a:b"}} {2.0 + number}',
            }
        assert 'x:flexkv_tenant_share_blocks{engine="0",tenant="a:b"} 2.0' in shown(registry)
        assert tenants_in(figures.shared) == ["a:b", "team-a"]


def test_a_tenant_without_a_share_shows_nowhere() -> None:
    """As of a service with other shares than the engine's."""
    registry = CollectorRegistry()
    metrics = exposition(registry, CacheConfig())
    metrics.observe({"tenant_blocks:team-a": 3.0}, 0)
    assert shown(registry) == []
    assert {metric.label_names for metric in TENANT_METRICS} == {("tenant",)}
