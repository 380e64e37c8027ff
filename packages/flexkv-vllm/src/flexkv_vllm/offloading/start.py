# SPDX-License-Identifier: Apache-2.0
"""Start of a rank with an offloading spec: the pages of each KV cache group, from the tensors that
vLLM hands over, and the name of the blocks that are made of them. All checks run here and raise."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Sequence

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches
from vllm.v1.kv_offload.config import OffloadingConfig

from flexkv import CacheConfig, KVLayout, LayoutError, TensorView
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.open_rank import open_rank
from flexkv.engine.weights import digest
from flexkv.layout import Sharding, block_identity, fingerprint
from flexkv.session import Shard
from flexkv_kernels.torch_device import device_of
from flexkv_vllm.identity import model_identity, outlives_process, served_model
from flexkv_vllm.offloading.worker import FlexKVOffloadingWorker, start_movers
from flexkv_vllm.sleep import follow_sleep
from flexkv_vllm.support import check_late_loads, check_launcher, check_pooling

logger = logging.getLogger("flexkv.vllm")


def make_worker(
    config: OffloadingConfig,
    settings: CacheConfig,
    kv_caches: CanonicalKVCaches,
    boundary: ErrorBoundary,
) -> FlexKVOffloadingWorker:
    """Describe this rank's pages, meet the other ranks, and start the movers. vLLM keeps the
    tensors alive until shutdown. Raises FlexKVError if the layout is not supported, or the arena
    cannot be opened."""
    vllm_config = _worker_config()
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


def _worker_config() -> VllmConfig:
    """vLLM's configuration, in a worker during its setup; vLLM does not pass it to a spec. Raises
    LayoutError if vLLM does not provide it."""
    try:
        return get_current_vllm_config()
    except AssertionError:
        raise LayoutError(
            "vLLM sets no current configuration while it registers KV caches; allowed: a version "
            "that does (0.31 to 0.33)"
        ) from None


def describe_groups(kv_caches: CanonicalKVCaches) -> list[KVLayout]:
    """The pages of each group on this rank, each block's one after another as they lie in memory.

    Groups may share tensors: vLLM gives each block to one group at a time. Raises LayoutError if
    the pages cannot be described.
    """
    if not kv_caches.tensors:
        raise LayoutError("vLLM registered no KV cache tensors; allowed: 1 or more")
    num_blocks = kv_caches.tensors[0].tensor.shape[0]
    return [
        KVLayout.from_tensors(_views(kv_caches, number, refs), num_blocks)
        for number, refs in enumerate(kv_caches.group_data_refs)
    ]


def name_blocks(
    config: OffloadingConfig, vllm_config: VllmConfig, layouts: Sequence[KVLayout]
) -> tuple[str, list[str]]:
    """The fingerprint of these blocks and its parts. It differs from that of FlexKV's own
    connector, whose keys and formats are different."""
    parts = [
        "connector: offloading",
        *model_identity(vllm_config),
        # The order of heads and tokens within a page, which its bytes do not show.
        f"layout: {getattr(config, 'kv_cache_layout', None)}",
        f"VLLM_KV_CACHE_LAYOUT: {os.environ.get('VLLM_KV_CACHE_LAYOUT')}",
        f"tokens of a hash: {config.cache.tokens_per_hash}",
    ]
    for number, (group, layout) in enumerate(zip(config.groups, layouts, strict=True)):
        geometry = digest([" ".join(map(str, extents)) for extents in layout.geometry])
        parts.append(f"group {number}: {group.tokens_per_block} tokens, {geometry}")
    chunk = config.cache.blocks_per_chunk
    identity = block_identity(parts, layouts[0], chunk, Sharding(config.parallel.world_size))
    return fingerprint(identity), identity


def is_durable(vllm_config: VllmConfig) -> bool:
    """Whether the next process can use blocks of that name on disk. If not, logs why."""
    if vllm_config.lora_config is not None:
        logger.warning(
            "OffloadingConnector does not report when the weights of a LoRA adapter change; no "
            "blocks are kept on disk or shared. FlexKV's own connector, FlexKVConnectorV1, can "
            "keep them"
        )
        return False
    return outlives_process(vllm_config)


def _views(
    kv_caches: CanonicalKVCaches, group: int, refs: Sequence[CanonicalKVCacheRef]
) -> Iterator[TensorView]:
    for ref in refs:
        tensor = kv_caches.tensors[ref.tensor_idx].tensor
        name = f"{ref.tensor_idx} of group {group}"
        if tensor.dim() != 2 or tensor.element_size() != 1 or tensor.stride(1) != 1:
            raise LayoutError(
                f"KV cache tensor {name} has shape {tuple(tensor.shape)}, strides "
                f"{tensor.stride()} and {tensor.element_size()} bytes an element; allowed: pages "
                f"of bytes, one row for each block"
            )
        if ref.page_size_bytes > tensor.shape[1]:
            raise LayoutError(
                f"KV cache tensor {name} has rows of {tensor.shape[1]} bytes for pages of "
                f"{ref.page_size_bytes}; allowed: rows as long or longer"
            )
        yield TensorView(
            name,
            tensor.data_ptr(),
            (tensor.shape[0], ref.page_size_bytes),
            (tensor.stride(0), 1),
            1,
            page_dim=0,
        )
