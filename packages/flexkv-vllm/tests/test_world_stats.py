# SPDX-License-Identifier: Apache-2.0
"""Stats under vLLM's real scheduler: what reaches vLLM's loggers agrees with what happened."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from disk_world import PROMPT_BLOCKS, fill, flip_a_byte, prompts, slabs
from engine_world import BLOCK_TOKENS, MakeWorld, World, random_prompt
from prometheus_client import CollectorRegistry
from scraping import metrics, scrape
from traffic import Traffic, make_stems
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from flexkv.figures.definitions import METRICS, bucket, sample
from packages.inside import tier_figures
from packages.inside_adapters import ignored_parameters

TOKEN_BYTES = 2 * 4 * 16
"""Of the tests' model: layers, heads, bytes of a head."""


def collected(world: World) -> Counter[str]:
    """Sums of all samples that vLLM was given, the last value of gauges among them once."""
    world.settle()
    world.step()
    total: Counter[str] = Counter()
    for samples in world.stats:
        assert all(value >= 0 for value in samples.values())
        total.update(samples)
    return total


def count_of(total: Counter[str], name: str, *labels: str) -> int:
    """How many values a histogram got."""
    (metric,) = (each for each in METRICS if each.name == name)
    return sum(total[bucket(name, place, *labels)[0]] for place in range(len(metric.bounds) + 1))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_host_hit(make_world: MakeWorld, ranks: int) -> None:
    world = make_world(ranks=ranks)
    prompt = random_prompt(random.Random(1), 200)
    world.generate(prompt, max_tokens=1)
    world.forget()
    world.generate(prompt, max_tokens=1)
    total = collected(world)
    assert total[sample("query_tokens", "host")] == 400
    assert total[sample("hit_tokens", "host")] == 192
    assert total[sample("copied_bytes", "device", "store")] == 192 * TOKEN_BYTES
    assert total[sample("copied_bytes", "device", "load")] == 192 * TOKEN_BYTES
    assert total[sample("copy_seconds", "device", "load")] > 0
    assert total[sample("stored_blocks", "host")] == 12
    assert count_of(total, "load_seconds") == world.cache.counters.loads == 1
    assert count_of(total, "store_seconds") == world.cache.counters.stores
    assert total[bucket("hit_blocks", 4)[0]] == 1  # 12 blocks: more than 8, at most 16
    assert total[bucket("hit_blocks", 4)[1]] == 12
    assert total["saved_prefill_seconds"] > 0
    assert world.stats[-1][sample("blocks", "host")] == 12
    assert world.stats[-1][sample("capacity_blocks", "host")] == 64
    assert world.stats[-1][sample("queue_length", "device")] == 0


def test_an_idle_step_tells_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    world.generate(random_prompt(random.Random(2), 40))
    collected(world)
    told = len(world.stats)
    world.add(random_prompt(random.Random(3), 8), max_tokens=7)  # fills no block
    world.run()
    assert len(world.stats) == told + 1  # that it was looked for
    assert world.stats[-1][sample("query_tokens", "host")] == 8


