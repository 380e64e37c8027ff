# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from sglang_world import Rank, hashes_of

from flexkv import CacheConfig
from flexkv.figures.definitions import METRICS, Kind
from flexkv_sglang.metrics import Metrics


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"sglang:flexkv_{name}", {"model_name": "m"} | labels)


class Uncounted:
    """A side that cannot be counted, which ends nothing."""

    @property
    def has_samples(self) -> bool:
        raise OSError("nobody expects it")


def test_what_a_rank_counts_is_reported(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    metrics = Metrics(CacheConfig(), {"model_name": "m"}, leads=True)
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
    assert value("hit_blocks_sum") == 2
    assert value("hit_blocks_bucket", le="1.0") == 0
    assert value("hit_blocks_bucket", le="2.0") == 1
    assert value("store_seconds_count") == 1
    metrics.report(Uncounted())  # type: ignore[arg-type]


def test_nothing_is_kept_for_metrics_that_nobody_asks_for(make_rank: Callable[..., Rank]) -> None:
    Metrics(CacheConfig(), None, leads=True).report(make_rank().side)


_SCRAPE = """
import sys
from flexkv import CacheConfig
from flexkv_sglang.metrics import Metrics
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

Metrics(CacheConfig(), {"model_name": "m"}, leads=sys.argv[1] == "True")
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


@pytest.mark.parametrize("leads", [True, False])
def test_all_values_are_served_from_the_start(tmp_path: Path, leads: bool) -> None:
    """SGLang's server adds up the files that its schedulers write."""
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _SCRAPE, str(leads)]
    text = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    found = {
        (sample.name, frozenset(sample.labels.items()))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    endings = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}
    for metric in METRICS:
        name = "sglang:flexkv_" + metric.name + endings[metric.kind]
        for values in metric.combinations:
            own = zip(metric.label_names, values, strict=True)
            labels = frozenset({("model_name", "m"), *own})
            assert ((name, labels) in found) == (metric.kind is not Kind.GAUGE or leads), name
