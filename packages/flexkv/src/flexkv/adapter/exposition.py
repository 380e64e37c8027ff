# SPDX-License-Identifier: Apache-2.0
"""FlexKV's metrics at an engine's `/metrics`, made with the engine's own classes of metrics."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from flexkv.adapter import info
from flexkv.adapter.metrics import GAUGES, METRICS, Kind, Metric, Samples, bucket, sample
from flexkv.histogram import representative
from flexkv.settings import CacheConfig

Make: TypeAlias = Callable[..., Any]
"""Makes a metric from its name, its text and the names of its labels, as prometheus_client does. A
histogram also takes its bounds as `buckets`."""


@dataclass(frozen=True, slots=True)
class _Range:
    """One range of a histogram.

    Attributes:
        histogram: the engine's histogram, with all labels.
        sum_name: name of the sample with the sum of its values.
        bounds: upper bounds of all ranges.
        place: number of this range.
    """

    histogram: Any
    sum_name: str
    bounds: Sequence[float]
    place: int

    def observe(self, count: int, samples: Samples) -> None:
        """Add `count` values, whose sum is in `samples`."""
        if count > 0:
            total = samples.get(self.sum_name, 0.0)
            value = representative(self.bounds, self.place, count, total)
            for _ in range(count):
                self.histogram.observe(value)


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
        self._values: dict[tuple[Hashable, str], Any] = {}
        self._ranges: dict[tuple[Hashable, str], _Range] = {}
        own = list(label_names)
        makers = {Kind.COUNTER: counter, Kind.GAUGE: gauge, Kind.HISTOGRAM: histogram}
        for metric in METRICS:
            more = {"buckets": list(metric.bounds)} if metric.bounds else {}
            labelled = [*own, *metric.label_names]
            made = makers[metric.kind](prefix + metric.name, metric.text, labelled, **more)
            for engine, values in engines.items():
                for labels in metric.combinations:
                    self._add(metric, made.labels(*values, *labels), engine, labels)
        about = gauge(prefix + info.NAME, info.TEXT, [*own, *info.LABELS])
        for values in engines.values():
            about.labels(*values, *info.info_labels(config)).set(1)

    def observe(self, samples: Samples, engine: Hashable) -> None:
        """Add the samples that an engine has counted since the last call."""
        for name, value in samples.items():
            metric = self._values.get((engine, name))
            if metric is None:
                found = self._ranges.get((engine, name))
                if found is not None:
                    found.observe(int(value), samples)
                continue
            if name in GAUGES:
                metric.set(value)
            else:
                metric.inc(value)

    def _add(self, metric: Metric, made: Any, engine: Hashable, labels: Sequence[str]) -> None:
        """Register `made`, which has all its labels, under the names of its samples."""
        if metric.kind is not Kind.HISTOGRAM:
            self._values[engine, sample(metric.name, *labels)] = made
            return
        for place in range(len(metric.bounds) + 1):
            count_name, sum_name = bucket(metric.name, place, *labels)
            self._ranges[engine, count_name] = _Range(made, sum_name, metric.bounds, place)
