# SPDX-License-Identifier: Apache-2.0
"""The offloading spec that vLLM creates, once in its scheduler and once in every worker."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.start import attach_session, make_cache
from flexkv.settings.without_effect import report_without_effect
from flexkv_vllm.compat.core import warn_if_newer
from flexkv_vllm.offloading.manager import ArenaBlocks, FlexKVOffloadingManager
from flexkv_vllm.offloading.offload_settings import read_settings
from flexkv_vllm.offloading.start import make_worker
from flexkv_vllm.offloading.stats import metric_definitions

logger = logging.getLogger("flexkv.vllm")

_STEP_TOKENS, _STEP_REQUESTS = 16_384, 256
"""The most tokens and requests of a step by vLLM's defaults, which does not tell them to an
offloading spec."""
_STEPS = 4
"""Steps whose stores are under way: vLLM copies a step's blocks with the next step, and schedules
one ahead."""

_UNSEEN = "vLLM's OffloadingConnector shows FlexKV no requests and no steps"
_IGNORED = {
    "load_mode": "vLLM's OffloadingConnector loads before the step that computes a request",
    "min_load_tokens": _UNSEEN,
    "always_load": "under vLLM's OffloadingConnector FlexKV loads every hit",
    "trace": _UNSEEN,
    "control_port": _UNSEEN,
}


class FlexKVOffloadingSpec(OffloadingSpec):
    """vLLM's view of FlexKV under `OffloadingConnector`. Errors at start stop the engine on
    purpose; later none are raised."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._settings = read_settings(config)
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
            enabled = self._settings.enable
            self._manager = self._make_manager() if enabled else IdleManager()
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

    def _make_manager(self) -> OffloadingManager:
        """Attach to the arena of the workers, and open the cache.

        Raises:
            ArenaError: the workers have created no arena.
            DiskError: a cache directory cannot be used.
        """
        config, settings = self.config, self._settings
        warn_if_newer()
        report_without_effect(settings, _IGNORED)
        session = attach_session(settings, config.engine_id)
        spec, chunk = session.arena.spec, config.cache.blocks_per_chunk
        with contextlib.ExitStack() as undo:
            undo.callback(session.close)
            sizes = [group.tokens_per_block * chunk for group in config.groups]
            cache = make_cache(
                settings,
                session,
                keeps_blocks=session.info.durable,
                follows_requests=len(sizes) == 1,  # the policy sees the prompts of one
                step_blocks=_STEPS * sum(_STEP_TOKENS // size + _STEP_REQUESTS for size in sizes),
            )
            undo.callback(cache.close)
            manager = FlexKVOffloadingManager(
                cache,
                session.close,
                self._boundary,
                settings=settings,
                groups=len(sizes),
                fingerprint=session.info.fingerprint,
                shares=session.info.durable,
                events=config.enable_kv_cache_events,
            )
            undo.pop_all()
        logger.info(
            "FlexKV serves OffloadingConnector from host memory: %d blocks, %.2f GiB, fingerprint "
            "%s",
            spec.num_slots,
            spec.total_bytes / (1 << 30),
            session.info.fingerprint,
        )
        return manager


class IdleManager(OffloadingManager):
    """In place of FlexKV's if the user has turned it off: finds no blocks and stores none."""

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.MISS

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        return ArenaBlocks()  # vLLM loads nothing that was a miss

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        return PrepareStoreOutput([], ArenaBlocks(), [])


class IdleWorker(OffloadingWorker):
    """As `IdleManager`: gets no jobs."""

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return False

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        return False

    def get_finished(self) -> list[TransferResult]:
        return []

    def wait(self, job_ids: set[int]) -> None:
        """There is nothing to wait for."""
