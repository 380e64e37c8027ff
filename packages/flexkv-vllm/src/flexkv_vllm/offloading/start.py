# SPDX-License-Identifier: Apache-2.0
"""Start of a rank with an offloading spec. All checks run here and raise."""

from __future__ import annotations

import functools
import logging

from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.config import OffloadingConfig

from flexkv import CacheConfig
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.open_rank import open_rank
from flexkv.session import Shard
from flexkv_kernels.torch_device import device_of
from flexkv_vllm.compat.offloading import worker_config
from flexkv_vllm.identity import served_model
from flexkv_vllm.offloading.pages import describe_groups, is_durable, name_blocks
from flexkv_vllm.offloading.worker import FlexKVOffloadingWorker, start_movers
from flexkv_vllm.sleep import follow_sleep
from flexkv_vllm.support import check_launcher, check_pooling

logger = logging.getLogger("flexkv.vllm")


def make_worker(
    config: OffloadingConfig,
    settings: CacheConfig,
    kv_caches: CanonicalKVCaches,
    boundary: ErrorBoundary,
) -> FlexKVOffloadingWorker:
    """Describe this rank's pages, meet the other ranks, and start the movers.

    Args:
        config: vLLM's configuration of offloading.
        settings: FlexKV's settings.
        kv_caches: the rank's tensors; vLLM keeps them alive until shutdown.
        boundary: ends, counts and logs run-time errors.

    Returns:
        The worker, which the caller shuts down.

    Raises:
        FlexKVError: the layout is not supported, or the arena cannot be opened.
    """
    vllm_config = worker_config()
    check_launcher(vllm_config)
    check_pooling(vllm_config)
    layouts = describe_groups(kv_caches)
    tensors = {str(i): entry.tensor for i, entry in enumerate(kv_caches.tensors)}
    device = device_of(tensors)
    rank, chunk = config.parallel.rank, config.cache.blocks_per_chunk
    name, identity = name_blocks(config, vllm_config, layouts)
    shard = Shard(
        rank,
        name,
        chunk,
        max(layout.shard_bytes(chunk) for layout in layouts),
        numa_node=device.numa_node,
        durable=not _lets_others_read(settings) or is_durable(vllm_config),
        identity=tuple(identity),
    )
    start = functools.partial(start_movers, device, layouts, chunk)
    ranks = config.parallel.world_size
    blocks = max(layout.num_blocks for layout in layouts)
    session, groups = open_rank(
        settings,
        config.engine_id,
        shard,
        ranks,
        start,
        model=served_model(vllm_config),
        pool_blocks=blocks,
    )
    worker = FlexKVOffloadingWorker(session, groups, rank, device, boundary)
    follow_sleep(worker)
    return worker


def _lets_others_read(settings: CacheConfig) -> bool:
    """Whether other processes may find blocks of this one."""
    return settings.names_lower_tier or settings.service is not None
