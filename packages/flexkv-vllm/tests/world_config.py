# SPDX-License-Identifier: Apache-2.0
"""Configurations of the engine without a model."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import torch
from kv_pages import BLOCK_TOKENS, HEADS, LAYERS
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from flexkv.tiers.disk.table import RECORD_BYTES

PLUGIN = "flexkv_vllm.connector"
IN_TREE = "vllm.distributed.kv_transfer.kv_connector.v1.flexkv_connector"
DISK_OVERHEAD = 32768
"""Bytes of a disk cache that are not blocks: header, ledger, lock, folder, and rounding."""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": 16,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


def make_kv_cache_config(num_blocks: int, windows: tuple[int, ...] = ()) -> KVCacheConfig:
    shape: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": 4,
        "head_size": 16,
        "dtype": torch.float32,
    }
    specs = [
        FullAttentionSpec(**shape),
        *(SlidingWindowSpec(**shape, sliding_window=window) for window in windows),
    ]
    groups = [
        KVCacheGroupSpec([f"layer{number * LAYERS + i}" for i in range(LAYERS)], spec)
        for number, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def disk_settings(directory: Path, slots: int, slot_bytes: int) -> dict[str, Any]:
    """Settings of a disk tier of `slots` blocks; none of no blocks."""
    if slots == 0:
        return {}
    capacity = slots * (slot_bytes + RECORD_BYTES) + DISK_OVERHEAD
    return {
        "ssd_cache_gb": capacity / (1 << 30),
        "ssd_cache_dir": str(directory / "disk"),
        "ssd_timeout_seconds": 30.0,
    }


def make_config(
    directory: Path,
    cache_bytes: int,
    *,
    ranks: int,
    entry: str,
    block_tokens: int,
    budget: int,
    policy: str,
    max_requests: int,
    async_scheduling: bool = False,
    settings: dict[str, Any] | None = None,
    events: bool = False,
) -> VllmConfig:
    model = directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(LLAMA))
    weights = model / "model.safetensors"
    if not weights.exists():
        weights.write_bytes(b"weights that nobody loads")
    transfer = KVTransferConfig(
        kv_connector="FlexKVConnectorV1",
        kv_role="kv_both",
        kv_connector_module_path=entry,
        engine_id=str(uuid.uuid4()),
        kv_load_failure_policy=policy,
        kv_connector_extra_config={
            "cpu_cache_gb": cache_bytes / (1 << 30),
            "block_tokens": block_tokens,
            "runtime_dir": str(directory / "run"),
            "copy_threads": 2,
            # What is loaded must not depend on how fast this machine is just now.
            "always_load": True,
            **(settings or {}),
        },
    )
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        block_size=BLOCK_TOKENS,
        max_model_len=2048,
        max_num_batched_tokens=budget,
        max_num_seqs=max_requests,
        enforce_eager=True,
        enable_prefix_caching=True,
        async_scheduling=async_scheduling,
        kv_transfer_config=transfer,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=events, publisher="null"),
    ).create_engine_config()
    # Only now: vLLM would look for as many processors.
    config.parallel_config.tensor_parallel_size = ranks
    return config
