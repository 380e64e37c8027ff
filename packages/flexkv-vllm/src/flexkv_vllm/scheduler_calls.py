# SPDX-License-Identifier: Apache-2.0
"""The calls of vLLM's scheduler that all connectors of FlexKV forward in the same way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from flexkv_vllm.adapter import Adapter
from flexkv_vllm.weights import WeightWatch

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class SchedulerCalls:
    """Base class of the connectors. They set `_adapter`, which receives the calls."""

    _adapter: Adapter
    _weights: WeightWatch | None = None

    def _start_scheduler(self, kv_cache_config: KVCacheConfig | None) -> None:
        """Start the adapter in the scheduler's process. See `Adapter.start_scheduler`."""
        self._adapter.start_scheduler(kv_cache_config)
        if self._adapter.enabled:
            self._weights = WeightWatch(self._adapter.weights_changed)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._adapter.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._adapter.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._adapter.build_orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._adapter.step_ended(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        announced = self._adapter.announce(request)
        return self._adapter.finished(request, [block_ids]), announced

    # Both sides.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._adapter.take_stats()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._adapter.take_events()

    def shutdown(self) -> None:
        self._adapter.shutdown()
