# SPDX-License-Identifier: Apache-2.0
"""FlexKV's figures in vLLM's log line and at its `/metrics`.

In every step vLLM takes a container of new counts from each worker and from the scheduler side,
adds them up, and passes them to the processes that log and serve metrics. These processes import
this module, which needs no device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from flexkv.figures.definitions import Samples, add
from flexkv.figures.exposition import Exposition, summary
from flexkv_vllm.settings import load_extra

PREFIX = "vllm:flexkv_"


@dataclass
class FlexKVStats(KVConnectorStats):
    """vLLM's container; `data` is `Samples`."""

    def reset(self) -> None:
        self.data: Samples = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the values of `other`, which is of another rank or of a later time."""
        add(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: the changes since the previous line."""
        return summary(self.data)

    def is_empty(self) -> bool:
        return not self.data


class FlexKVPromMetrics(KVConnectorPromMetrics):
    """FlexKV's metrics of all engines that a frontend serves."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        transfer = vllm_config.kv_transfer_config
        self._exposition = Exposition(
            PREFIX,
            metric_types[Counter],
            functools.partial(metric_types[Gauge], multiprocess_mode="mostrecent"),
            metric_types[Histogram],
            label_names=labelnames,
            engines=per_engine_labelvalues,
            config=load_extra(transfer.kv_connector_extra_config if transfer else None),
        )

    def observe(self, transfer_stats_data: Samples, engine_idx: int = 0) -> None:
        """Add the sums that `FlexKVStats` of an engine has collected."""
        self._exposition.observe(transfer_stats_data, engine_idx)
