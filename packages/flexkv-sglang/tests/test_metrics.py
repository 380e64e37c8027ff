# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from sglang_requests import OwnPages
from sglang_world import Rank, hashes_of

from flexkv import CacheConfig
from flexkv.figures.definitions import METRICS, Kind
from flexkv_sglang import metrics as metrics_module
from flexkv_sglang.metrics import Metrics
from packages.conftest import StillClock

BELOW = {"disk", "mooncake", "objects"}


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
    assert value("hit_tokens_total", tier="host") == 0
    assert value("hit_tokens_total", tier="disk") is None, "it has no disk"
    rank.store(hashes_of("a", 2), [1, 2])
    rank.side.ended_offloads()
    for _ in range(2):
        metrics.report(rank.side)
    assert value("stored_blocks_total", tier="host") == 2
    assert value("blocks", tier="host") == 2
    rank.lookup("r", hashes_of("a", 2))
    rank.load("r", hashes_of("a", 2), [3, 4])
    rank.requests.scheduled([rank.request("r", range(9), 8)], [], OwnPages())
    metrics.report(rank.side)
    assert value("hit_tokens_total", tier="host") == 8
    assert value("hit_blocks_sum") == 2
    assert value("hit_blocks_bucket", le="1.0") == 0
    assert value("hit_blocks_bucket", le="2.0") == 1
    assert value("store_seconds_count") == 1
    metrics.report(Uncounted())  # type: ignore[arg-type]


@pytest.mark.parametrize("leads", [True, False])
def test_rank_0_logs_its_figures_once_a_minute_without_metrics_too(
    make_rank: Callable[..., Rank],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    leads: bool,
) -> None:
    clock = StillClock()
    monkeypatch.setattr(metrics_module, "time", clock)
    rank = make_rank()
    metrics = Metrics(CacheConfig(), None, leads=leads)
    rank.store(hashes_of("a", 2), [1, 2])
    rank.lookup("r", hashes_of("a", 2))
    rank.load("r", hashes_of("a", 2), [3, 4])
    rank.requests.scheduled([rank.request("r", range(9), 8)], [], OwnPages())
    with caplog.at_level(logging.INFO, logger="flexkv.sglang"):
        for _ in range(3):  # the third minute has nothing to say
            clock.skip(59)
            metrics.report(rank.side)
            clock.skip(2)
            metrics.report(rank.side)
    said = [each for each in caplog.messages if each.startswith("FlexKV in the last 61 s: ")]
    assert len(said) == leads
    assert all("host hits (tokens)=8" in each for each in said)


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
            is_there = not BELOW & set(values) and (metric.kind is not Kind.GAUGE or leads)
            assert ((name, labels) in found) == is_there, name
