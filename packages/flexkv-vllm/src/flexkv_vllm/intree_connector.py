# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM's own connector calls if FlexKV's plugin is not loaded.

vLLM's own `FlexKVConnectorV1` forwards to this class, but shows its scheduler side no KV cache
groups, and does not report to vLLM which requests' loads failed: FlexKV refuses models that need
either at start.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from flexkv_vllm.compat.patches import complete_shim
from flexkv_vllm.connector import FlexKVConnectorV1
from flexkv_vllm.groups import check_groups_behind_shim

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("flexkv.vllm")


class FlexKVConnectorV1Impl(FlexKVConnectorV1):
    """FlexKV's connector behind vLLM's own. It gets the calls that vLLM's forwards, and those that
    `complete_shim` makes it forward."""

    _is_behind_shim = True

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole) -> None:
        complete_shim()
        unknown: Any = None
        super().__init__(vllm_config, role, kv_cache_config=unknown)
        if role is KVConnectorRole.SCHEDULER:
            logger.warning(
                "FlexKV runs behind vLLM's own connector, which passes on no metrics, and serves "
                "models of full attention only. To change that, let vLLM load the plugin 'flexkv' "
                "(see VLLM_PLUGINS)"
            )

    def register_kv_caches(
        self, kv_caches: dict[str, torch.Tensor], kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        """As of any connector. `kv_cache_config`: that of vLLM's own connector in this worker."""
        if self._config.enable and kv_cache_config is not None:
            check_groups_behind_shim(self._vllm_config, kv_cache_config)
            self._kv_cache_config = kv_cache_config
        super().register_kv_caches(kv_caches)

    def get_kv_connector_stats(self) -> None:
        """None: vLLM's own connector could neither log nor serve what this returned. The figures
        are dropped, so that none wait for a step."""
        super().get_kv_connector_stats()
