# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

from prometheus_client import REGISTRY
from sglang_world import Rank, hashes_of

from flexkv import CacheConfig
from flexkv_sglang.metrics import Metrics


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"sglang:flexkv_{name}", {"model_name": "m"} | labels)


def test_what_a_rank_counts_is_reported(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    metrics = Metrics(CacheConfig(), {"model_name": "m"})
    assert value("hit_tokens_total", tier="disk") == 0
    rank.store(hashes_of("a", 2), [1, 2])
    rank.side.ended_offloads()
    for _ in range(2):
        metrics.report(rank.side)
    assert value("stored_blocks_total", tier="host") == 2
    assert value("blocks", tier="host") == 2
    rank.load("r", hashes_of("a", 2), [3, 4])
    metrics.report(rank.side)
    assert value("hit_tokens_total", tier="host") == 8


def test_nothing_is_kept_for_metrics_that_nobody_asks_for(make_rank: Callable[..., Rank]) -> None:
    Metrics(CacheConfig(), None).report(make_rank().side)
