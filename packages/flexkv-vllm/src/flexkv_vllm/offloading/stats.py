# SPDX-License-Identifier: Apache-2.0
"""FlexKV's metrics in the form of vLLM's `OffloadingConnector`."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from flexkv import CacheConfig
from flexkv.adapter import info
from flexkv.adapter.metrics import METRICS, Kind, Metric, Samples, sample
from flexkv_vllm.metrics import PREFIX

_VLLMS_OWN = {"query_tokens", "hit_tokens"}
"""A manager is asked for blocks, and does not know for which tokens; vLLM counts those."""

_METRICS = [metric for metric in METRICS if metric.name not in _VLLMS_OWN]
_BY_SAMPLE: dict[str, tuple[Metric, tuple[str, ...]]] = {
    sample(metric.name, *labels): (metric, labels)
    for metric in _METRICS
    for labels in metric.combinations
}


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """The metrics that FlexKV adds to the connector's."""
    kinds = {Kind.COUNTER: OffloadingCounterMetadata, Kind.GAUGE: OffloadingGaugeMetadata}
    definitions: dict[str, OffloadingMetricMetadata] = {
        PREFIX + metric.name: kinds[metric.kind](metric.text, tuple(metric.label_names))
        for metric in _METRICS
    }
    definitions[PREFIX + info.NAME] = OffloadingGaugeMetadata(info.TEXT, info.LABELS)
    return definitions


def connector_stats(
    samples: Samples, settings: CacheConfig | None = None
) -> OffloadingConnectorStats | None:
    """The counts for vLLM; None if there are none. With `settings`, these as well."""
    stats = OffloadingConnectorStats()
    for name, value in samples.items():
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
