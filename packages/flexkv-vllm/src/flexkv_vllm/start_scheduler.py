# SPDX-License-Identifier: Apache-2.0
"""Start of the scheduler side, from vLLM's configuration and the arena of the workers.

All checks run here and raise. After the start, nothing raises into vLLM.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from flexkv import CacheConfig
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.scheduler.engine_cache import EngineCache
from flexkv.engine.scheduler.side import RequestSide
from flexkv.engine.start import (
    attach_session,
    make_cache,
    make_chooser,
    make_recorder,
    operator_access,
)
from flexkv.settings.without_effect import report_without_effect
from flexkv_vllm.events import BlockEvents, make_events
from flexkv_vllm.groups import groups_of, step_blocks
from flexkv_vllm.identity import outlives_process, shares_blocks
from flexkv_vllm.keys import VllmPromptKeys, block_keys
from flexkv_vllm.orders import StepMetadata
from flexkv_vllm.settings import (
    engine_id_of,
    lists_all_blocks,
    load_mode_of,
    options_of,
    request_spans_of,
    steps_behind,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


logger = logging.getLogger("flexkv.vllm")


def make_request_side(
    config: CacheConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig | None,
    boundary: ErrorBoundary,
    *,
    behind_shim: bool,
) -> tuple[RequestSide[StepMetadata], BlockEvents | None]:
    """Attach to the arena of the workers, and open the cache. Returns the scheduler side, which
    owns session and cache and which the caller closes; and what reports the loadable blocks, None
    when nobody listens.

    Args:
        kv_cache_config: None if vLLM does not pass it.
        behind_shim: see `load_mode_of`.

    Raises:
        ArenaError: the workers have created no arena.
        ConfigError, LayoutError: a setting or the model is not allowed in this engine.
        DiskError: a cache directory cannot be used.
    """
    report_without_effect(config)
    transfer = vllm_config.kv_transfer_config
    with contextlib.ExitStack() as undo:
        session = attach_session(config, engine_id_of(vllm_config))
        undo.callback(session.close)
        spec = session.arena.spec
        groups = groups_of(vllm_config, kv_cache_config, spec.format.engine_blocks)
        keeps = config.names_lower_tier and outlives_process(vllm_config)
        if keeps and config.names_shared_store and not shares_blocks(vllm_config):
            config = config.without_shared_stores()
        cache = make_cache(
            config,
            session,
            keeps_blocks=keeps,
            follows_requests=len(groups.members) == 1,  # the policy sees the prompts of one
            step_blocks=(2 + steps_behind(vllm_config)) * step_blocks(vllm_config, groups),
        )
        undo.callback(cache.close)
        mode = load_mode_of(config, vllm_config, groups, behind_shim=behind_shim)
        keys = block_keys(groups)
        shares = outlives_process(vllm_config) and shares_blocks(vllm_config)
        if session.info.service is not None and not shares:
            # Equal keys of another engine may mean other blocks.
            keys.epoch.renew()
        events = make_events(vllm_config, kv_cache_config, cache, keys)
        describe = None if events is None else events.describe
        chooser = make_chooser(
            config,
            mode,
            spec,
            cache,
            on_cores=vllm_config.device_config.device_type == "cpu",
            steps_behind=steps_behind(vllm_config),
        )
        tokens = groups.furthest.block_tokens
        options = options_of(config, vllm_config)
        recorder = make_recorder(config, "vllm", tokens, spec.format.slot_bytes, chooser)
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        side = RequestSide(
            EngineCache(
                session,
                cache,
                groups,
                keys,
                chooser,
                boundary,
                describe,
                recorder,
                options,
                operator_access(config, VllmPromptKeys(algorithm, groups, keys)),
                request_spans_of(vllm_config),
            ),
            StepMetadata,
            load_ahead=transfer is not None and transfer.kv_load_failure_policy == "recompute",
            lists_blocks=lists_all_blocks(vllm_config),
        )
        side.show(config.session_root, "vllm")
        undo.pop_all()
    if cache.info.media and getattr(vllm_config, "shutdown_timeout", None) == 0:
        logger.info(
            "vLLM's --shutdown-timeout is 0: a server ends at once at SIGTERM, and blocks that "
            "wait to be written to disk are lost; --shutdown-timeout 20 gives it time to write them"
        )
    logger.info(
        "FlexKV caches prefixes in host memory: %d blocks of %s tokens, %.2f GiB, fingerprint %s",
        spec.num_slots,
        " or ".join(sorted({str(group.block_tokens) for group in groups.members})),
        spec.total_bytes / (1 << 30),
        session.info.fingerprint,
    )
    return side, events
