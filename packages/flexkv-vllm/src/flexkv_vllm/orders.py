# SPDX-License-Identifier: Apache-2.0
"""Orders and reports of a step, as vLLM carries them."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from flexkv.engine.orders import StepOrders, StepReport


@dataclass(slots=True)
class StepMetadata(StepOrders, KVConnectorMetadata):
    """The orders of one step, from vLLM's scheduler to its workers."""


@dataclass(slots=True)
class WorkerReport(StepReport, KVConnectorWorkerMetadata):
    """What a worker reports of a step; vLLM aggregates the reports of all ranks."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The report of the slowest rank counts."""
        assert isinstance(other, WorkerReport)
        rates = [rate for rate in (self.load_rate, other.load_rate) if rate]
        return WorkerReport(
            max(self.number, other.number),
            min(rates, default=0.0),
            max(self.proves, other.proves),
        )
