# SPDX-License-Identifier: Apache-2.0
"""The offloading spec that vLLM creates, once in its scheduler and once in every worker."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from flexkv.engine.boundary import ErrorBoundary
from flexkv_vllm.compat.core import warn_if_newer
from flexkv_vllm.offloading.idle import IdleManager, IdleWorker
from flexkv_vllm.offloading.manager import FlexKVOffloadingManager
from flexkv_vllm.offloading.offload_settings import read_settings
from flexkv_vllm.offloading.start import make_worker
from flexkv_vllm.offloading.start_manager import make_manager
from flexkv_vllm.offloading.stats import metric_definitions
from flexkv_vllm.settings import request_spans_of
from flexkv_vllm.weights import WeightWatch

logger = logging.getLogger("flexkv.vllm")


class FlexKVOffloadingSpec(OffloadingSpec):
    """vLLM's view of FlexKV under `OffloadingConnector`. Errors at start stop the engine on
    purpose; later none are raised."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._settings = read_settings(config, FlexKVOffloadingManager)
        self._boundary = ErrorBoundary()
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None
        if not self._settings.enable:
            logger.info("FlexKV is turned off (ENABLE_FLEXKV or the setting 'enable')")

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            if self._settings.enable:
                warn_if_newer()
                manager = make_manager(self.config, self._settings, self._boundary)
                manager.prompts.spans_of_engine = request_spans_of
                manager.choose_reset = WeightWatch(manager.weights_changed).reset
                self._manager = manager
            else:
                self._manager = IdleManager()
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            enabled = self._settings.enable
            self._worker = (
                make_worker(self.config, self._settings, kv_caches, self._boundary)
                if enabled
                else IdleWorker()
            )
        return self._worker
