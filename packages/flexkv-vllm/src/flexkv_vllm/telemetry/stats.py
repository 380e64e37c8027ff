# SPDX-License-Identifier: Apache-2.0
"""What FlexKV counts for vLLM: in its log line and at `/metrics`.

vLLM takes a container of new counts from each worker and from the scheduler side in every step,
adds them up, and hands them to the processes that log and serve metrics. Those import this module,
and need no device for it.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

Samples = dict[str, float]
"""Values by `sample` name. Counters hold what was added since the last time, gauges what is now."""


class Kind(enum.Enum):
    COUNTER = "counter"
    """Only grows."""
    GAUGE = "gauge"
    """The last value counts."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric and all label values that it can have.

    Attributes:
        name: what follows `vllm:flexkv_`.
        kind: see `Kind`.
        text: for whoever reads `/metrics`; gives the unit.
        labels: label name to its values, beside vLLM's own labels; all combinations, or those of
            `only`.
        only: the combinations that exist, if not all.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    only: tuple[tuple[str, ...], ...] = ()

    @property
    def label_names(self) -> list[str]:
        return [name for name, _ in self.labels]

    @property
    def combinations(self) -> list[tuple[str, ...]]:
        return list(self.only or itertools.product(*(values for _, values in self.labels)))


def sample(name: str, *labels: str) -> str:
    """The name of one value of a metric, for instance "hit_tokens:disk"."""
    return ":".join((name, *labels))


_TIERS = (("tier", ("host", "disk")),)
_LINKS = (("link", ("device", "disk")), ("direction", ("load", "store", "read", "write")))
_WAYS = (("device", "load"), ("device", "store"), ("disk", "read"), ("disk", "write"))
CAUSES = ("load", "store", "read", "damaged", "stalled", "write", "internal")
REASONS = ("short", "slow", "awaited")
"""The values of `Left`, which the processes that log and serve metrics do not import."""

METRICS = (
    Metric(
        "query_tokens",
        Kind.COUNTER,
        "Tokens that vLLM did not have itself and that were looked for in the tier.",
        _TIERS,
    ),
    Metric("hit_tokens", Kind.COUNTER, "Tokens loaded that were found in the tier.", _TIERS),
    Metric(
        "left_tokens",
        Kind.COUNTER,
        "Tokens that could have been loaded and were computed all the same, by reason.",
        (("reason", REASONS),),
    ),
    Metric(
        "copied_bytes",
        Kind.COUNTER,
        "Bytes copied over the link, of all ranks together.",
        _LINKS,
        _WAYS,
    ),
    Metric(
        "copy_seconds",
        Kind.COUNTER,
        "Seconds that the copies over the link took, each counted by itself, waiting not included.",
        _LINKS,
        _WAYS,
    ),
    Metric("stored_blocks", Kind.COUNTER, "FlexKV blocks stored in the tier.", _TIERS),
    Metric(
        "dropped_blocks",
        Kind.COUNTER,
        "FlexKV blocks not stored in the tier for want of room, queue or write budget.",
        _TIERS,
    ),
    Metric("evicted_blocks", Kind.COUNTER, "FlexKV blocks evicted from the tier.", _TIERS),
    Metric(
        "failures",
        Kind.COUNTER,
        "What went wrong, by cause; none of it reached a request but as a miss or a failed load.",
        (("cause", CAUSES),),
    ),
    Metric("resets", Kind.COUNTER, "Times that all blocks were forgotten on demand."),
    Metric(
        "ignored_parameters",
        Kind.COUNTER,
        "Parameters of requests (kv_transfer_params) that were not understood.",
    ),
    Metric(
        "refused_pin_blocks",
        Kind.COUNTER,
        "FlexKV blocks not pinned because half of the host memory is.",
    ),
    Metric("blocks", Kind.GAUGE, "FlexKV blocks in the tier that can be loaded.", _TIERS),
    Metric("capacity_blocks", Kind.GAUGE, "FlexKV blocks that the tier has room for.", _TIERS),
    Metric("pinned_blocks", Kind.GAUGE, "FlexKV blocks pinned in host memory."),
    Metric(
        "queue_length",
        Kind.GAUGE,
        "Under way or waiting: transfers to and from the device, blocks to and from the disk.",
        (("link", ("device", "disk")),),
    ),
    Metric("queue_bytes", Kind.GAUGE, "Bytes that wait for the disks."),
)
PREFIX = "vllm:flexkv_"
_GAUGES = frozenset(
    sample(metric.name, *labels)
    for metric in METRICS
    if metric.kind is Kind.GAUGE
    for labels in metric.combinations
)


@dataclass
class FlexKVStats(KVConnectorStats):
    """vLLM's container; `data` is `Samples`."""

    def reset(self) -> None:
        self.data: Samples = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what `other`, of another rank or a later time, has."""
        for name, value in other.data.items():
            self.data[name] = value if name in _GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: what happened since the last one."""
        line: dict[str, int | float] = {}
        queries = self._sum("query_tokens", "host")
        if queries:
            hits = self._sum("hit_tokens", "host") + self._sum("hit_tokens", "disk")
            line["FlexKV hit rate (%)"] = round(100 * hits / queries, 1)
        for tier in ("host", "disk"):
            _put(line, f"{tier} hits (tokens)", self._sum("hit_tokens", tier))
        _put(line, "left hits (tokens)", sum(self._sum("left_tokens", why) for why in REASONS))
        for way in _WAYS:
            size, seconds = self._sum("copied_bytes", *way), self._sum("copy_seconds", *way)
            _put(line, f"{' '.join(way)} (MB)", round(size / 1e6, 1))
            if seconds:
                line[f"{' '.join(way)} (GB/s per copy)"] = round(size / seconds / 1e9, 2)
        for tier in ("host", "disk"):
            _put(line, f"{tier} evictions (blocks)", self._sum("evicted_blocks", tier))
            _put(line, f"{tier} drops (blocks)", self._sum("dropped_blocks", tier))
        _put(line, "failures", sum(self._sum("failures", cause) for cause in CAUSES))
        return line

    def is_empty(self) -> bool:
        return not self.data

    def _sum(self, name: str, *labels: str) -> float:
        return self.data.get(sample(name, *labels), 0)


def _put(line: dict[str, int | float], name: str, value: float) -> None:
    if value:
        line[name] = value


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
        self._values: dict[tuple[int, str], Any] = {}
        for metric in METRICS:
            made = self._make(metric, metric_types, labelnames)
            for engine, values in per_engine_labelvalues.items():
                for labels in metric.combinations:
                    name = sample(metric.name, *labels)
                    self._values[engine, name] = made.labels(*values, *labels)

    def observe(self, transfer_stats_data: Samples, engine_idx: int = 0) -> None:
        """Take in what `FlexKVStats` of an engine has summed up."""
        for name, value in transfer_stats_data.items():
            metric = self._values.get((engine_idx, name))
            if metric is None:
                continue
            if name in _GAUGES:
                metric.set(value)
            else:
                metric.inc(value)

    @staticmethod
    def _make(metric: Metric, metric_types: dict[type, type], labelnames: list[str]) -> Any:
        names = labelnames + metric.label_names
        if metric.kind is Kind.COUNTER:
            return metric_types[Counter](PREFIX + metric.name, metric.text, names)
        return metric_types[Gauge](
            PREFIX + metric.name, metric.text, names, multiprocess_mode="mostrecent"
        )
