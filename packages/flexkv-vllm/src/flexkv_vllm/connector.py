# SPDX-License-Identifier: Apache-2.0
"""The connector that vLLM creates, once in its scheduler and once in every worker.

It translates vLLM's calls and has no state of its own. `Adapter` does the work and catches errors
before they reach vLLM. Errors at start stop the engine on purpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from flexkv.engine.scheduler.storing import StoreTime
from flexkv_vllm.adapter import Adapter
from flexkv_vllm.compat.core import HybridConnector, fences_get_through, transfer_results
from flexkv_vllm.compat.patches import connectors_here
from flexkv_vllm.load_mode import may_load_layerwise
from flexkv_vllm.metrics import FlexKVPromMetrics, FlexKVStats
from flexkv_vllm.scheduler_calls import SchedulerCalls
from flexkv_vllm.stages import Place

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class FlexKVConnectorV1(SchedulerCalls, KVConnectorBase_V1, HybridConnector):
    """vLLM's view of FlexKV. `KVConnectorBase_V1` documents when vLLM calls each method."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        time = StoreTime.STEP if fences_get_through() else StoreTime.FINISH
        self._adapter = Adapter(vllm_config, time, FlexKVConnectorV1)
        if role is KVConnectorRole.SCHEDULER:
            self._start_scheduler(kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        # A cache delivers no KV to another engine: a lost block is a miss.
        return False

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        alone = connectors_here() == [self]
        self._adapter.start_worker(kv_caches, self._kv_cache_config, Place.here(), alone=alone)

    def unregister_kv_caches(self) -> None:
        self._adapter.suspend()

    def restore_kv_caches(self) -> None:
        self._adapter.resume()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._adapter.fence(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._adapter.start_loads(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._adapter.wait_for_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """FlexKV stores whole blocks, after the forward pass."""

    def wait_for_save(self) -> None:
        self._adapter.start_stores(self._connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._adapter.get_finished(self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received = self._adapter.get_finished(self._connector_metadata)
        return transfer_results(sent, received, self._adapter.take_failed_requests())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._adapter.take_bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._adapter.step_report(self._connector_metadata)

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._adapter.bind_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        self._adapter.queued(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        announced = self._adapter.announce(request)
        return self._adapter.finished(request, block_ids), announced

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._adapter.loaded_groups()

    def reset_cache(self) -> bool:
        if self._weights is None:
            return True
        return self._weights.reset(self._adapter.pause, self._adapter.reset)

    def has_pending_push_work(self) -> bool:
        return self._adapter.wants_step

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        return self._adapter.hit_sources(request, num_external_tokens)

    # In the processes that log and serve metrics, without an instance.

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # In a CUDA graph of the whole forward pass no layer can wait.
        return may_load_layerwise(extra_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return FlexKVStats(data={} if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return FlexKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
