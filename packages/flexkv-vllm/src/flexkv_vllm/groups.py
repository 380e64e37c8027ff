# SPDX-License-Identifier: Apache-2.0
"""The KV cache groups of a model: which blocks each needs for the computation to go on.

vLLM puts layers that keep the same tokens into one group, with a block table of its own; all groups
draw on one pool of blocks. A model of one kind of attention has one group. Hybrid models have
several: full attention needs all blocks of a prefix, a sliding window the last ones, recurrent
layers the state at its end.
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1 import kv_cache_interface as interface

from flexkv import LayoutError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


class Reach(enum.Enum):
    """How far back the layers of a group look."""

    ALL = "full attention"
    WINDOW = "a sliding window"
    CHUNK = "chunked attention"
    STATE = "a recurrent state"


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group.

    Attributes:
        index: among vLLM's groups.
        reach: of its layers.
        span: tokens of the window or chunk; 0 for the other kinds.
        engine_block_tokens: tokens of one of vLLM's blocks.
        engine_blocks: vLLM blocks of a FlexKV block.
    """

    index: int
    reach: Reach
    span: int
    engine_block_tokens: int
    engine_blocks: int

    @property
    def block_tokens(self) -> int:
        """Tokens of a FlexKV block."""
        return self.engine_block_tokens * self.engine_blocks

    def first_needed(self, tokens: int) -> int:
        """The first FlexKV block that is needed to compute token `tokens`, if it and those before
        it are complete blocks: vLLM leaves out the others (`get_num_skipped_tokens` of its
        managers, vllm.v1.core.single_type_kv_cache_manager)."""
        match self.reach:
            case Reach.ALL:
                skipped = 0
            case Reach.WINDOW:
                skipped = max(0, tokens - self.span + 1)
            case Reach.CHUNK:
                skipped = tokens // self.span * self.span
            case Reach.STATE:
                skipped = max(0, tokens - 1)
        return skipped // self.block_tokens


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups whose blocks are cached.

    Attributes:
        members: one at least.
        hash_tokens: tokens that one of vLLM's block hashes stands for.
        all_of_vllms: whether vLLM has no groups beside these, as a draft model's.
    """

    members: tuple[Group, ...]
    hash_tokens: int
    all_of_vllms: bool = True

    @property
    def plain(self) -> bool:
        """Whether there is only full attention, so that any prefix of blocks is worth loading, and
        vLLM has one group, so that it takes one that failed in part."""
        only = self.members[0]
        return len(self.members) == 1 and only.reach is Reach.ALL and self.all_of_vllms

    @property
    def alignment(self) -> int:
        """Tokens that a load ends at a multiple of: all groups have a block that ends there."""
        return math.lcm(*(group.block_tokens for group in self.members))

    def describe(self) -> str:
        """For the fingerprint: what a key of a group stands for."""
        return "; ".join(
            f"{group.index} {group.reach.name} {group.span} {group.engine_block_tokens}"
            for group in self.members
        )


def read_groups(
    kv_cache_config: KVCacheConfig | None,
    engine_block_tokens: int,
    engine_blocks: int,
    *,
    model_layers: int,
    fails_by_request: bool,
    tells_states: bool,
) -> Groups:
    """The groups of a model.

    Args:
        kv_cache_config: of the engine; None if vLLM does not tell it, which then has one group of
            full attention.
        engine_block_tokens: of that one.
        engine_blocks: vLLM blocks of a FlexKV block.
        model_layers: layers of the model without a draft model's.
        fails_by_request: whether a failed load can be told by request (vLLM from 0.30 on). Told
            by block, vLLM would compute on behind a window that is not there.
        tells_states: whether vLLM tells which block has which recurrent state (from 0.32 on).

    Raises:
        LayoutError: there is a group that cannot be cached correctly.
    """
    if kv_cache_config is None:
        plain = Group(0, Reach.ALL, 0, engine_block_tokens, engine_blocks)
        return Groups((plain,), engine_block_tokens)
    cached = getattr(kv_cache_config, "prefix_cacheable_group_ids", None)
    members = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if (cached is not None and index not in cached) or _only_drafts(group, model_layers):
            continue
        reach, span = _reach(group.kv_cache_spec)
        tokens = group.kv_cache_spec.block_size
        members.append(Group(index, reach, span, tokens, engine_blocks))
    if not members:
        raise LayoutError("no KV cache group of the model can be cached; allowed: one at least")
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None)
    groups = Groups(
        tuple(members),
        hash_tokens or math.gcd(*(group.engine_block_tokens for group in members)),
        all_of_vllms=len(members) == len(kv_cache_config.kv_cache_groups),
    )
    kinds = [group.reach.value for group in members]
    if not groups.plain and not fails_by_request:
        raise LayoutError(
            f"the model's KV cache has the groups {kinds}; allowed with this vLLM: one group of "
            f"full attention (from 0.30 on there can be others)"
        )
    if not tells_states and any(group.reach is Reach.STATE for group in members):
        raise LayoutError(
            f"the model's KV cache has the groups {kinds}; allowed with this vLLM: all but "
            f"recurrent states (from 0.32 on it tells which block has which)"
        )
    return groups


def _only_drafts(group: KVCacheGroupSpec, model_layers: int) -> bool:
    """Whether all layers of a group are a draft model's, whose cache only helps to guess: without
    it nothing is wrong.

    vLLM marks a group as a draft's also where the draft's layers share it with the model's own
    (`_annotate_eagle_groups`, vllm.v1.core.kv_cache_utils). Draft layers that are numbered count
    on from the model's; what cannot be told apart is cached.
    """
    if not getattr(group, "is_eagle_group", False):
        return False
    numbers = [re.search(r"\blayers\.(\d+)\.", name) for name in group.layer_names]
    return all(number is not None and int(number[1]) >= model_layers for number in numbers)


def _reach(spec: KVCacheSpec) -> tuple[Reach, int]:
    """Reach and span of a group's layers.

    By exact type: what vLLM derives from these may free other blocks.

    Raises:
        LayoutError: it is of a kind that is not known here.
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
