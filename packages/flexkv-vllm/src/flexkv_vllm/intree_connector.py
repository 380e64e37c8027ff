# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM's own connector calls if FlexKV's plugin is not loaded.

vLLM's own `FlexKVConnectorV1` forwards to this class, but passes on neither preemptions nor resets,
and does not hand out the step's orders. So FlexKV stores blocks only once their request has
finished and vLLM holds them, and reads the orders from vLLM's connector. A reset of the cache does
not reach FlexKV; the log says so. Nor does the scheduler side get KV cache groups, or vLLM the
requests whose loads failed: FlexKV refuses models that need either at start.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from flexkv import LayoutError
from flexkv.engine.scheduler.storing import StoreTime
from flexkv_vllm.adapter import Adapter
from flexkv_vllm.compat.patches import (
    complete_shim,
    connectors_here,
    implementation_of,
    kv_cache_config_of,
    step_metadata,
)
from flexkv_vllm.groups import check_groups_behind_shim
from flexkv_vllm.scheduler_calls import SchedulerCalls
from flexkv_vllm.stages import Place

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
    from vllm.v1.core.block_pool import BlockPool

logger = logging.getLogger("flexkv.vllm")


class FlexKVConnectorV1Impl(SchedulerCalls):
    """The methods that vLLM's own connector forwards, in its order, and those that
    `complete_shim` makes it forward."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole) -> None:
        self._vllm_config = vllm_config
        self._adapter = Adapter(vllm_config, StoreTime.FINISH, FlexKVConnectorV1Impl)
        self._connector: KVConnectorBase_V1 | None = None
        complete_shim()
        if role is KVConnectorRole.SCHEDULER:
            self._start_scheduler(None)
            logger.warning(
                "FlexKV runs behind vLLM's own connector, which passes on no resets: lookups still "
                "find old blocks after /reset_prefix_cache?reset_external=true. To make resets "
                "work, let vLLM load the plugin 'flexkv' (see VLLM_PLUGINS)"
            )

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        self._adapter.start_loads(self._step_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are asynchronous."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: Any
    ) -> None:
        """Nothing to save by layer."""

    def wait_for_save(self) -> None:
        self._adapter.start_stores(self._step_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._adapter.get_finished(self._step_metadata())

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if not self._adapter.enabled:
            return
        self._connector = self._find_connector()
        kv_cache_config = kv_cache_config_of(self._connector)
        check_groups_behind_shim(self._vllm_config, kv_cache_config)
        alone = connectors_here() == [self._connector]
        self._adapter.start_worker(kv_caches, kv_cache_config, Place.here(), alone=alone)

    def get_kv_connector_stats(self) -> None:
        """None: vLLM's own connector could neither log nor serve what this returned. The figures
        are dropped, so that none wait for a step."""
        self._adapter.take_stats()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._adapter.take_bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._adapter.step_report(self._step_metadata())

    def has_pending_push_work(self) -> bool:
        return self._adapter.wants_step

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._adapter.bind_pool(gpu_block_pool)

    def _step_metadata(self) -> KVConnectorMetadata | None:
        """The orders of the running step, which vLLM bound to its own connector."""
        return None if self._connector is None else step_metadata(self._connector)

    def _find_connector(self) -> KVConnectorBase_V1:
        """vLLM's connector that forwards to this object.

        Raises:
            LayoutError: vLLM has put it where FlexKV cannot reach it.
        """
        connectors = connectors_here()
        for connector in connectors:
            if implementation_of(connector) is self:
                found: KVConnectorBase_V1 = connector
                return found
        raise LayoutError(
            f"vLLM's own FlexKVConnectorV1 is inside {type(connectors[0]).__name__}, where FlexKV "
            f"cannot read its orders; allowed: alone or in MultiConnector, or with the plugin "
            f"'flexkv' (see VLLM_PLUGINS)"
        )
