# SPDX-License-Identifier: Apache-2.0
"""The meter: counts that only grow, of which each reader drains what is new to it."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from flexkv.figures.definitions import (
    GAUGES,
    METRICS,
    HostFigures,
    Metric,
    Samples,
    TierReading,
    bucket,
    sample,
)
from flexkv.figures.tenant_samples import BEGINNINGS as TENANTS
from flexkv.types.changes import Medium

_OWN = {sample(m.name, *labels): read for m in METRICS for labels, read in m.own.items()}
_SHARED = {sample(m.name, *labels): read for m in METRICS for labels, read in m.shared.items()}
_OF_TIER = {
    medium: {name: read for metric in METRICS for name, read in metric.tier_reads(medium).items()}
    for medium in Medium
}


class Figures(NamedTuple):
    """All values of a cache now: those of one engine, those of host memory and lower tiers, which
    all engines that use these have, and all `Counters` by name, for a log line."""

    own: Samples
    shared: Samples
    counts: Mapping[str, int]


class Histogram:
    """Counts values by range, in a meter. Adding a value costs a binary search."""

    __slots__ = ("_bounds", "_names", "_values")

    def __init__(self, values: Samples, metric: Metric, labels: tuple[str, ...]) -> None:
        self._values = values
        self._bounds = metric.bounds
        places = range(len(metric.bounds) + 1)
        self._names = [bucket(metric.name, place, *labels) for place in places]

    def observe(self, value: float) -> None:
        """Add one value."""
        count_name, sum_name = self._names[bisect.bisect_left(self._bounds, value)]
        self._values[count_name] += 1
        self._values[sum_name] += value


class Meter:
    """Counts of one process, apart from those that a cache keeps as attributes. Single-threaded.
    `values` has totals by name of the sample. What counts often adds to them itself."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: Samples = defaultdict(int)

    def count(self, metric: Metric, value: float = 1, *labels: str) -> None:
        """Add to a value of `metric.counted`."""
        self.values[sample(metric.name, *labels)] += value

    def put(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a total that something else counts, or a gauge."""
        self.values[sample(metric.name, *labels)] = value

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """The histogram of these labels. It is kept in the meter."""
        return Histogram(self.values, metric, labels)

    def read(self, host: HostFigures, tiers: Iterable[TierReading]) -> Figures:
        """All values of a cache: these, and those that it keeps as attributes."""
        own = self.values | {name: read(host) for name, read in _OWN.items()}
        shared = {name: read(host) for name, read in _SHARED.items()}
        for tier in tiers:
            shared |= {name: read(tier) for name, read in _OF_TIER[tier.medium].items()}
        return Figures(own, shared, host.counters.as_dict())


class Reader:
    """One reader of values that others may read, too. Each gets every count once."""

    __slots__ = ("_reported",)

    def __init__(self) -> None:
        self._reported: Mapping[str, float] = {}

    def drain(self, values: Mapping[str, float]) -> Samples:
        """The growth of the totals in `values` since the last call, and all gauges; empty if
        nothing is new."""
        reported, self._reported = self._reported, dict(values)
        samples: Samples = {}
        gauges: Samples = {}
        changed = False
        for name, value in values.items():
            if name in GAUGES or name.startswith(TENANTS):
                gauges[name] = value
                changed = changed or value != reported.get(name)
            elif value > (before := reported.get(name, 0)):
                samples[name] = value - before
        return samples | gauges if samples or changed else {}
