# SPDX-License-Identifier: Apache-2.0
"""The pages of each KV cache group, from the tensors that vLLM hands to an offloading spec, and the
name of the blocks that are made of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches
from vllm.v1.kv_offload.config import OffloadingConfig

from flexkv import KVLayout, LayoutError, TensorView
from flexkv.engine.weights import digest
from flexkv.layout import Sharding, block_identity, fingerprint
from flexkv_vllm.identity import model_identity, outlives_process

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("flexkv.vllm")


def describe_groups(kv_caches: CanonicalKVCaches) -> list[KVLayout]:
    """The pages of each group on this rank, each block's one after another as they lie in memory.

    Groups may share tensors: vLLM gives each block to one group at a time.

    Raises:
        LayoutError: the pages cannot be described.
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
