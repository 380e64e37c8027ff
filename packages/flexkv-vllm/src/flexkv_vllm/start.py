# SPDX-License-Identifier: Apache-2.0
"""Start of an engine: from vLLM's configuration and tensors to a scheduler and a worker side.

Everything that can be wrong is found here, and raised: at run time nothing is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from flexkv import CacheConfig, ConfigError, KVCache, LayoutError, load_config
from flexkv.adapter.fills import StoreTime
from flexkv.adapter.groups import Groups
from flexkv.adapter.guard import Edge
from flexkv.adapter.keys import BlockKeys
from flexkv.adapter.load_choice import LoadChooser, LoadMode
from flexkv.adapter.pages import RankPages
from flexkv.adapter.start import closed_on_error, make_cache
from flexkv.adapter.start_worker import start_worker
from flexkv.adapter.worker import WorkerSide
from flexkv.config import configure_logging
from flexkv.config_sources import log_ignored_variables
from flexkv.host.session import Session, attach
from flexkv.layout import choose_engine_blocks
from flexkv_kernels.torch_device import device_of
from flexkv_vllm.compat.core import (
    binds_pool,
    check_version,
    fails_by_request,
    tells_states,
    warn_if_newer,
)
from flexkv_vllm.compat.events import group_traits
from flexkv_vllm.events import BlockEvents
from flexkv_vllm.groups import read_groups
from flexkv_vllm.identity import model_identity, outlives_process, request_stamp
from flexkv_vllm.pages import cached_layers, describe_pages
from flexkv_vllm.scheduler_side import SchedulerSide
from flexkv_vllm.stages import Place, Stages
from flexkv_vllm.support import check_attention, check_parallelism, check_stages

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("flexkv.vllm")


def flush_seconds(vllm_config: VllmConfig) -> float:
    """How long blocks that wait may be written when the engine ends: half of the time that vLLM
    gives it, which is also for the requests under way and for the workers."""
    timeout: float = getattr(vllm_config, "shutdown_timeout", 0)
    return timeout / 2


def read_settings(vllm_config: VllmConfig) -> CacheConfig:
    """FlexKV's settings for this engine.

    Raises:
        FlexKVError: a setting, vLLM's version or its parallel configuration is not allowed.
    """
    transfer = vllm_config.kv_transfer_config
    config = load_config(transfer.kv_connector_extra_config if transfer else None)
    configure_logging(config)
    log_ignored_variables()
    if config.enable:
        check_version(config.allow_untested_engine)
        check_parallelism(vllm_config)
        check_attention(vllm_config)
    return config


def make_worker_side(
    config: CacheConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig | None,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    place: Place,
    edge: Edge,
) -> WorkerSide:
    """Describe this rank's pages, meet the other ranks, and start the mover.

    Args:
        config: from `read_settings`.
        vllm_config: of the engine.
        kv_cache_config: of this worker; None if vLLM does not tell it.
        kv_caches: the rank's tensors by layer, kept alive by vLLM until shutdown.
        place: this worker's.
        edge: where run-time errors end.

    Raises:
        FlexKVError: the layout cannot be described or the arena cannot be had.
    """
    groups = _read_groups(vllm_config, kv_cache_config)
    device = device_of(kv_caches)
    cached = cached_layers(kv_caches, kv_cache_config, groups)
    layout, sharding = describe_pages(vllm_config, cached)
    stages = Stages.of(vllm_config)
    engine_blocks = 1
    if groups.plain:
        engine_blocks = choose_engine_blocks(
            groups.members[0].engine_block_tokens,
            stages.total_bytes(layout.block_bytes * sharding.parts, place.stage),
            config.block_tokens,
        )
    pages = RankPages(layout, engine_blocks, sharding, place.rank, place.stage, stages.count)
    return start_worker(
        config,
        _engine_id(vllm_config),
        pages,
        device,
        identity=[*model_identity(vllm_config), groups.describe(), *stages.describe(cached)],
        edge=edge,
        fails_by_request=not groups.plain,
    )


def make_scheduler_side(
    config: CacheConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig | None,
    store_time: StoreTime,
    edge: Edge,
) -> tuple[SchedulerSide, Session]:
    """Attach to the arena that the workers made.

    Args:
        config: from `read_settings`.
        vllm_config: of the engine.
        kv_cache_config: of the engine; None if vLLM does not tell it.
        store_time: when to store.
        edge: where run-time errors end.

    Raises:
        ArenaError: they made none.
        DiskError: a cache directory cannot be used.
    """
    warn_if_newer()
    session = attach(config.session_root, _engine_id(vllm_config))
    spec = session.arena.spec
    groups = _read_groups(vllm_config, kv_cache_config, spec.format.engine_blocks)
    keys = BlockKeys(groups, request_stamp)
    with closed_on_error(session):
        cache = make_cache(config, session, keeps_on_disk=_keeps_on_disk(config, vllm_config))
    if cache.has_lower_tiers and getattr(vllm_config, "shutdown_timeout", None) == 0:
        logger.info(
            "vLLM's --shutdown-timeout is 0: a server ends at once at SIGTERM, and blocks that "
            "wait to be written to disk are lost; --shutdown-timeout 20 gives it time to write them"
        )
    transfer = vllm_config.kv_transfer_config
    chooser = LoadChooser(
        load_mode_of(config, vllm_config, groups, store_time),
        config.min_load_tokens,
        config.always_load,
        sum(spec.format.shard_bytes),
        spec.ranks,
        on_cores=vllm_config.device_config.device_type == "cpu",
        loading=lambda: cache.loading_blocks,
    )
    side = SchedulerSide(
        cache,
        groups,
        keys=keys,
        store_time=store_time,
        load_ahead=transfer is not None and transfer.kv_load_failure_policy == "recompute",
        chooser=chooser,
        edge=edge,
        events=_make_events(vllm_config, kv_cache_config, cache, keys),
    )
    logger.info(
        "FlexKV caches prefixes in host memory: %d blocks of %s tokens, %.2f GiB, fingerprint %s",
        spec.num_slots,
        " or ".join(sorted({str(group.block_tokens) for group in groups.members})),
        spec.total_bytes / (1 << 30),
        session.info.fingerprint,
    )
    return side, session


def _make_events(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig | None,
    cache: KVCache,
    keys: BlockKeys,
) -> BlockEvents | None:
    """What tells KV events; None if the user did not turn them on in vLLM."""
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return None
    return BlockEvents(
        cache,
        keys,
        has_own_names=vllm_config.lora_config is not None or not keys.are_hashes,
        traits=group_traits(kv_cache_config),
    )


def _keeps_on_disk(config: CacheConfig, vllm_config: VllmConfig) -> bool:
    return config.ssd_cache_gb is not None and outlives_process(vllm_config)


def check_groups_behind_shim(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None
) -> None:
    """Refuse a model whose KV cache is not what the scheduler side assumes behind vLLM's own
    connector, which does not show it.

    Raises:
        LayoutError: it is not.
    """
    groups = _read_groups(vllm_config, kv_cache_config)
    if groups.plain and groups.members == _read_groups(vllm_config, None).members:
        return
    kinds = [f"{group.reach.value}, {group.engine_block_tokens} tokens" for group in groups.members]
    raise LayoutError(
        f"the model's KV cache has groups ({'; '.join(kinds)}) that vLLM's own FlexKVConnectorV1 "
        f"does not pass on to FlexKV; allowed behind it: one group of full attention in blocks of "
        f"{vllm_config.cache_config.block_size} tokens. For all others, let vLLM load the plugin "
        f"'flexkv' (see VLLM_PLUGINS)"
    )


def _read_groups(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None, engine_blocks: int = 1
) -> Groups:
    groups = read_groups(
        kv_cache_config,
        vllm_config.cache_config.block_size,
        engine_blocks,
        model_layers=vllm_config.model_config.get_total_num_hidden_layers(),
        fails_by_request=fails_by_request(),
        tells_states=tells_states(),
    )
    check_stages(vllm_config, groups)
    return groups


def may_load_layerwise(extra_config: Mapping[str, object]) -> bool:
    """Whether the settings in force let loads run beside the forward that needs them.

    Raises:
        ConfigError: a setting is not allowed.
    """
    return LoadMode(load_config(extra_config).load_mode) is not LoadMode.ASYNC


def load_mode_of(
    config: CacheConfig, vllm_config: VllmConfig, groups: Groups, store_time: StoreTime
) -> LoadMode:
    """How this engine's blocks are loaded: as the setting says, where it has a choice.

    Raises:
        ConfigError: the setting is not allowed in this engine.
    """
    mode = LoadMode(config.load_mode)
    if mode is LoadMode.ASYNC or not groups.plain:
        return LoadMode.ASYNC
    if vllm_config.scheduler_config.async_scheduling:
        # With the next step under way vLLM cannot take back what it computed on a load that failed.
        raise ConfigError(
            f"load_mode is {config.load_mode!r}, but vLLM schedules steps before the last one has "
            f"ended; allowed: async; with vLLM's --no-async-scheduling also layerwise and auto"
        )
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        # As above: the first stage has begun the next step by then.
        raise ConfigError(
            f"load_mode is {config.load_mode!r}, but vLLM's pipeline_parallel_size is {stages}: "
            f"steps begin before the last one has ended; allowed: async, or one stage"
        )
    if not binds_pool():
        raise ConfigError(
            f"load_mode is {config.load_mode!r}, but this vLLM does not let a connector discard "
            f"blocks after a failed load; allowed: async (with vLLM 0.22 or newer all modes)"
        )
    if store_time is StoreTime.FINISH:
        raise ConfigError(
            f"load_mode is {config.load_mode!r}, but vLLM's own connector, behind which FlexKV "
            f"runs, lets CUDA graphs skip its layers; allowed: async, or any mode with the plugin "
            f"'flexkv' (see VLLM_PLUGINS)"
        )
    return mode


def _engine_id(vllm_config: VllmConfig) -> str:
    transfer = vllm_config.kv_transfer_config
    engine_id: str | None = None if transfer is None else transfer.engine_id
    if not engine_id:
        raise LayoutError("vLLM gave the connector no engine_id; allowed: any text")
    return engine_id
