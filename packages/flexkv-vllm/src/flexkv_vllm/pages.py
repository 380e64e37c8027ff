# SPDX-License-Identifier: Apache-2.0
"""The layout of vLLM's KV cache tensors, and the part of a block that each rank of each pipeline
stage holds.

The parts of a block lie side by side in its slot: all heads of the first stage's layers, then those
of the next stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.utils import get_pp_indices

from flexkv import KVLayout, LayoutError, TensorView
from flexkv.layout import Sharding

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from flexkv.engine.scheduler.groups import Groups

_BHNC_DIMS = 4
_HEAD_DIM = 1
"""vLLM's tensors have the logical dimensions (block, head, token, content), whatever their order in
memory is. If a backend packs something other than one KV head into an entry of the second dimension
(vllm.v1.kv_cache_interface, `num_head_slots`), its extent is not the number of heads."""


class Place(NamedTuple):
    """A worker's number among the tensor-parallel ranks of its stage, and its stage."""

    rank: int
    stage: int = 0

    @classmethod
    def here(cls) -> Place:
        """The place of this process."""
        return cls(get_tp_group().rank_in_group, get_pp_group().rank_in_group)


@dataclass(frozen=True, slots=True)
class Stages:
    """How vLLM distributes a model's layers over the stages of a pipeline. `layers`: of the whole
    model."""

    count: int
    layers: int

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Stages:
        """The stages of an engine."""
        return cls(
            vllm_config.parallel_config.pipeline_parallel_size,
            vllm_config.model_config.get_total_num_hidden_layers(),
        )

    def total_bytes(self, stage_bytes: int, stage: int) -> int:
        """Bytes of the layers of all stages, if all layers have the same size, by the bytes of one
        stage's layers. Every stage computes the same number without a message from the others."""
        if self.count == 1:
            return stage_bytes
        first, end = get_pp_indices(self.layers, stage, self.count)
        held: int = max(1, end - first)
        return stage_bytes * self.layers // held

    def describe(self, layers: Iterable[str]) -> list[str]:
        """The layers of a stage, for the fingerprint; empty if the stage has all layers."""
        return [] if self.count == 1 else [f"layers of the stage: {', '.join(layers)}"]


def cached_layers(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig | None, groups: Groups
) -> Mapping[str, torch.Tensor]:
    """The tensors of the layers whose blocks are cached; a draft model's may be left out."""
    if kv_cache_config is None:
        return kv_caches
    names = {
        name
        for group in groups.members
        for name in kv_cache_config.kv_cache_groups[group.index].layer_names
    }
    return {name: tensor for name, tensor in kv_caches.items() if name in names}


def describe_pages(
    vllm_config: VllmConfig, kv_caches: Mapping[str, torch.Tensor]
) -> tuple[KVLayout, Sharding]:
    """The pages of this rank, by head if possible, and how ranks divide blocks. Raises LayoutError
    if the tensors cannot be described."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    # With latent attention (MLA) every rank holds the same bytes, which count as one head.
    heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    sharding = Sharding.by_head(heads, ranks)
    local_heads = model.get_num_kv_heads(parallel) if sharding is not None else None
    num_blocks: int | None = vllm_config.cache_config.num_gpu_blocks
    if not num_blocks:
        raise LayoutError("vLLM does not report its number of KV blocks; allowed: 1 or more")
    layout = KVLayout.from_tensors(_views(kv_caches, local_heads, num_blocks), num_blocks)
    if sharding is None or not layout.by_head:
        return layout, Sharding(ranks)
    return layout, sharding


def _views(
    kv_caches: Mapping[str, torch.Tensor], local_heads: int | None, num_blocks: int
) -> Iterable[TensorView]:
    for name, tensor in kv_caches.items():
        by_head = tensor.dim() == _BHNC_DIMS and tensor.shape[_HEAD_DIM] == local_heads
        yield TensorView(
            name,
            tensor.data_ptr(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.element_size(),
            _HEAD_DIM if by_head else None,
            # A pair of keys and values may stand before the blocks.
            page_dim=None if tensor.shape[0] % num_blocks else 0,
        )
