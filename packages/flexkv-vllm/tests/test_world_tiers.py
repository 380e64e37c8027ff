# SPDX-License-Identifier: Apache-2.0
"""A disk and a bucket below a small arena, under vLLM's real scheduler: each tier has its own
figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'flexkv[objects]'")
pytest.importorskip("moto", reason="moto is not installed: pip install moto flask flask-cors")

from disk_world import PROMPT_BLOCKS, fill, prompts, slabs
from engine_world import BLOCK_TOKENS, MakeWorld, World
from patience import PATIENCE_SECONDS
from prometheus_client import CollectorRegistry
from scraping import metrics, scrape
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from flexkv.engine.scheduler import fetches
from flexkv.figures.definitions import sample
from integration.harness.s3_server import BUCKET, S3Server

TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as found:
        yield found


@pytest.fixture
def bucket(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of a bucket of the test's own."""
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    return {
        "objects_url": f"s3://{BUCKET}/{tmp_path.name}",
        "objects_question_seconds": PATIENCE_SECONDS,
        "objects_timeout_seconds": PATIENCE_SECONDS,
    }


def node(make_world: MakeWorld, bucket: dict[str, Any], disk: Path) -> World:
    return make_world(slots=14, disk_slots=100, settings=bucket | {"ssd_cache_dir": str(disk)})


def collected(world: World) -> Counter[str]:
    world.settle()
    world.step()
    total: Counter[str] = Counter()
    for samples in world.stats:
        total.update(samples)
    return total


def by_tier(total: Counter[str], name: str) -> list[float]:
    return [total[sample(name, tier)] for tier in ("host", "disk", "mooncake", "objects")]


def test_a_hit_counts_for_the_tier_that_gave_each_block(
    make_world: MakeWorld,
    bucket: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Blocks may be promised as soon as all tiers have given some, however long the others take.
    monkeypatch.setattr(fetches, "LOOKAHEAD_SECONDS", 2 * PATIENCE_SECONDS)
    text, *others = prompts(1, 4)
    first = node(make_world, bucket, tmp_path / "disk")
    fill(first, [text])
    assert by_tier(collected(first), "stored_blocks") == [PROMPT_BLOCKS] * 2 + [0, PROMPT_BLOCKS]
    first.close()
    other = node(make_world, bucket, tmp_path / "other")
    told: list[dict[CacheHitSource, int]] = []
    ask = other.connector.get_external_cache_hit_sources

    def sources(*args: Any) -> dict[CacheHitSource, int]:
        told.append(ask(*args))
        return told[-1]

    monkeypatch.setattr(other.connector, "get_external_cache_hit_sources", sources)
    half = TOKENS // 2
    other.generate(text[: half + 1])
    total = collected(other)
    assert by_tier(total, "hit_tokens") == [0, 0, 0, half]
    assert by_tier(total, "query_tokens") == [half + 1, half + 1, 0, half + 1]
    assert by_tier(total, "stored_blocks")[1] == PROMPT_BLOCKS // 2  # promoted
    fill(other, others)  # host memory has lost what came
    before = collected(other)
    other.generate(text)
    total = collected(other) - before
    assert by_tier(total, "hit_tokens") == [0, half, 0, half]
    assert by_tier(total, "query_tokens") == [
        *(len(text), len(text), 0),
        len(text) - half,
    ]
    assert told == [
        {CacheHitSource.EXTERNAL_UNSPECIFIED: half},
        {CacheHitSource.DISK: half, CacheHitSource.EXTERNAL_UNSPECIFIED: half},
    ]
    other.check_outputs()


def test_a_tier_that_fails_has_the_failures_and_the_next_one_the_hit(
    make_world: MakeWorld, bucket: dict[str, Any], tmp_path: Path
) -> None:
    world = node(make_world, bucket, tmp_path / "disk")
    text, *others = prompts(2, 4)
    fill(world, [text, *others])
    (slab,) = slabs(tmp_path)
    slab.write_bytes(bytes(slab.stat().st_size))
    before = collected(world)
    world.generate(text)
    total = collected(world) - before
    assert by_tier(total, "hit_tokens") == [0, 0, 0, TOKENS]
    assert total[sample("failures", "damaged", "disk")] == PROMPT_BLOCKS
    assert total[sample("failures", "damaged", "objects")] == 0
    world.check_outputs()


def test_a_scrape_names_each_tier(
    make_world: MakeWorld, bucket: dict[str, Any], tmp_path: Path
) -> None:
    world = node(make_world, bucket, tmp_path / "disk")
    fill(world, prompts(3, 1))
    collected(world)
    registry = CollectorRegistry()
    prometheus = metrics(registry)
    for samples in world.stats:
        prometheus.observe(samples)
    values = scrape(registry)

    def value(name: str, **labels: str) -> float:
        wanted = tuple(sorted({"engine": "0", **labels}.items()))
        return values[f"vllm:flexkv_{name}", wanted]

    assert not any("mooncake" in dict(labels).values() for _, labels in values), "it is not there"
    written = PROMPT_BLOCKS
    for tier in ("disk", "objects"):
        assert value("stored_blocks_total", tier=tier) == written
        assert value("copied_bytes_total", link=tier, direction="write") == written * 4096
        for way in ("read", "write"):
            states = {
                state: value("circuits", tier=tier, direction=way, state=state)
                for state in ("closed", "probing", "open")
            }
            assert states == {"closed": 1, "probing": 0, "open": 0}
        assert value("queue_bytes", tier=tier) == 0
    assert value("late_questions_total", tier="objects") == 0
