# SPDX-License-Identifier: Apache-2.0
"""One scrape of an engine, and what happened between two of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from flexkv.adapter import info
from flexkv.adapter.metrics import METRICS, Kind, sample

_NAME = re.compile(r"(vllm|sglang):flexkv_(\w+)")
_METRICS = {metric.name: metric for metric in METRICS}


@dataclass(slots=True)
class Reading:
    """FlexKV's figures of all engines behind one address, added up.

    Attributes:
        at: time.monotonic() of the scrape.
        engines: kinds of engines, usually one.
        models: served, by name.
        versions: of FlexKV.
        values: of counters and gauges, by `sample` name.
        buckets: of histograms: by `sample` name how many values are at most each bound.
    """

    at: float
    engines: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)
    versions: set[str] = field(default_factory=set)
    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)


def read_metrics(text: str, at: float) -> Reading | None:
    """The figures in what an engine serves at `/metrics`; None if FlexKV's are not there.

    Args:
        text: in Prometheus's text format.
        at: when it was served.

    Raises:
        ValueError: it is something else.
    """
    reading = Reading(at)
    for family in text_string_to_metric_families(text):
        found = _NAME.fullmatch(family.name)
        if found is None:
            continue
        reading.engines.add(found[1])
        name = found[2]
        for each in family.samples:
            if name == info.NAME:
                reading.versions.add(each.labels.get("version", ""))
                reading.models.add(each.labels.get("model_name", ""))
            elif name in _METRICS:
                _add(reading, name, each.name, each.labels, each.value)
    return reading if reading.engines else None


def _add(
    reading: Reading, name: str, sample_name: str, labels: dict[str, str], value: float
) -> None:
    metric = _METRICS[name]
    key = sample(name, *(labels.get(each, "") for each in metric.label_names))
    if metric.kind is not Kind.HISTOGRAM:
        if not sample_name.endswith("_created"):
            reading.values[key] = reading.values.get(key, 0.0) + value
    elif sample_name.endswith("_bucket"):
        bounds = reading.buckets.setdefault(key, {})
        bound = float(labels["le"])
        bounds[bound] = bounds.get(bound, 0.0) + value


@dataclass(frozen=True, slots=True)
class Change:
    """What an engine did between two scrapes. If a counter is smaller than before, the engine was
    started again meanwhile, and counts from 0.

    Attributes:
        old: the earlier scrape; None if there is only one.
        new: the later one.
    """

    old: Reading | None
    new: Reading

    @property
    def seconds(self) -> float:
        """Between the two; 0 if there is only one."""
        return 0.0 if self.old is None else self.new.at - self.old.at

    def total(self, name: str, *labels: str) -> float:
        """Of a counter since the engine's start, or the value of a gauge."""
        return self.new.values.get(sample(name, *labels), 0.0)

    def growth(self, name: str, *labels: str) -> float:
        """Of a counter between the two."""
        if self.old is None:
            return 0.0
        now = self.total(name, *labels)
        before = self.old.values.get(sample(name, *labels), 0.0)
        return now - before if now >= before else now

    def rate(self, name: str, *labels: str) -> float | None:
        """Growth in a second; None if there is only one scrape."""
        return self.growth(name, *labels) / self.seconds if self.seconds > 0 else None

    def quantile(self, share: float, name: str, *labels: str) -> float | None:
        """Of a histogram: between the two scrapes if it got values then, else since the engine's
        start; None if it has no values. Between two bounds it is interpolated, as Prometheus does.
        """
        key = sample(name, *labels)
        now = self.new.buckets.get(key, {})
        before = {} if self.old is None else self.old.buckets.get(key, {})
        recent = {bound: count - before.get(bound, 0.0) for bound, count in now.items()}
        for counts in (recent, now):
            if counts and min(counts.values()) >= 0 and counts.get(math.inf, 0.0) > 0:
                return _quantile(share, sorted(counts.items()))
        return None

    def failures(self) -> Iterator[tuple[str, str, int]]:
        """Cause, tier and number of failures between the two, or since the engine's start if there
        is only one."""
        for cause, tier in _METRICS["failures"].combinations:
            count = (self.total if self.old is None else self.growth)("failures", cause, tier)
            if count > 0:
                yield cause, tier, int(count)


def _quantile(share: float, counts: Iterable[tuple[float, float]]) -> float:
    """Counts are of values up to each bound, ascending; the last bound is infinite."""
    listed = list(counts)
    wanted = share * listed[-1][1]
    low, below = 0.0, 0.0
    for bound, count in listed:
        if count >= wanted:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (wanted - below) / ((count - below) or 1.0)
        low, below = bound, count
    return low
