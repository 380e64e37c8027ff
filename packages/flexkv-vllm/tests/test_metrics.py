# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from patience import PATIENCE_SECONDS
from prometheus_client import CollectorRegistry
from scraping import metrics, scrape

from flexkv.figures.definitions import METRICS, Kind, bucket, sample
from flexkv_vllm.connector import FlexKVConnectorV1
from flexkv_vllm.metrics import FlexKVStats

HITS = sample("hit_tokens", "host")
BLOCKS = sample("blocks", "host")
LOADED = sample("copied_bytes", "device", "load")
BELOW = {"disk", "mooncake", "objects"}
LOADING = sample("copy_seconds", "device", "load")


def test_ranks_and_steps_add_up_and_gauges_are_the_latest() -> None:
    first = FlexKVStats(data={HITS: 16, BLOCKS: 3})
    total = first.aggregate(FlexKVStats(data={HITS: 32, LOADED: 5, BLOCKS: 1}))
    assert total.data == {HITS: 48, LOADED: 5, BLOCKS: 1}
    total.aggregate(FlexKVStats(data={}))
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()


def test_what_crosses_processes_comes_back() -> None:
    stats = FlexKVStats(data={HITS: 16, LOADING: 0.25})
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.data))
    assert FlexKVConnectorV1.build_kv_connector_stats(data) == stats
    assert FlexKVConnectorV1.build_kv_connector_stats().is_empty()


def test_the_log_line_says_what_happened() -> None:
    line = FlexKVStats(
        data={
            sample("query_tokens", "host"): 200,
            HITS: 100,
            sample("hit_tokens", "disk"): 30,
            sample("hit_tokens", "objects"): 20,
            sample("dropped_blocks", "mooncake"): 3,
            LOADED: 3_000_000_000,
            LOADING: 1.5,
            sample("failures", "damaged", "disk"): 2,
        }
    ).reduce()
    assert line == {
        "FlexKV hit rate (%)": 75.0,
        "host hits (tokens)": 100,
        "disk hits (tokens)": 30,
        "objects hits (tokens)": 20,
        "device load (MB)": 3000.0,
        "device load (GB/s per copy)": 2.0,
        "mooncake drops (blocks)": 3,
        "failures": 2,
    }


def test_every_value_is_there_from_the_start_and_counters_only_grow() -> None:
    registry = CollectorRegistry()
    made = metrics(registry, engines=2)
    values = scrape(registry)
    infos = {key: values.pop(key) for key in list(values) if key[0] == "vllm:flexkv_info"}
    assert set(infos.values()) == {1.0}
    assert len(infos) == 2
    # Of a histogram: a value for each bound, one beyond, the count and the sum.
    each_has = {metric: len(metric.bounds) + 3 if metric.bounds else 1 for metric in METRICS}
    assert len(values) == 2 * sum(
        sum(not set(labels) & BELOW for labels in metric.combinations) * count
        for metric, count in each_has.items()
    )
    assert set(values.values()) == {0.0}
    made.observe({HITS: 16, BLOCKS: 7}, 1)
    made.observe({HITS: 16, BLOCKS: 5}, 1)
    made.observe({"of a later version": 1}, 1)
    made.observe({HITS: 1}, 5)  # an engine that nobody knows
    values = scrape(registry)
    host = (("engine", "1"), ("tier", "host"))
    assert values["vllm:flexkv_hit_tokens_total", host] == 32
    assert values["vllm:flexkv_blocks", host] == 5
    assert values["vllm:flexkv_hit_tokens_total", (("engine", "0"), ("tier", "host"))] == 0


def test_ranks_and_steps_add_up_in_a_histogram() -> None:
    registry = CollectorRegistry()
    made = metrics(registry)
    short, beyond = bucket("load_seconds", 1), bucket("load_seconds", 13)
    disk = bucket("fetch_seconds", 0, "disk")
    total = FlexKVStats(data={short[0]: 2, short[1]: 0.003})
    total.aggregate(FlexKVStats(data={short[0]: 1, short[1]: 0.002, disk[0]: 1, disk[1]: 0.0001}))
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(total.data))
    made.observe(data)
    made.observe({beyond[0]: 1, beyond[1]: 20.0})
    values = scrape(registry)
    own = ("engine", "0")
    for bound, count in (("0.001", 0), ("0.0025", 3), ("10.0", 3), ("+Inf", 4)):
        assert values["vllm:flexkv_load_seconds_bucket", (own, ("le", bound))] == count
    assert values["vllm:flexkv_load_seconds_sum", (own,)] == pytest.approx(20.005)
    assert values["vllm:flexkv_load_seconds_count", (own,)] == 4
    assert values["vllm:flexkv_fetch_seconds_count", (own, ("tier", "disk"))] == 1
    assert not any(("tier", "objects") in labels for _, labels in values), "it has no such tier"
    assert values["vllm:flexkv_failures_total", (("cause", "read"), own, ("tier", "disk"))] == 0


def test_an_engine_whose_settings_turn_flexkv_off_says_so() -> None:
    registry = CollectorRegistry()
    metrics(registry, settings={"enable": False})
    values = scrape(registry)
    labels = (("engine", "0"), ("reason", "setting"), ("state", "off"), ("tier", ""))
    assert values["vllm:flexkv_health", labels] == 1
    assert sum(n for (name, _), n in values.items() if name == "vllm:flexkv_health") == 1


def test_each_link_has_its_own_directions() -> None:
    made = {metric.name: metric for metric in METRICS}
    for name in ("copied_bytes", "copy_seconds"):
        assert made[name].combinations == [
            ("device", "load"),
            ("device", "store"),
            ("disk", "read"),
            ("disk", "write"),
            ("mooncake", "read"),
            ("mooncake", "write"),
            ("objects", "read"),
            ("objects", "write"),
        ]


def test_only_tiers_that_know_what_they_hold_report_it() -> None:
    made = {metric.name: metric for metric in METRICS}
    for name in ("blocks", "capacity_blocks", "bytes", "capacity_bytes", "evicted_blocks"):
        assert made[name].combinations == [("host",), ("disk",)]
    assert made["late_questions"].combinations == [("mooncake",), ("objects",)]


def test_failures_name_the_tier_that_can_have_them() -> None:
    (failures,) = [metric for metric in METRICS if metric.name == "failures"]
    assert set(failures.combinations) == {
        ("load", "host"),
        ("store", "host"),
        *(
            (cause, tier)
            for cause in ("read", "damaged", "stalled", "write")
            for tier in ("disk", "mooncake", "objects")
        ),
        ("internal", ""),
        ("lasting", ""),
    }


def test_names_tell_their_units() -> None:
    units = (
        *("tokens", "bytes", "seconds", "blocks", "failures", "resets", "parameters", "length"),
        *(
            "openings",
            "circuits",
            "questions",
            "policies",
            "switches",
            "fallbacks",
            "hints",
            "health",
        ),
    )
    assert all(metric.name.endswith(units) for metric in METRICS)
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(metric.text.endswith(".") for metric in METRICS)
    assert {metric.kind for metric in METRICS} == set(Kind)


def test_the_frontend_needs_no_kernels() -> None:
    """What only logs and serves metrics imports the stats without what copies."""
    code = (
        "import sys\n"
        "sys.modules['flexkv_kernels'] = None\n"
        "from flexkv_vllm.metrics import FlexKVPromMetrics, FlexKVStats\n"
        "import torch\n"
        "print('cuda', torch.cuda.is_initialized())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=10 * PATIENCE_SECONDS,
    )
    assert "cuda False" in done.stdout
