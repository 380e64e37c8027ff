# SPDX-License-Identifier: Apache-2.0
"""Start of an engine with an offloading spec: everything that can be wrong is found here, and
raised."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.config import OffloadingConfig

from flexkv import CacheConfig, KVLayout
from flexkv.adapter.guard import Edge
from flexkv.adapter.pages import Device
from flexkv.adapter.start import closed_on_error, make_cache, open_rank
from flexkv.host.arena import Arena
from flexkv.host.session import Shard, attach
from flexkv.layout import PlacedPlane
from flexkv_kernels.torch_device import device_of
from flexkv_vllm.compat.core import warn_if_newer
from flexkv_vllm.compat.offloading import offer_only_what_was_computed, worker_config
from flexkv_vllm.identity import outlives_process
from flexkv_vllm.offloading.manager import FlexKVOffloadingManager
from flexkv_vllm.offloading.pages import describe_groups, name_blocks
from flexkv_vllm.offloading.worker import FlexKVOffloadingWorker, GroupMover
from flexkv_vllm.support import check_launcher

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("flexkv.vllm")


def make_worker(
    config: OffloadingConfig, settings: CacheConfig, kv_caches: CanonicalKVCaches, edge: Edge
) -> FlexKVOffloadingWorker:
    """Describe this rank's pages, meet the other ranks, and start the movers.

    Raises:
        FlexKVError: the pages cannot be described or the arena cannot be had.
    """
    vllm_config = worker_config()
    check_launcher(vllm_config)
    layouts = describe_groups(kv_caches)
    tensors = {str(i): entry.tensor for i, entry in enumerate(kv_caches.tensors)}
    device = device_of(tensors)
    rank, chunk = config.parallel.rank, config.cache.blocks_per_chunk
    shard = Shard(
        rank,
        name_blocks(config, vllm_config, layouts),
        chunk,
        max(layout.shard_bytes(chunk) for layout in layouts),
        numa_node=device.numa_node,
        durable=settings.ssd_cache_gb is None or _is_durable(vllm_config),
    )

    def start(arena: Arena, threads: int) -> list[GroupMover]:
        return _make_movers(device, layouts, chunk, arena, threads)

    ranks = config.parallel.world_size
    session, groups = open_rank(settings, config.engine_id, shard, ranks, start)
    return FlexKVOffloadingWorker(session, groups, rank, device, edge)


def make_manager(
    config: OffloadingConfig, settings: CacheConfig, edge: Edge
) -> FlexKVOffloadingManager:
    """Attach to the arena that the workers made.

    Raises:
        ArenaError: they made none.
        DiskError: a cache directory cannot be used.
    """
    warn_if_newer()
    offer_only_what_was_computed()
    session = attach(settings.session_root, config.engine_id)
    with closed_on_error(session):
        cache = make_cache(settings, session, keeps_on_disk=session.info.durable)
    spec = session.arena.spec
    logger.info(
        "FlexKV serves OffloadingConnector from host memory: %d blocks, %.2f GiB, fingerprint %s",
        spec.num_slots,
        spec.total_bytes / (1 << 30),
        session.info.fingerprint,
    )
    return FlexKVOffloadingManager(cache, session, edge, config.enable_kv_cache_events, settings)


def _make_movers(
    device: Device, layouts: Sequence[KVLayout], chunk: int, arena: Arena, threads: int
) -> list[GroupMover]:
    """A mover for each group; groups that have the same pages share one."""
    movers: dict[tuple[PlacedPlane, ...], GroupMover] = {}
    groups = []
    for layout in layouts:
        planes = tuple(layout.place(chunk))
        if planes not in movers:
            stored = range(len(planes))
            mover = device.make_mover(planes, stored, layout.num_blocks, arena, threads)
            movers[planes] = GroupMover(mover, layout.head_bytes)
        groups.append(movers[planes])
    return groups


def _is_durable(vllm_config: VllmConfig) -> bool:
    """Whether blocks on disk mean the same to the next process. If not, logs why."""
    if vllm_config.lora_config is not None:
        logger.warning(
            "OffloadingConnector does not report when the weights of a LoRA adapter change; no "
            "blocks are kept on disk. FlexKV's own connector, FlexKVConnectorV1, can keep them"
        )
        return False
    return outlives_process(vllm_config)
