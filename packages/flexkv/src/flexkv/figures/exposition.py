# SPDX-License-Identifier: Apache-2.0
"""FlexKV's metrics at an engine's `/metrics`, made with the engine's own classes of metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from flexkv.figures.definitions import (
    COPIED_BYTES,
    COPY_SECONDS,
    DROPPED_BLOCKS,
    EVICTED_BLOCKS,
    FAILURES,
    HIT_TOKENS,
    LEFT_TOKENS,
    METRICS,
    QUERY_TOKENS,
    SAVED_PREFILL_SECONDS,
    TIERS,
    Kind,
    Labels,
    Metric,
    Samples,
    bucket,
    sample,
)
from flexkv.settings import SETTINGS, CacheConfig
from flexkv.version import __version__

INFO_NAME = "info"
INFO_TEXT = "Always 1; the labels are FlexKV's version and the settings in force, paths left out."

_SETTINGS = tuple(each for each in SETTINGS.values() if not each.kind.shows_place)
"""Settings that are numbers, booleans or names. Paths may be long, and readers of metrics do not
need them."""

INFO_LABELS = ("version", *(each.name for each in _SETTINGS))

Make: TypeAlias = Callable[..., Any]
"""Makes a metric from its name, its text and the names of its labels, as prometheus_client does. A
histogram also takes its bounds as `buckets`."""


def _places(metric: Metric, labels: Labels) -> Iterator[tuple[str, str]]:
    """The names of a metric's samples, and of the samples with the sums of a histogram's values."""
    if metric.kind is not Kind.HISTOGRAM:
        yield sample(metric.name, *labels), ""
        return
    for place in range(len(metric.bounds) + 1):
        yield bucket(metric.name, place, *labels)


_SERIES = {
    name: (metric, labels, place, sum_name)
    for metric in METRICS
    for labels in metric.combinations
    for place, (name, sum_name) in enumerate(_places(metric, labels))
}


def values_of(samples: Samples) -> Iterator[tuple[Metric, Labels, float, int]]:
    """The values that drained samples stand for: metric, labels, value, and how often a histogram
    observes the value. Samples of another version's metrics are left out."""
    for name, value in samples.items():
        metric, labels, place, sum_name = _SERIES.get(name, (None, (), 0, ""))
        if metric is None:
            continue
        if not sum_name:
            yield metric, labels, value, 1
        elif value > 0:
            total = samples.get(sum_name, 0.0)
            mean = representative(metric.bounds, place, int(value), total)
            yield metric, labels, mean, int(value)


def representative(bounds: Sequence[float], place: int, count: int, total: float) -> float:
    """The mean of `count` values of one range, moved into the range if rounding has left it. If a
    histogram observes it `count` times, buckets and sum are right.

    Args:
        bounds: upper bounds of the ranges, ascending.
        place: index of the range's upper bound; the number of bounds for the range beyond the last.
        count: the number of values, at least 1.
        total: the sum of the values.
    """
    low = bounds[place - 1] if place else -math.inf
    high = bounds[place] if place < len(bounds) else math.inf
    return min(high, max(math.nextafter(low, math.inf), total / count))


def info_labels(config: CacheConfig) -> Labels:
    """Values of `INFO_LABELS`. A setting without a value is empty; the gauges show FlexKV's
    choice."""
    return (__version__, *(each.written(getattr(config, each.name)) for each in _SETTINGS))


class Exposition:
    """FlexKV's metrics of the engines that a process serves. All values exist from the start, so
    that a rate includes the first count.

    Args:
        prefix: the engine's prefix of all names.
        counter: makes a counter.
        gauge: makes a gauge.
        histogram: makes a histogram.
        label_names: names of the engine's own labels.
        engines: values of these labels, by engine.
        config: FlexKV's settings of the engines.
    """

    def __init__(
        self,
        prefix: str,
        counter: Make,
        gauge: Make,
        histogram: Make,
        *,
        label_names: Sequence[str],
        engines: Mapping[Any, Sequence[object]],
        config: CacheConfig,
    ) -> None:
        own = list(label_names)
        makers = {Kind.COUNTER: counter, Kind.GAUGE: gauge, Kind.HISTOGRAM: histogram}
        self._made: dict[tuple[Hashable, str, Labels], Any] = {}
        for metric in METRICS:
            more = {"buckets": list(metric.bounds)} if metric.bounds else {}
            labelled = [*own, *metric.label_names]
            made = makers[metric.kind](prefix + metric.name, metric.text, labelled, **more)
            for engine, values in engines.items():
                for labels in metric.combinations:
                    self._made[engine, metric.name, labels] = made.labels(*values, *labels)
        about = gauge(prefix + INFO_NAME, INFO_TEXT, [*own, *INFO_LABELS])
        for values in engines.values():
            about.labels(*values, *info_labels(config)).set(1)

    def observe(self, samples: Samples, engine: Hashable) -> None:
        """Add the samples that an engine has counted since the last call."""
        for metric, labels, value, times in values_of(samples):
            made = self._made.get((engine, metric.name, labels))
            if made is None:
                continue
            if metric.kind is Kind.COUNTER:
                made.inc(value)
            elif metric.kind is Kind.GAUGE:
                made.set(value)
            else:
                for _ in range(times):
                    made.observe(value)


def summary(samples: Mapping[str, float]) -> dict[str, int | float]:
    """The content of a log line: the changes since the previous line."""

    def total(metric: Metric, *labels: str) -> float:
        return samples.get(sample(metric.name, *labels), 0)

    def all_of(metric: Metric) -> float:
        return sum(total(metric, *labels) for labels in metric.combinations)

    line: dict[str, int | float] = {}
    queries = total(QUERY_TOKENS, "host")
    if queries:
        line["FlexKV hit rate (%)"] = round(100 * all_of(HIT_TOKENS) / queries, 1)
    for tier in TIERS:
        _put(line, f"{tier} hits (tokens)", total(HIT_TOKENS, tier))
    _put(line, "saved prefill (s)", round(total(SAVED_PREFILL_SECONDS), 1))
    _put(line, "left hits (tokens)", all_of(LEFT_TOKENS))
    for way in COPIED_BYTES.combinations:
        size, seconds = total(COPIED_BYTES, *way), total(COPY_SECONDS, *way)
        _put(line, f"{' '.join(way)} (MB)", round(size / 1e6, 1))
        if seconds:
            line[f"{' '.join(way)} (GB/s per copy)"] = round(size / seconds / 1e9, 2)
    for tier in TIERS:
        _put(line, f"{tier} evictions (blocks)", total(EVICTED_BLOCKS, tier))
        _put(line, f"{tier} drops (blocks)", total(DROPPED_BLOCKS, tier))
    _put(line, "failures", all_of(FAILURES))
    return line


def _put(line: dict[str, int | float], name: str, value: float) -> None:
    if value:
        line[name] = value
