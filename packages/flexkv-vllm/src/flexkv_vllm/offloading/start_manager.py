# SPDX-License-Identifier: Apache-2.0
"""Start of the scheduler side of an offloading spec. All checks run here and raise."""

from __future__ import annotations

import contextlib
import logging

from vllm.v1.kv_offload.config import OffloadingConfig

from flexkv import CacheConfig
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.choice.chooser import LoadMode
from flexkv.engine.epoch_cache import of_epochs
from flexkv.engine.start import (
    attach_session,
    make_cache,
    make_chooser,
    make_recorder,
)
from flexkv.settings.without_effect import report_without_effect
from flexkv_vllm.compat.patches import follow_connector, offer_only_what_was_computed
from flexkv_vllm.offloading.events import OffloadedBlocks
from flexkv_vllm.offloading.manager import FlexKVOffloadingManager
from flexkv_vllm.offloading.prompts import OffloadedPrompts
from flexkv_vllm.offloading.start_prompts import make_prompts

logger = logging.getLogger("flexkv.vllm")

_STEP_TOKENS, _STEP_REQUESTS = 16_384, 256
"""The most tokens and requests of a step by vLLM's defaults, which does not tell them to an
offloading spec."""
_STEPS = 4
"""Steps whose stores are under way: vLLM copies a step's blocks with the next step, and schedules
one ahead. Not tuned."""

_IGNORED = {
    "load_mode": "vLLM's OffloadingConnector loads before the step that computes a request",
}


def make_manager(
    config: OffloadingConfig, settings: CacheConfig, boundary: ErrorBoundary
) -> FlexKVOffloadingManager:
    """Attach to the arena of the workers, and open the cache.

    Args:
        config: vLLM's configuration of offloading.
        settings: FlexKV's settings.
        boundary: ends, counts and logs run-time errors.

    Returns:
        The manager, which the caller shuts down. It owns the session and the cache.

    Raises:
        ArenaError: the workers have created no arena.
        ConfigError: the settings of `control_port` are wrong.
        DiskError: a cache directory cannot be used.
    """
    report_without_effect(settings, _IGNORED)
    offer_only_what_was_computed()
    follow_connector(_prompts_of)
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
        cache = of_epochs(cache, alone=not session.info.durable)
        undo.callback(cache.close)
        tokens = sizes[0]
        chooser = make_chooser(settings, LoadMode.ASYNC, spec, cache)
        recorder = make_recorder(settings, "vllm", tokens, spec.format.slot_bytes, chooser)
        prompts = make_prompts(
            settings,
            cache,
            boundary,
            chooser,
            recorder,
            tokens=tokens,
            fingerprint=session.info.fingerprint,
        )
        events = None
        if config.enable_kv_cache_events:
            events = OffloadedBlocks(cache, config.cache.tokens_per_hash, chunk)
        manager = FlexKVOffloadingManager(
            cache,
            session.close,
            boundary,
            events,
            settings=settings,
            prompts=prompts,
        )
        name = session.info.fingerprint
        prompts.figures.report_health(settings.session_root, "vllm", name)
        undo.pop_all()
    logger.info(
        "FlexKV serves OffloadingConnector from host memory: %d blocks, %.2f GiB, fingerprint %s",
        spec.num_slots,
        spec.total_bytes / (1 << 30),
        session.info.fingerprint,
    )
    return manager


def _prompts_of(manager: object) -> OffloadedPrompts | None:
    # The engine may have another spec's manager.
    return manager.prompts if isinstance(manager, FlexKVOffloadingManager) else None
