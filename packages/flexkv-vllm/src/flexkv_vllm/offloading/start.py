# SPDX-License-Identifier: Apache-2.0
"""Start of a rank with an offloading spec. All checks run here and raise."""

from __future__ import annotations

import functools

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
from flexkv_vllm.support import check_late_loads, check_launcher, check_pooling


def make_worker(
    config: OffloadingConfig,
    settings: CacheConfig,
    kv_caches: CanonicalKVCaches,
    boundary: ErrorBoundary,
) -> FlexKVOffloadingWorker:
    """Describe this rank's pages, meet the other ranks, and start the movers. vLLM keeps the
    tensors alive until shutdown.

    Raises:
        FlexKVError: the layout is not supported, or the arena cannot be opened.
    """
    vllm_config = worker_config()
    check_launcher(vllm_config)
    check_pooling(vllm_config)
    check_late_loads(vllm_config)
    layouts = describe_groups(kv_caches)
    device = device_of({str(i): each.tensor for i, each in enumerate(kv_caches.tensors)})
    rank, chunk = config.parallel.rank, config.cache.blocks_per_chunk
    name, identity = name_blocks(config, vllm_config, layouts)
    others_read = settings.names_lower_tier or settings.service is not None
    shard = Shard(
        rank,
        name,
        chunk,
        max(layout.shard_bytes(chunk) for layout in layouts),
        numa_node=device.numa_node,
        durable=not others_read or is_durable(vllm_config),
        identity=tuple(identity),
    )
    session, groups = open_rank(
        settings,
        config.engine_id,
        shard,
        config.parallel.world_size,
        functools.partial(start_movers, device, layouts, chunk),
        model=served_model(vllm_config),
        pool_blocks=max(layout.num_blocks for layout in layouts),
    )
    worker = FlexKVOffloadingWorker(session, groups, rank, device, boundary)
    follow_sleep(worker)
    return worker
