# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import functools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from flexkv import CacheConfig
from flexkv.cli.top_metrics import Change, Reading, read_metrics
from flexkv.cli.top_sources import scrape
from flexkv.figures.exposition import Exposition
from packages.flexkv.tests.cli.served import served


def reading(at: float, hits: float, counts: dict[float, float] | None = None) -> Reading:
    found = Reading(at, {"vllm"})
    found.values["hit_tokens:host"] = hits
    found.buckets["load_seconds"] = counts or {}
    return found


def test_figures_are_read_as_engines_serve_them() -> None:
    with served() as engine:
        found = scrape(f"http://127.0.0.1:{engine.port}/metrics")
    assert (found.engines, found.models) == ({"vllm"}, {"chat"})
    assert found.values["hit_tokens:host"] == 100
    assert found.values["hit_tokens:disk"] == 0
    assert found.values["saved_prefill_seconds"] == 2.5
    assert found.values["bytes:host"] == 3 << 30
    assert found.buckets["load_seconds"][0.025] == 4
    assert found.buckets["load_seconds"][0.01] == 0


def test_engines_behind_one_address_add_up() -> None:
    text = "\n".join(
        f'vllm:flexkv_hit_tokens_total{{engine="{i}",model_name="m",tier="host"}} {i + 1}'
        for i in range(3)
    )
    found = read_metrics(f"# TYPE vllm:flexkv_hit_tokens_total counter\n{text}\n", 1.0)
    assert found is not None
    assert found.values == {"hit_tokens:host": 6}


def test_an_engine_without_flexkv_has_no_figures() -> None:
    assert read_metrics("# TYPE vllm:x gauge\nvllm:x 1\n", 1.0) is None


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(-(2**62), 2**62))
def test_prometheus_client_and_this_reader_agree(model: str, value: int) -> None:
    """Any text is a label's value: quotes, backslashes, ends of lines."""
    registry = CollectorRegistry()
    makers = (functools.partial(make, registry=registry) for make in (Counter, Gauge, Histogram))
    names, engines = ["model_name"], {0: [model]}
    made = Exposition(
        "vllm:flexkv_", *makers, label_names=names, engines=engines, config=CacheConfig()
    )
    made.observe({"blocks:disk": value, "hit_tokens:disk": abs(value)}, 0)
    found = read_metrics(generate_latest(registry).decode(), 1.0)
    assert found is not None
    assert found.models == {model}
    assert found.values["blocks:disk"] == pytest.approx(value)
    assert found.values["hit_tokens:disk"] == pytest.approx(abs(value))
    assert found.buckets["load_seconds"][math.inf] == 0


@pytest.mark.parametrize(
    "line",
    [
        "<html>",
        "vllm:flexkv_bytes",
        'vllm:flexkv_bytes{tier="host" 1',
        'vllm:flexkv_bytes{tier="host"} x',
        "vllm:flexkv_bytes{tier=host} 1",
        "a b c",
    ],
)
def test_another_format_is_no_metrics(line: str) -> None:
    with pytest.raises(ValueError, match=r"no line of metrics|could not convert"):
        read_metrics(f"vllm:x 1\n{line}\n", 1.0)


def test_space_times_and_comments_are_read_as_prometheus_does() -> None:
    text = '# any\n\n  \nvllm:x \t 1 -123\r\nvllm:flexkv_bytes {tier="host",}\t7 1700000000\n'
    found = read_metrics(text, 1.0)
    assert found is not None
    assert found.values == {"bytes:host": 7}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e300"])
@pytest.mark.parametrize("name", ["bytes", "load_seconds_bucket"])
def test_values_that_no_engine_has_are_no_metrics(name: str, value: str) -> None:
    kind = "gauge" if name == "bytes" else "histogram"
    metric = name.removesuffix("_bucket")
    text = f'# TYPE vllm:flexkv_{metric} {kind}\nvllm:flexkv_{name}{{tier="host",le="1"}} {value}\n'
    with pytest.raises(ValueError, match=f"flexkv_{name} is "):
        read_metrics(text, 1.0)


def test_a_rate_is_of_the_time_between() -> None:
    change = Change(reading(10, 100), reading(14, 300))
    assert change.rate("hit_tokens", "host") == 50
    assert change.growth("hit_tokens", "host") == 200
    assert Change(None, reading(14, 300)).rate("hit_tokens", "host") is None


def test_an_engine_that_was_started_again_counts_from_zero() -> None:
    assert Change(reading(10, 100), reading(14, 30)).growth("hit_tokens", "host") == 30


def test_a_quantile_lies_between_the_bounds_of_its_range() -> None:
    counts = {0.1: 10.0, 1.0: 20.0, math.inf: 20.0}
    change = Change(None, reading(1, 0, counts))
    assert change.quantile(0.25, "load_seconds") == pytest.approx(0.05)
    assert change.quantile(0.75, "load_seconds") == pytest.approx(0.55)


def test_a_quantile_is_of_the_latest_values_if_there_are_any() -> None:
    old = {0.1: 10.0, 1.0: 10.0, math.inf: 10.0}
    new = {0.1: 10.0, 1.0: 14.0, math.inf: 14.0}
    assert Change(reading(1, 0, old), reading(2, 0, new)).quantile(0.5, "load_seconds") > 0.1
    assert Change(reading(1, 0, old), reading(2, 0, old)).quantile(0.5, "load_seconds") <= 0.1
    # The engine was started again: fewer than before.
    assert Change(reading(1, 0, new), reading(2, 0, old)).quantile(0.5, "load_seconds") <= 0.1


def test_values_beyond_all_bounds_count_as_the_last_bound() -> None:
    counts = {0.1: 0.0, 1.0: 0.0, math.inf: 5.0}
    assert Change(None, reading(1, 0, counts)).quantile(0.99, "load_seconds") == 1.0


def test_no_values_have_no_quantile() -> None:
    assert Change(None, reading(1, 0)).quantile(0.5, "load_seconds") is None
