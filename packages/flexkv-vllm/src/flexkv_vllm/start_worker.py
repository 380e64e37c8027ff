# SPDX-License-Identifier: Apache-2.0
"""Start of a rank's worker side, from vLLM's configuration and tensors.

All checks run here and raise. After the start, nothing raises into vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from flexkv import CacheConfig
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.worker.pages import RankPages
from flexkv.engine.worker.start_worker import start_worker
from flexkv.engine.worker.worker import WorkerSide
from flexkv.layout import choose_engine_blocks
from flexkv_kernels.torch_device import device_of
from flexkv_vllm.groups import groups_of
from flexkv_vllm.identity import model_identity, served_model
from flexkv_vllm.pages import Place, Stages, cached_layers, describe_pages
from flexkv_vllm.settings import emits_events, engine_id_of

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
    boundary: ErrorBoundary,
    alone: bool,
) -> WorkerSide:
    """Describe this rank's pages, meet the other ranks, and start the mover. Raises FlexKVError if
    the layout is not supported, or the arena cannot be opened.

    Args:
        kv_cache_config: of this worker; None if vLLM does not pass it.
        kv_caches: the rank's tensors by layer; vLLM keeps them alive until shutdown.
        alone: see `WorkerSide`.
    """
    groups = groups_of(vllm_config, kv_cache_config)
    device = device_of(kv_caches)
    cached = cached_layers(kv_caches, kv_cache_config, groups)
    layout, sharding = describe_pages(vllm_config, cached)
    stages = Stages.of(vllm_config)
    engine_blocks = 1
    if groups.plain:
        tokens = groups.members[0].engine_block_tokens
        engine_blocks = choose_engine_blocks(
            tokens,
            stages.total_bytes(layout.block_bytes * sharding.parts, place.stage),
            # Routers know vLLM's blocks, and events announce FlexKV's.
            config.block_tokens or (tokens if emits_events(vllm_config) else None),
        )
    pages = RankPages(layout, engine_blocks, sharding, place.rank, place.stage, stages.count)
    return start_worker(
        config,
        engine_id_of(vllm_config),
        pages,
        device,
        identity=[
            *model_identity(vllm_config),
            f"groups: {groups.describe()}",
            *stages.describe(cached),
        ],
        model=served_model(vllm_config),
        boundary=boundary,
        fails_by_request=not groups.plain,
        alone=alone,
    )
