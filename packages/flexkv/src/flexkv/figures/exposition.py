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
    EXPIRED_BLOCKS,
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
from flexkv.figures.health_samples import problems_of, trouble_samples
from flexkv.figures.tenant_samples import TENANT_METRICS
from flexkv.settings import SETTINGS, CacheConfig
from flexkv.types.changes import BELOW
from flexkv.types.troubles import Trouble
from flexkv.version import __version__

INFO_NAME = "info"
INFO_TEXT = "Always 1; the labels are FlexKV's version and the settings in force, paths left out."

_SETTINGS = tuple(each for each in SETTINGS.values() if not each.kind.shows_place)
"""Settings that are numbers, booleans or names. Paths may be long, and readers of metrics do not
need them."""

INFO_LABELS = ("version", *(each.name for each in _SETTINGS))

_KINDS = {metric.name: metric.kind for metric in METRICS}
_LOWER = frozenset(medium.value for medium in BELOW)

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
    histogram observes it `count` times, buckets and sum are right. `place` is the index of the
    range's upper bound in `bounds`, and their number for the range beyond the last."""
    low = bounds[place - 1] if place else -math.inf
    high = bounds[place] if place < len(bounds) else math.inf
    return min(high, max(math.nextafter(low, math.inf), total / count))


def info_labels(config: CacheConfig) -> Labels:
    """Values of `INFO_LABELS`. A setting without a value is empty; the gauges show FlexKV's
    choice."""
    return (__version__, *(each.written(getattr(config, each.name)) for each in _SETTINGS))


class Exposition:
    """FlexKV's metrics of the engines that a process serves, under names that begin with `prefix`.
    `engines` has the values of the engine's own labels, `label_names`, by engine. Values exist from
    the start, so that a rate includes the first count. Those of a lower tier exist once an engine
    reports the tier, which it does before it counts anything there."""

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
        self._families: dict[str, Any] = {}
        self._engines = engines
        self._made: dict[tuple[Hashable, str, Labels], Any] = {}
        self._tiers: set[tuple[Hashable, str]] = set()
        for metric in METRICS:
            more = {"buckets": list(metric.bounds)} if metric.bounds else {}
            labelled = [*own, *metric.label_names]
            made = makers[metric.kind](prefix + metric.name, metric.text, labelled, **more)
            self._families[metric.name] = made
        names = [name for name, _ in config.tenant_shares]
        self._tenants: dict[str, tuple[Any, str]] = {}
        for metric in TENANT_METRICS if names else ():
            made = gauge(prefix + metric.name, metric.text, [*own, *metric.label_names])
            self._tenants |= {sample(metric.name, name): (made, name) for name in names}
        for engine in engines:
            self._make(engine, "")
            if not config.enable:
                self.observe(trouble_samples(Trouble.SETTING), engine)
        about = gauge(prefix + INFO_NAME, INFO_TEXT, [*own, *INFO_LABELS])
        for values in engines.values():
            about.labels(*values, *info_labels(config)).set(1)

    def observe(self, samples: Samples, engine: Hashable) -> None:
        """Add the samples that an engine has counted since the last call."""
        if engine not in self._engines:
            return
        for name in samples.keys() & self._tenants.keys():
            made, tenant = self._tenants[name]
            made.labels(*self._engines[engine], tenant).set(samples[name])
        for metric, labels, value, times in values_of(samples):
            tier = _lower_tier(labels)
            if (engine, tier) not in self._tiers:
                self._make(engine, tier)
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

    def zero_gauges(self) -> None:
        """Set all gauges to 0 that exist from the start."""
        for (_, name, _), made in self._made.items():
            if _KINDS[name] is Kind.GAUGE:
                made.set(0)

    def _make(self, engine: Hashable, tier: str) -> None:
        """Make the values of an engine that are about a lower tier, or about none if `tier` is
        empty. All begin with 0."""
        self._tiers.add((engine, tier))
        for metric in METRICS:
            for labels in metric.combinations:
                if _lower_tier(labels) == tier:
                    made = self._families[metric.name].labels(*self._engines[engine], *labels)
                    self._made[engine, metric.name, labels] = made


def _lower_tier(labels: Labels) -> str:
    """The lower tier that a value is about; empty if it is about none."""
    return next((label for label in labels if label in _LOWER), "")


def summary(samples: Mapping[str, float]) -> dict[str, int | float]:
    """The content of a log line: the changes since the previous line."""

    def total(metric: Metric, *labels: str) -> float:
        return samples.get(sample(metric.name, *labels), 0)

    def all_of(metric: Metric) -> float:
        return sum(total(metric, *labels) for labels in metric.combinations)

    line: dict[str, int | float] = {}
    for problem in problems_of(samples):
        line[f"{problem.trouble.state}: {' '.join(filter(None, reversed(problem)))}"] = 1
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
        _put(line, f"{tier} expired (blocks)", total(EXPIRED_BLOCKS, tier))
        _put(line, f"{tier} drops (blocks)", total(DROPPED_BLOCKS, tier))
    _put(line, "failures", all_of(FAILURES))
    return line


def _put(line: dict[str, int | float], name: str, value: float) -> None:
    if value:
        line[name] = value
