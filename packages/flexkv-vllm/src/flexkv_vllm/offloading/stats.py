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
from flexkv.figures.definitions import METRICS, Kind, Metric, Samples
from flexkv.figures.exposition import INFO_LABELS, INFO_NAME, INFO_TEXT, info_labels, values_of
from flexkv_vllm.metrics import PREFIX


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """The metrics that FlexKV adds to the connector's."""
    definitions = {PREFIX + metric.name: _definition(metric) for metric in METRICS}
    definitions[PREFIX + INFO_NAME] = OffloadingGaugeMetadata(INFO_TEXT, INFO_LABELS)
    return definitions


def connector_stats(
    samples: Samples, settings: CacheConfig | None = None
) -> OffloadingConnectorStats | None:
    """The counts for vLLM; None if there are none. With `settings`, these as well."""
    stats = OffloadingConnectorStats()
    for metric, labels, value, times in values_of(samples):
        name = PREFIX + metric.name
        if metric.kind is Kind.COUNTER:
            stats.increase_counter(name, value, labels)
        elif metric.kind is Kind.GAUGE:
            stats.set_gauge(name, value, labels)
        else:
            for _ in range(times):  # vLLM takes single values only
                stats.observe_histogram(name, value, labels)
    if settings is not None:
        stats.set_gauge(PREFIX + INFO_NAME, 1, info_labels(settings))
    return None if stats.is_empty() else stats


def _definition(metric: Metric) -> OffloadingMetricMetadata:
    if metric.kind is Kind.HISTOGRAM:
        return OffloadingHistogramMetadata(metric.text, metric.label_names, metric.bounds)
    kinds = {Kind.COUNTER: OffloadingCounterMetadata, Kind.GAUGE: OffloadingGaugeMetadata}
    return kinds[metric.kind](metric.text, metric.label_names)
