# SPDX-License-Identifier: Apache-2.0
"""Values of metrics as prometheus_client serves them, where no engine's own classes of metrics
collect them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from flexkv.figures.definitions import Kind, Labels, Metric, Samples, bucket, sample

_FAMILIES = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


def families(
    prefix: str,
    label_names: Sequence[str],
    sources: Mapping[Labels, Samples],
    metrics: Iterable[Metric],
) -> list[Family]:
    """The metrics of several sources, under names that begin with `prefix`. `sources` has totals
    and gauges by the values of the labels `label_names`, which tell the sources apart. Values that
    a source does not have are left out."""
    made: list[Family] = []
    for metric in metrics:
        names = [*label_names, *metric.label_names]
        family: Any = _FAMILIES[metric.kind](prefix + metric.name, metric.text, labels=names)
        for (own, samples), labels in itertools.product(sources.items(), metric.combinations):
            if metric.kind is Kind.HISTOGRAM:
                _add_histogram(family, metric, [*own, *labels], labels, samples)
            elif (value := samples.get(sample(metric.name, *labels))) is not None:
                family.add_metric([*own, *labels], value)
        if family.samples:
            made.append(family)
    return made


def _add_histogram(
    family: HistogramMetricFamily,
    metric: Metric,
    values: Sequence[str],
    labels: Labels,
    samples: Samples,
) -> None:
    """Prometheus counts the values up to each bound, and FlexKV those of each range."""
    names = [bucket(metric.name, place, *labels) for place in range(len(metric.bounds) + 1)]
    if not any(count in samples for count, _ in names):
        return
    below, ranges = 0.0, []
    for bound, (count, _) in zip((*metric.bounds, math.inf), names, strict=True):
        below += samples.get(count, 0.0)
        ranges.append((str(bound) if bound < math.inf else "+Inf", below))
    family.add_metric(values, ranges, sum(samples.get(total, 0.0) for _, total in names))
