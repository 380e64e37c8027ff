# SPDX-License-Identifier: Apache-2.0
"""Scrapes of an engine, and the changes between two of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from flexkv.figures.definitions import METRICS, Kind, Metric, sample
from flexkv.figures.exposition import INFO_NAME
from flexkv.figures.tenant_samples import TENANT_METRICS
from flexkv.service.state import SERVICE_METRICS

_LABEL = r'[a-zA-Z_]\w*="(?:[^"\\\n]|\\.)*"'
_LABELS = rf"[ \t]*\{{((?:{_LABEL},?)*)\}}"
_SAMPLE = re.compile(rf"([a-zA-Z_:][\w:]*)(?:{_LABELS})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t\r]*")
"""A line of Prometheus's text format that is neither empty nor a comment."""
_NAME = re.compile(r"(vllm|sglang|service):flexkv_(\w+?)(_total|_bucket|_sum|_count|_created)?")
_METRICS = {metric.name: metric for metric in (*METRICS, *SERVICE_METRICS, *TENANT_METRICS)}
_MOST = 2.0**63
"""No engine counts as far."""


@dataclass(slots=True)
class Reading:
    """FlexKV's figures of all engines behind one address, added up."""

    at: float
    """time.monotonic() of the scrape."""
    engines: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)
    versions: set[str] = field(default_factory=set)
    values: dict[str, float] = field(default_factory=dict)
    """Values of counters and gauges, by `sample` name."""
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)
    """For each histogram, by `sample` name, the number of values up to each bound."""


def read_metrics(text: str, at: float) -> Reading | None:
    """Read FlexKV's figures from an engine's answer at `/metrics`, in Prometheus's text format;
    None if it has none.

    Raises:
        ValueError: `text` is in another format, or a value is not a number below 2^63.
        KeyError: a range of a histogram has no bound.
    """
    reading = Reading(at)
    for line in text.split("\n"):
        if not line.strip() or line.startswith("#"):
            continue
        parts = _SAMPLE.fullmatch(line)
        if parts is None:
            raise ValueError(f"no line of metrics: {line!r}")
        found = _NAME.fullmatch(parts[1])
        if found is None:
            continue
        reading.engines.add(found[1])
        labels, metric = _labels(parts[2] or ""), _METRICS.get(found[2])
        reading.models.add(labels.get("model_name", ""))
        if found[2] == INFO_NAME:
            reading.versions.add(labels.get("version", ""))
        elif metric is not None and found[3] != "_created":
            value = float(parts[3])
            if not abs(value) < _MOST:  # nor NaN
                raise ValueError(f"{parts[1]} is {value}")
            _add(reading, metric, found[3], labels, value)
    return reading if reading.engines else None


def _labels(text: str) -> dict[str, str]:
    pairs = (each.split("=", 1) for each in re.findall(_LABEL, text))
    return {
        name: re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], value[1:-1])
        for name, value in pairs
    }


def _add(
    reading: Reading, metric: Metric, ending: str | None, labels: dict[str, str], value: float
) -> None:
    key = sample(metric.name, *(labels.get(each, "") for each in metric.label_names))
    if metric.kind is not Kind.HISTOGRAM:
        reading.values[key] = reading.values.get(key, 0.0) + value
    elif ending == "_bucket":
        bounds = reading.buckets.setdefault(key, {})
        bound = float(labels["le"])
        bounds[bound] = bounds.get(bound, 0.0) + value


@dataclass(frozen=True, slots=True)
class Change:
    """The changes between two scrapes of an engine; `old` is None if there is only one. If a
    counter is smaller than before, the engine was started again meanwhile, and counted from 0.

    The methods take the name of a metric in `METRICS`, and values of its labels in its order.
    """

    old: Reading | None
    new: Reading

    @property
    def seconds(self) -> float:
        """Seconds between the two scrapes; 0 if there is only one."""
        return 0.0 if self.old is None else self.new.at - self.old.at

    def total(self, name: str, *labels: str) -> float:
        """The value of a counter since the engine's start, or of a gauge; 0 if it is missing."""
        return self.new.values.get(sample(name, *labels), 0.0)

    def growth(self, name: str, *labels: str) -> float:
        """The growth of a counter between the two scrapes; 0 if there is only one."""
        if self.old is None:
            return 0.0
        now = self.total(name, *labels)
        before = self.old.values.get(sample(name, *labels), 0.0)
        return now - before if now >= before else now

    def rate(self, name: str, *labels: str) -> float | None:
        """The growth of a counter in a second; None if there is only one scrape."""
        return self.growth(name, *labels) / self.seconds if self.seconds > 0 else None

    def quantile(self, share: float, name: str, *labels: str) -> float | None:
        """The value that the `share` (0 to 1) smallest values of a histogram do not exceed.

        It is taken over the values between the two scrapes, if there are any, else over those since
        the engine's start; None if there are none. Between two bounds it is interpolated, as
        Prometheus does. Beyond the largest finite bound, it is that bound.
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
        """Cause, tier and number of the failures between the two scrapes. If there is only one, of
        those since the engine's start. Causes without a failure are left out."""
        for cause, tier in _METRICS["failures"].combinations:
            count = (self.total if self.old is None else self.growth)("failures", cause, tier)
            if count > 0:
                yield cause, tier, int(count)


def _quantile(share: float, counts: Iterable[tuple[float, float]]) -> float:
    """`counts` has the number of values up to each bound, ascending; the last bound is infinite."""
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
