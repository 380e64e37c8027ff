# SPDX-License-Identifier: Apache-2.0
"""Start of an engine: from vLLM's configuration and tensors to a scheduler and a worker side.

Everything that can be wrong is found here, and raised: at run time nothing is.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from flexkv import (
    POLICIES,
    CacheConfig,
    KVCache,
    KVLayout,
    LayoutError,
    Session,
    Shard,
    TensorView,
    attach,
    choose_engine_blocks,
    configure_logging,
    fingerprint,
    join,
    lead,
    load_config,
    plan_arena,
)
from flexkv_kernels import CpuMover
from flexkv_vllm.compat import check_version
from flexkv_vllm.edge import Edge
from flexkv_vllm.scheduler import BlockSizes, SchedulerSide, StoreTime
from flexkv_vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("flexkv.vllm")


def read_settings(vllm_config: VllmConfig) -> CacheConfig:
    """FlexKV's settings for this engine.

    Raises:
        FlexKVError: a setting, vLLM's version or its parallel configuration is not allowed.
    """
    transfer = vllm_config.kv_transfer_config
    config = load_config(transfer.kv_connector_extra_config if transfer else None)
    configure_logging(config)
    if config.enable:
        check_version(config.allow_untested_engine)
        _check_parallelism(vllm_config)
    return config


def make_worker_side(
    config: CacheConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig | None,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    rank: int,
    edge: Edge,
) -> WorkerSide:
    """Describe this rank's pages, meet the other ranks, and start the mover.

    Args:
        config: from `read_settings`.
        vllm_config: of the engine.
        kv_cache_config: of this worker; None if vLLM does not tell it.
        kv_caches: the rank's tensors by layer, kept alive by vLLM until shutdown.
        rank: this worker's among the tensor-parallel ones.
        edge: where run-time errors end.

    Raises:
        FlexKVError: the layout cannot be described or the arena cannot be had.
    """
    if kv_cache_config is not None:
        _check_groups(kv_cache_config)
    layout = KVLayout.from_tensors(_views(kv_caches), _num_blocks(vllm_config))
    ranks = vllm_config.parallel_config.tensor_parallel_size
    engine_blocks = choose_engine_blocks(
        vllm_config.cache_config.block_size, layout.block_bytes * ranks, config.block_tokens
    )
    shard = Shard(
        rank,
        fingerprint(_model_identity(vllm_config), layout, engine_blocks),
        engine_blocks,
        engine_blocks * layout.block_bytes,
    )
    cpus = _copy_cpus()
    threads = config.copy_threads or min(4, len(cpus))
    with _running_on(cpus):
        session = _meet(config, _engine_id(vllm_config), shard, ranks, threads)
        arena = session.arena
        try:
            mover = CpuMover(
                layout.planes, layout.num_blocks, arena.address, arena.spec.total_bytes, threads
            )
        except ValueError as error:
            session.close()
            raise LayoutError(f"the mover refuses this engine's pages: {error}") from None
    return WorkerSide(session, mover, rank, layout.block_bytes, edge)


def make_scheduler_side(
    config: CacheConfig, vllm_config: VllmConfig, store_time: StoreTime, edge: Edge
) -> tuple[SchedulerSide, Session]:
    """Attach to the arena that the workers made.

    Raises:
        ArenaError: they made none.
    """
    session = attach(config.session_root, _engine_id(vllm_config))
    spec = session.arena.spec
    sizes = BlockSizes(vllm_config.cache_config.block_size, spec.format.engine_blocks)
    cache = KVCache(session.arena, POLICIES[config.eviction_policy]())
    side = SchedulerSide(cache, sizes, store_time, vllm_config.speculative_config is not None, edge)
    logger.info(
        "FlexKV caches prefixes in host memory: %d blocks of %d tokens, %.2f GiB, fingerprint %s",
        spec.num_slots,
        sizes.block_tokens,
        spec.total_bytes / (1 << 30),
        session.info.fingerprint,
    )
    return side, session


def _meet(config: CacheConfig, engine_id: str, shard: Shard, ranks: int, threads: int) -> Session:
    if shard.rank > 0:
        session = join(config.session_root, engine_id, shard)
        session.arena.populate(threads)
        return session
    return lead(
        config.session_root,
        engine_id,
        shard,
        ranks,
        lambda block_format: plan_arena(block_format, config.cpu_cache_gb),
        threads=threads,
    )


def _copy_cpus() -> set[int]:
    """Processors that copies may run on: this process's, and those of the one that started it.

    vLLM's CPU build pins a worker, and with it all threads it starts, to the processors that
    compute. Copies there would take turns with the forward pass while others are idle.
    """
    return os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid())


@contextlib.contextmanager
def _running_on(cpus: set[int]) -> Iterator[None]:
    """Let this thread run on `cpus`: threads that it starts meanwhile keep them."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _check_parallelism(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise LayoutError(f"vLLM's {name} is {size}; allowed: 1 (tensor_parallel_size is free)")


def _check_groups(kv_cache_config: KVCacheConfig) -> None:
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1 or "Mamba" in kinds[0]:
        raise LayoutError(
            f"the model's KV cache has the groups {kinds}; allowed: one group of attention layers "
            f"(vLLM's --disable-hybrid-kv-cache-manager makes one of sliding windows)"
        )


def _views(kv_caches: Mapping[str, torch.Tensor]) -> Iterable[TensorView]:
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError(
                f"KV cache {name!r} is a {type(tensor).__name__}; allowed: one tensor per layer"
            )
        if tensor.device.type != "cpu":
            raise LayoutError(
                f"KV cache {name!r} is on device {tensor.device}; allowed: cpu "
                f"(the installed flexkv-kernels copy between host memory only)"
            )
        yield TensorView(
            name,
            tensor.data_ptr(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.element_size(),
        )


def _num_blocks(vllm_config: VllmConfig) -> int:
    num_blocks: int | None = vllm_config.cache_config.num_gpu_blocks
    if not num_blocks:
        raise LayoutError("vLLM does not say how many KV blocks it has; allowed: 1 or more")
    return num_blocks


def _engine_id(vllm_config: VllmConfig) -> str:
    transfer = vllm_config.kv_transfer_config
    engine_id: str | None = None if transfer is None else transfer.engine_id
    if not engine_id:
        raise LayoutError("vLLM gave the connector no engine_id; allowed: any text")
    return engine_id


def _model_identity(vllm_config: VllmConfig) -> list[str]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return [
        "vllm",
        str(model.model),
        str(model.revision),
        str(model.dtype),
        str(model.quantization),
        str(cache.cache_dtype),
        str(cache.block_size),
        str(cache.prefix_caching_hash_algo),
        str(vllm_config.parallel_config.tensor_parallel_size),
    ]
