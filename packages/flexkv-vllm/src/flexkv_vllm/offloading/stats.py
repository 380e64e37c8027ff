# SPDX-License-Identifier: Apache-2.0
"""FlexKV's metrics in the form of vLLM's `OffloadingConnector`."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from flexkv import CacheConfig
from flexkv.adapter import info
from flexkv.adapter.metrics import METRICS, Kind, Metric, Samples, bucket, sample
from flexkv.histogram import representative
from flexkv_vllm.metrics import PREFIX

_UNKNOWN = {"query_tokens", "hit_tokens", "saved_prefill_seconds"}
"""A manager is asked for blocks, and does not know for which tokens; vLLM counts those. Nor does it
see how long a step takes."""

_METRICS = [metric for metric in METRICS if metric.name not in _UNKNOWN]
_BY_SAMPLE: dict[str, tuple[Metric, tuple[str, ...]]] = {
    sample(metric.name, *labels): (metric, labels)
    for metric in _METRICS
    for labels in metric.combinations
}
_RANGES: dict[str, tuple[Metric, tuple[str, ...], int, str]] = {
    count_name: (metric, labels, place, sum_name)
    for metric in _METRICS
    if metric.kind is Kind.HISTOGRAM
    for labels in metric.combinations
    for place in range(len(metric.bounds) + 1)
    for count_name, sum_name in (bucket(metric.name, place, *labels),)
}
"""By the name of the sample that counts the values of one range."""


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """The metrics that FlexKV adds to the connector's."""
    definitions = {PREFIX + metric.name: _definition(metric) for metric in _METRICS}
    definitions[PREFIX + info.NAME] = OffloadingGaugeMetadata(info.TEXT, info.LABELS)
    return definitions


def connector_stats(
    samples: Samples, settings: CacheConfig | None = None
) -> OffloadingConnectorStats | None:
    """The counts for vLLM; None if there are none. With `settings`, these as well."""
    stats = OffloadingConnectorStats()
    for name, value in samples.items():
        if name in _RANGES:
            _observe(stats, name, int(value), samples)
            continue
        metric, labels = _BY_SAMPLE.get(name, (None, ()))
        if metric is None:
            continue
        if metric.kind is Kind.COUNTER:
            stats.increase_counter(PREFIX + metric.name, value, labels)
        else:
            stats.set_gauge(PREFIX + metric.name, value, labels)
    if settings is not None:
        stats.set_gauge(PREFIX + info.NAME, 1, info.info_labels(settings))
    return None if stats.is_empty() else stats


def _definition(metric: Metric) -> OffloadingMetricMetadata:
    labels = tuple(metric.label_names)
    if metric.kind is Kind.HISTOGRAM:
        return OffloadingHistogramMetadata(metric.text, labels, metric.bounds)
    kinds = {Kind.COUNTER: OffloadingCounterMetadata, Kind.GAUGE: OffloadingGaugeMetadata}
    return kinds[metric.kind](metric.text, labels)


def _observe(
    stats: OffloadingConnectorStats, count_name: str, count: int, samples: Samples
) -> None:
    """Add the values of one range of a histogram. vLLM takes single values only."""
    metric, labels, place, sum_name = _RANGES[count_name]
    value = representative(metric.bounds, place, count, samples[sum_name])
    for _ in range(count):
        stats.observe_histogram(PREFIX + metric.name, value, labels)
