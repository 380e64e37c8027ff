# SPDX-License-Identifier: Apache-2.0
"""Configurations of the engine without a model."""

from __future__ import annotations

import dataclasses
import enum
import json
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from kv_pages import BLOCK_TOKENS, HEAD_BYTES, HEADS, LAYERS
from patience import PATIENCE_SECONDS
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from flexkv.tiers.disk.table import RECORD_BYTES

PLUGIN = "flexkv_vllm.connector"
IN_TREE = "vllm.distributed.kv_transfer.kv_connector.v1.flexkv_connector"
OFFLOADING = "flexkv_vllm.offloading"
IN_MULTI = f"MultiConnector:{IN_TREE}"
"""vLLM's own connector inside its MultiConnector."""
BESIDE_OTHER = f"OtherConnector:{PLUGIN}"
IN_TREE_BESIDE_OTHER = f"OtherConnector:{IN_TREE}"
"""Behind that of `other_connector` in vLLM's MultiConnector."""
DISK_TIMEOUT_SECONDS = 2 * PATIENCE_SECONDS
"""A disk hangs for as long only where a test makes it."""
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
    "max_position_embeddings": 1 << 17,
    "torch_dtype": "float32",
}


class Drafts(enum.Enum):
    """Where vLLM keeps the KV of a draft model."""

    NONE = "nowhere"
    OWN_GROUP = "in a group of its own"
    SHARED_GROUP = "with the model's full attention"


DRAFT_LAYER = f"draft.layers.{LAYERS}.attn"


def make_kv_cache_config(
    num_blocks: int, windows: tuple[int, ...] = (), ranks: int = 1, drafts: Drafts = Drafts.NONE
) -> KVCacheConfig:
    """The pages as `make_pages` makes them: K and V of a token and head, 8 bytes each."""
    shape: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": max(1, HEADS // ranks),
        "head_size": HEAD_BYTES // 2,
        "dtype": torch.int8,
    }
    specs = [
        FullAttentionSpec(**shape),
        *(SlidingWindowSpec(**shape, sliding_window=window) for window in windows),
    ]
    groups = [
        KVCacheGroupSpec([f"layer{number * LAYERS + i}" for i in range(LAYERS)], spec)
        for number, spec in enumerate(specs)
    ]
    if drafts is Drafts.OWN_GROUP:
        groups.append(KVCacheGroupSpec([DRAFT_LAYER], FullAttentionSpec(**shape)))
    elif drafts is Drafts.SHARED_GROUP:
        groups[0].layer_names.append(DRAFT_LAYER)
    if drafts is not Drafts.NONE:
        next(group for group in groups if DRAFT_LAYER in group.layer_names).is_eagle_group = True
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=_make_tensors(groups), kv_cache_groups=groups
    )


def layers_of_stage(names: Iterable[str], stage: int, stages: int) -> list[str]:
    """Of the layers of all groups those that a stage of a pipeline holds."""
    held = range(*get_pp_indices(LAYERS, stage, stages))
    return [name for name in names if int(name.rpartition("layer")[2]) % LAYERS in held]


def config_of_stage(config: KVCacheConfig, stage: int, stages: int) -> KVCacheConfig:
    """What vLLM tells the workers of a stage."""
    if stages == 1:
        return config
    groups = [
        dataclasses.replace(group, layer_names=layers_of_stage(group.layer_names, stage, stages))
        for group in config.kv_cache_groups
    ]
    return dataclasses.replace(config, kv_cache_groups=groups)


def _make_tensors(groups: list[KVCacheGroupSpec]) -> list[Any]:
    """A tensor for each layer, and those of further groups on top: where vLLM up to 0.28 looks for
    who shares which memory. Later ones see that in the pages themselves."""
    if "shared_by" not in KVCacheTensor.__dataclass_fields__:
        return []
    make: Any = KVCacheTensor
    shared = zip(*(group.layer_names for group in groups), strict=True)
    return [make(size=0, shared_by=list(layers)) for layers in shared]


