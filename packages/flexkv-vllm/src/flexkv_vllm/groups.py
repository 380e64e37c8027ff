# SPDX-License-Identifier: Apache-2.0
"""Reads a model's KV cache groups from vLLM's configuration."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from vllm.v1 import kv_cache_interface as interface

from flexkv import LayoutError
from flexkv.engine.scheduler.groups import Group, Groups, Reach
from flexkv_vllm.compat.core import fails_by_request, tells_states
from flexkv_vllm.support import check_stages

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


def groups_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None, engine_blocks: int = 1
) -> Groups:
    """The groups of a model. Raises LayoutError if a group cannot be cached correctly.

    Args:
        kv_cache_config: None if vLLM does not pass it on; it then has one group of full attention.
        engine_blocks: vLLM blocks of a FlexKV block.
    """
    if kv_cache_config is None:
        tokens = vllm_config.cache_config.block_size
        return Groups((Group(0, Reach.ALL, 0, tokens, engine_blocks),), tokens)
    model_layers = vllm_config.model_config.get_total_num_hidden_layers()
    cached = getattr(kv_cache_config, "prefix_cacheable_group_ids", None)
    members = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if (cached is not None and index not in cached) or _only_drafts(group, model_layers):
            continue
        reach, span = _reach(group.kv_cache_spec)
        tokens = group.kv_cache_spec.block_size
        members.append(Group(index, reach, span, tokens, engine_blocks))
    if not members:
        raise LayoutError("no KV cache group of the model can be cached; allowed: at least one")
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None)
    groups = Groups(
        tuple(members),
        hash_tokens or math.gcd(*(group.engine_block_tokens for group in members)),
        all_of_engine=len(members) == len(kv_cache_config.kv_cache_groups),
    )
    kinds = [group.reach.value for group in members]
    # After a report by block, vLLM would compute behind a missing window.
    if not groups.plain and not fails_by_request():
        raise LayoutError(
            f"the model's KV cache has the groups {kinds}; allowed with this vLLM: one group of "
            f"full attention (other groups need vLLM 0.30 or newer)"
        )
    if not tells_states() and any(group.reach is Reach.STATE for group in members):
        raise LayoutError(
            f"the model's KV cache has the groups {kinds}; allowed with this vLLM: all except "
            f"recurrent states (vLLM 0.32 and newer report the block of each state)"
        )
    check_stages(vllm_config, groups)
    return groups


def _only_drafts(group: KVCacheGroupSpec, model_layers: int) -> bool:
    """Whether all layers of a group belong to a draft model, whose cache does not affect results.

    vLLM also marks a group as a draft's if it contains layers of both models
    (`_annotate_eagle_groups`, vllm.v1.core.kv_cache_utils). Numbered draft layers continue the
    model's numbers; a group with layers that cannot be distinguished is cached.
    """
    if not getattr(group, "is_eagle_group", False):
        return False
    numbers = [re.search(r"\blayers\.(\d+)\.", name) for name in group.layer_names]
    return all(number is not None and int(number[1]) >= model_layers for number in numbers)


def _reach(spec: KVCacheSpec) -> tuple[Reach, int]:
    """Reach and span of a group's layers.

    By exact type, because vLLM's derived types may free other blocks. Raises LayoutError if the
    kind is unknown here.
    """
    name = type(spec).__name__
    if isinstance(spec, interface.UniformTypeKVCacheSpecs):
        kinds = {_reach(each) for each in spec.kv_cache_specs.values()}
        if len(kinds) == 1:
            return kinds.pop()
        name = "layers that look back differently far"
    elif type(spec) in {interface.FullAttentionSpec, interface.MLAAttentionSpec}:
        return Reach.ALL, 0
    elif type(spec) is interface.SlidingWindowSpec:
        return Reach.WINDOW, spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    elif type(spec) is interface.ChunkedLocalAttentionSpec:
        return Reach.CHUNK, spec.attention_chunk_size
    elif type(spec) is interface.MambaSpec:
        if spec.mamba_cache_mode == "align":
            return Reach.STATE, 0
        name = (
            f"recurrent layers in vLLM's cache mode {spec.mamba_cache_mode!r} "
            f"(--enable-prefix-caching --mamba-cache-mode align keeps states that can be cached)"
        )
    raise LayoutError(
        f"the model's KV cache has a group of {name}; allowed: full attention, sliding windows, "
        f"chunked attention, and recurrent states that vLLM caches at the ends of blocks"
    )


def check_groups_behind_shim(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None
) -> None:
    """Refuse a model whose KV cache is not what the scheduler side assumes behind vLLM's own
    connector, which does not show it. Raises LayoutError if it is not."""
    groups = groups_of(vllm_config, kv_cache_config)
    if groups.plain and groups.members == groups_of(vllm_config, None).members:
        return
    kinds = [f"{group.reach.value}, {group.engine_block_tokens} tokens" for group in groups.members]
    raise LayoutError(
        f"the model's KV cache has groups ({'; '.join(kinds)}) that vLLM's own FlexKVConnectorV1 "
        f"does not pass on to FlexKV; allowed behind it: one group of full attention in blocks of "
        f"{vllm_config.cache_config.block_size} tokens. For all others, let vLLM load the plugin "
        f"'flexkv' (see VLLM_PLUGINS)"
    )


def step_blocks(vllm_config: VllmConfig, groups: Groups) -> int:
    """How many blocks one step of the engine can fill. See `steps_behind` for how many steps."""
    tokens = vllm_config.scheduler_config.max_num_batched_tokens
    requests = vllm_config.scheduler_config.max_num_seqs
    return sum(tokens // group.block_tokens + requests for group in groups.members)
