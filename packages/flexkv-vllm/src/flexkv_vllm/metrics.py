# SPDX-License-Identifier: Apache-2.0
"""FlexKV's figures in vLLM's log line and at its `/metrics`.

vLLM takes a container of new counts from each worker and from the scheduler side in every step,
adds them up, and hands them to the processes that log and serve metrics. Those import this module,
and need no device for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from flexkv import CacheConfig, load_config
from flexkv.adapter import info
from flexkv.adapter.metrics import GAUGES, METRICS, Kind, Metric, Samples, add, sample, summary

PREFIX = "vllm:flexkv_"


@dataclass
class FlexKVStats(KVConnectorStats):
    """vLLM's container; `data` is `Samples`."""

    def reset(self) -> None:
        self.data: Samples = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what `other`, of another rank or a later time, has."""
        add(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: what happened since the last one."""
        return summary(self.data)

    def is_empty(self) -> bool:
        return not self.data


class FlexKVPromMetrics(KVConnectorPromMetrics):
    """FlexKV's metrics of all engines that a frontend serves. All values exist from the start, so
    that a rate over the first one is right."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        transfer = vllm_config.kv_transfer_config
        config = load_config(transfer.kv_connector_extra_config if transfer else None)
        self._values: dict[tuple[int, str], Any] = {}
        for metric in METRICS:
            made = self._make(metric, metric_types, labelnames)
            for engine, values in per_engine_labelvalues.items():
                for labels in metric.combinations:
                    name = sample(metric.name, *labels)
                    self._values[engine, name] = made.labels(*values, *labels)
        self._make_info(config, metric_types, labelnames, per_engine_labelvalues)

    def observe(self, transfer_stats_data: Samples, engine_idx: int = 0) -> None:
        """Take in what `FlexKVStats` of an engine has summed up."""
        for name, value in transfer_stats_data.items():
            metric = self._values.get((engine_idx, name))
            if metric is None:
                continue
            if name in GAUGES:
                metric.set(value)
            else:
                metric.inc(value)

    @staticmethod
    def _make(metric: Metric, metric_types: dict[type, type], labelnames: list[str]) -> Any:
        names = labelnames + metric.label_names
        if metric.kind is Kind.COUNTER:
            return metric_types[Counter](PREFIX + metric.name, metric.text, names)
        return _gauge(metric_types, metric.name, metric.text, names)

    @staticmethod
    def _make_info(
        config: CacheConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        made = _gauge(metric_types, info.NAME, info.TEXT, [*labelnames, *info.LABELS])
        for values in per_engine_labelvalues.values():
            made.labels(*values, *info.info_labels(config)).set(1)


def _gauge(metric_types: dict[type, type], name: str, text: str, labels: list[str]) -> Any:
    return metric_types[Gauge](PREFIX + name, text, labels, multiprocess_mode="mostrecent")