def test_a_disk_hit(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(slots=14, disk_slots=100)
    told: list[dict[CacheHitSource, int]] = []
    ask = world.connector.get_external_cache_hit_sources

    def sources(*args: Any) -> dict[CacheHitSource, int]:
        told.append(ask(*args))
        return told[-1]

    monkeypatch.setattr(world.connector, "get_external_cache_hit_sources", sources)
    texts = prompts(4, 4)
    fill(world, texts)
    tokens = PROMPT_BLOCKS * BLOCK_TOKENS
    before = collected(world)
    assert before[sample("stored_blocks", "disk")] == 4 * PROMPT_BLOCKS
    slot = 4096
    assert before[sample("copied_bytes", "disk", "write")] == 4 * PROMPT_BLOCKS * slot
    world.generate(texts[0])  # has left host memory
    world.settle()
    world.forget()
    world.generate(texts[0])  # is there now
    total = collected(world)
    assert told == [{CacheHitSource.DISK: tokens}, {CacheHitSource.HOST: tokens}]
    assert total[sample("hit_tokens", "disk")] == tokens
    assert total[sample("hit_tokens", "host")] == tokens
    assert total[sample("copied_bytes", "disk", "read")] == PROMPT_BLOCKS * slot
    assert total[sample("copy_seconds", "disk", "read")] > 0
    assert count_of(total, "fetch_seconds", "disk") == 1
    assert count_of(total, "hit_blocks") == 2
    length = len(texts[0])
    assert total[sample("query_tokens", "host")] == 4 * length + 2 * length
    assert total[sample("query_tokens", "disk")] == 4 * length + length + length - tokens
    assert total[sample("evicted_blocks", "host")] == world.cache.counters.evicted_blocks > 0


def test_a_request_that_may_not_load_is_no_query(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can have no hit, as vLLM's requests with prompt_logprobs."""
    world = make_world(slots=16)
    text, other = prompts(5, 2)
    world.generate(text)
    queries = sample("query_tokens", "host")
    assert collected(world)[queries] == len(text)
    add = world.scheduler.add_request

    def add_unread(request: Any) -> None:
        request.skip_reading_prefix_cache = True
        add(request)

    with monkeypatch.context() as patch:
        patch.setattr(world.scheduler, "add_request", add_unread)
        world.generate(text)
    assert collected(world)[queries] == len(text)
    world.generate(other)
    assert collected(world)[queries] == len(text) + len(other)


def test_a_hit_from_both(make_world: MakeWorld) -> None:
    """Its beginning is in host memory, the rest is fetched."""
    world = make_world(slots=16, disk_slots=100)
    texts = prompts(5, 3)
    fill(world, [*texts, texts[0][: 2 * BLOCK_TOKENS + 1]])
    request_id = world.generate(texts[0])
    hit = world.external_tokens[request_id]
    total = collected(world)
    assert hit == PROMPT_BLOCKS * BLOCK_TOKENS
    by_tier = [total[sample("hit_tokens", tier)] for tier in ("host", "disk")]
    fetched = world.cache.counters.fetched_blocks * BLOCK_TOKENS
    assert sum(by_tier) == sum(world.external_tokens.values())
    assert by_tier[1] == fetched > 0


def test_failures_have_causes(make_world: MakeWorld, tmp_path: Any) -> None:
    world = make_world(slots=14, disk_slots=100)
    texts = prompts(6, 5)
    fill(world, texts)
    (slab,) = slabs(tmp_path)
    slab.write_bytes(bytes(slab.stat().st_size))
    world.generate(texts[0])
    total = collected(world)
    assert total[sample("failures", "damaged", "disk")] == world.cache.counters.damaged_fetches > 0
    assert total[sample("failures", "read", "disk")] == 0
    world.slow_down(random.Random(6), polls=(0, 1), failure_rate=1.0)
    world.forget()
    world.generate(texts[4])
    total = collected(world)
    assert total[sample("failures", "load", "host")] == 1
    assert total[sample("failures", "store", "host")] >= 1
    # Refused copies are exceptions in the worker.
    assert total[sample("failures", "internal", "")] >= 2


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_random_traffic_adds_up(make_world: MakeWorld, tmp_path: Any, asynchronous: bool) -> None:
    """What was scraped after each step never fell, and in the end agrees with what happened."""
    rng = random.Random(7)
    world = make_world(
        ranks=2,
        block_tokens=32,
        num_blocks=40,
        slots=20,
        disk_slots=40,
        budget=96,
        lag=rng if asynchronous else None,
    )
    world.slow_down(rng, failure_rate=0.03)
    registry = CollectorRegistry()
    prometheus = metrics(registry)
    seen = scrape(registry)
    observed = 0

    def observe() -> None:
        nonlocal observed
        for samples in world.stats[observed:]:
            prometheus.observe(samples)
        observed = len(world.stats)

    def disturb() -> None:
        nonlocal seen
        if rng.random() < 0.2:
            flip_a_byte(rng, slabs(tmp_path))
        observe()
        now = scrape(registry)
        assert all(now[n] >= value for n, value in seen.items() if n[0].endswith("_total"))
        seen = now

    def enough(world: World) -> bool:
        return world.cache.counters.resets > 0 and ignored_parameters(world.side) > 0

    Traffic(
        world,
        rng,
        make_stems(rng, 6),
        most_steps=5,
        reset_rate=0.1,
        params=lambda: {"flexkv.pin": rng.choice([True, "x"])} if rng.random() < 0.1 else None,
        disturb=disturb,
    ).run(80, until=[enough])
    total = collected(world)
    observe()
    counters = world.cache.counters
    assert total[sample("resets", "request")] == counters.resets
    assert total["ignored_parameters"] == ignored_parameters(world.side)
    assert total[sample("stored_blocks", "host")] == counters.stored_blocks
    assert total[sample("evicted_blocks", "host")] == counters.evicted_blocks
    assert total[sample("failures", "load", "host")] == counters.failed_loads
    ((_, figures, *_),) = tier_figures(world.cache)
    assert total[sample("copied_bytes", "disk", "write")] == figures.traffic.written_bytes
    values = scrape(registry)
    for tier, ready in (("host", world.cache.ready_blocks), ("disk", figures.blocks)):
        labels = (("engine", "0"), ("tier", tier))
        assert values["vllm:flexkv_hit_tokens_total", labels] == total[sample("hit_tokens", tier)]
        assert values["vllm:flexkv_blocks", labels] == ready
    done = counters.loads - counters.failed_loads
    assert values["vllm:flexkv_load_seconds_count", (("engine", "0"),)] == done > 0
    assert values["vllm:flexkv_saved_prefill_seconds_total", (("engine", "0"),)] > 0