def disk_settings(directory: Path, slots: int, slot_bytes: int) -> dict[str, Any]:
    """Settings of a disk tier of `slots` blocks; none of no blocks."""
    if slots == 0:
        return {}
    capacity = slots * (slot_bytes + RECORD_BYTES) + DISK_OVERHEAD
    return {
        "ssd_cache_gb": capacity / (1 << 30),
        "ssd_cache_dir": str(directory / "disk"),
        "ssd_timeout_seconds": DISK_TIMEOUT_SECONDS,
    }


GUESSES = 5
"""Tokens that are guessed in each step of a world that decodes speculatively."""
_SPECULATIVE = {"method": "ngram", "num_speculative_tokens": GUESSES, "prompt_lookup_max": 3}


def make_config(
    directory: Path,
    cache_bytes: int,
    *,
    ranks: int,
    stages: int = 1,
    entry: str,
    block_tokens: int,
    budget: int,
    policy: str,
    max_requests: int,
    async_scheduling: bool = False,
    settings: dict[str, Any] | None = None,
    events: bool = False,
    guesses: bool = False,
    context: int = 2048,
    role: str = "kv_both",
) -> VllmConfig:
    model = directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(LLAMA))
    weights = model / "model.safetensors"
    if not weights.exists():
        weights.write_bytes(b"weights that nobody loads")
    transfer = KVTransferConfig(
        kv_role=role,
        engine_id=str(uuid.uuid4()),
        kv_load_failure_policy=policy,
        **connector_of(
            entry,
            block_tokens,
            {
                "cpu_cache_gb": cache_bytes / (1 << 30),
                "runtime_dir": str(directory / "run"),
                "copy_threads": 2,
                **(settings or {}),
            },
            role,
        ),
    )
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        block_size=BLOCK_TOKENS,
        max_model_len=context,
        max_num_batched_tokens=budget,
        max_num_seqs=max_requests,
        enforce_eager=True,
        enable_prefix_caching=True,
        speculative_config=_SPECULATIVE if guesses else None,
        kv_transfer_config=transfer,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=events, publisher="null"),
    ).create_engine_config()
    # Only now: vLLM does not schedule ahead on CPUs, and would look for as many processors.
    config.scheduler_config.async_scheduling = async_scheduling
    config.parallel_config.tensor_parallel_size = ranks
    config.parallel_config.pipeline_parallel_size = stages
    config.parallel_config.world_size = ranks * stages
    return config


def connector_of(
    entry: str, block_tokens: int, settings: dict[str, Any], role: str = "kv_both"
) -> dict[str, Any]:
    """vLLM's connector with FlexKV behind it; the settings of both are in one place. Requests may
    pin, unless the settings say otherwise. Inside `MultiConnector`, `role` is FlexKV's own."""
    settings = {"request_options": "all"} | settings
    if entry == OFFLOADING:
        vllms = {
            "spec_name": "FlexKVOffloadingSpec",
            "spec_module_path": entry,
            "blocks_per_chunk": block_tokens // BLOCK_TOKENS,
            "offload_prompt_only": False,
        }
        return {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": vllms | settings,
        }
    if entry == IN_MULTI:
        child = connector_of(IN_TREE, block_tokens, settings) | {"kv_role": role}
        return {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": [child]},
        }
    if entry in (BESIDE_OTHER, IN_TREE_BESIDE_OTHER):
        ours = connector_of(entry.partition(":")[2], block_tokens, settings) | {"kv_role": role}
        other = {"kv_connector": "OtherConnector", "kv_connector_module_path": "other_connector"}
        other["kv_role"] = "kv_both"
        children = [other, ours]
        return {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": children},
        }
    ours = {"block_tokens": block_tokens}
    return {
        "kv_connector": "FlexKVConnectorV1",
        "kv_connector_module_path": entry,
        "kv_connector_extra_config": ours | settings,
    }


def make_hasher(vllm_config: VllmConfig, hash_tokens: int) -> Callable[[Request], list[Any]]:
    hash_fn = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    return get_request_block_hasher(hash_tokens, hash_fn)
