# SPDX-License-Identifier: Apache-2.0
"""Start of a rank: from vLLM's configuration and tensors to a worker side.

Everything that can be wrong is found here, and raised: at run time nothing is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from flexkv import CacheConfig
from flexkv.adapter.guard import Edge
from flexkv.adapter.pages import RankPages
from flexkv.adapter.start_worker import start_worker
from flexkv.adapter.worker import WorkerSide
from flexkv.layout import choose_engine_blocks
from flexkv_kernels.torch_device import device_of
from flexkv_vllm.groups import groups_of
from flexkv_vllm.identity import model_identity
from flexkv_vllm.pages import cached_layers, describe_pages
from flexkv_vllm.settings import engine_id_of
from flexkv_vllm.stages import Place, Stages

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def make_worker_side(
    config: CacheConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig | None,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    place: Place,
    edge: Edge,
    alone: bool,
) -> WorkerSide:
    """Describe this rank's pages, meet the other ranks, and start the mover.

    Args:
        config: from `read_settings`.
        vllm_config: of the engine.
        kv_cache_config: of this worker; None if vLLM does not tell it.
        kv_caches: the rank's tensors by layer, kept alive by vLLM until shutdown.
        place: this worker's.
        edge: where run-time errors end.
        alone: see `WorkerSide`.

    Raises:
        FlexKVError: the layout cannot be described or the arena cannot be had.
    """
    groups = groups_of(vllm_config, kv_cache_config)
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
        engine_id_of(vllm_config),
        pages,
        device,
        identity=[*model_identity(vllm_config), groups.describe(), *stages.describe(cached)],
        edge=edge,
        fails_by_request=not groups.plain,
        alone=alone,
    )
