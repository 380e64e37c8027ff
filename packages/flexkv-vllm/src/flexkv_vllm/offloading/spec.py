# SPDX-License-Identifier: Apache-2.0
"""The offloading spec that vLLM creates, once in its scheduler and once in every worker, its
settings, and what it refuses at start."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from flexkv import CacheConfig, ConfigError, LayoutError
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.start import attach_session, make_cache
from flexkv.settings import configure_logging
from flexkv.settings.without_effect import report_without_effect
from flexkv_vllm.compat.core import warn_if_newer
from flexkv_vllm.compat.patches import is_made_by_another
from flexkv_vllm.offloading.manager import ArenaBlocks, FlexKVOffloadingManager
from flexkv_vllm.offloading.start import make_worker
from flexkv_vllm.offloading.stats import metric_definitions
from flexkv_vllm.settings import check_engine, load_extra

logger = logging.getLogger("flexkv.vllm")

_VLLMS = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
        "sync_load_budget_bytes",
    }
)
"""Keys of `kv_connector_extra_config` that vLLM reads itself."""

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
    purpose; later none are raised. Raises FlexKVError if a setting, vLLM's version or its parallel
    configuration is not allowed."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._settings = load_settings(config.extra_config)
        configure_logging(self._settings)
        check_engine(self._settings, FlexKVOffloadingManager)
        if self._settings.enable:
            _check_parallelism(config)
            _check_blocks(config, self._settings)
            _check_alone()
        else:
            logger.info("FlexKV is turned off (ENABLE_FLEXKV or the setting 'enable')")
        self._boundary = ErrorBoundary()
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._manager = self._make_manager() if self._settings.enable else IdleManager()
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = (
                make_worker(self.config, self._settings, kv_caches, self._boundary)
                if self._settings.enable
                else IdleWorker()
            )
        return self._worker

    def _make_manager(self) -> OffloadingManager:
        """Attach to the arena of the workers, and open the cache. Raises ArenaError if the workers
        have created no arena; DiskError if a cache directory cannot be used."""
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


def load_settings(extra_config: Mapping[str, object]) -> CacheConfig:
    """FlexKV's settings, some of them beside vLLM's own in `kv_connector_extra_config`. Raises
    ConfigError if a setting is not allowed."""
    return load_extra({key: value for key, value in extra_config.items() if key not in _VLLMS})


def _check_parallelism(config: OffloadingConfig) -> None:
    parallel = config.parallel
    sizes = {
        "--pipeline-parallel-size": parallel.pp_size,
        "--decode-context-parallel-size": parallel.dcp_size,
        "--prefill-context-parallel-size": parallel.pcp_size,
    }
    for flag, size in sizes.items():
        if size != 1:
            raise LayoutError(
                f"vLLM's {flag} is {size}; allowed: 1 (--tensor-parallel-size is free)"
            )


def _check_blocks(config: OffloadingConfig, settings: CacheConfig) -> None:
    chunk = config.cache.blocks_per_chunk
    tokens = sorted({group.tokens_per_block * chunk for group in config.groups})
    if settings.block_tokens is not None and tokens != [settings.block_tokens]:
        raise ConfigError(
            f"block_tokens is {settings.block_tokens}, but the blocks of vLLM's "
            f"OffloadingConnector have {', '.join(map(str, tokens))} tokens; allowed: no "
            f"block_tokens, and block_size or blocks_per_chunk in kv_connector_extra_config"
        )
    if chunk > 1 and len(config.groups) > 1:
        # vLLM may free some of a chunk's blocks in a sliding window before it stores the others,
        # and later loads the chunk as if it were whole.
        raise ConfigError(
            f"blocks_per_chunk is {chunk} for a model with {len(config.groups)} KV cache groups; "
            f"allowed: 1"
        )


def _check_alone() -> None:
    """Beside another connector, whose loads may fail within a step, FlexKV would store what was
    computed on wrong bytes: vLLM does not report that to an offloading manager."""
    if is_made_by_another():
        raise ConfigError(
            "FlexKVOffloadingSpec is inside MultiConnector, where vLLM does not report to it which "
            "loads of other connectors failed; allowed: OffloadingConnector alone, or "
            "FlexKVConnectorV1 inside MultiConnector"
        )


class IdleManager(OffloadingManager):
    """In place of FlexKV's if the user has turned it off: finds no blocks and stores none."""

    def on_new_request(self, *_: Any, **__: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, *_: Any, **__: Any) -> LookupResult:
        return LookupResult.MISS

    def prepare_load(self, *_: Any, **__: Any) -> LoadStoreSpec:
        return ArenaBlocks()  # vLLM loads nothing that was a miss

    def prepare_store(self, *_: Any, **__: Any) -> PrepareStoreOutput | None:
        return PrepareStoreOutput([], ArenaBlocks(), [])


class IdleWorker(OffloadingWorker):
    """As `IdleManager`: gets no jobs."""

    def submit_store(self, *_: Any, **__: Any) -> bool:
        return False

    def submit_load(self, *_: Any, **__: Any) -> bool:
        return False

    def get_finished(self) -> list[TransferResult]:
        return []

    def wait(self, job_ids: set[int]) -> None:
        """There is nothing to wait for."""
