# SPDX-License-Identifier: Apache-2.0
"""The KV cache groups of a model, and the blocks that each needs to continue a prefix.

An engine puts layers that keep the same tokens into one group, with a block table of its own. A
model of one kind of attention has one group. Hybrid models have several: full attention needs all
blocks of a prefix, a sliding window the last ones, recurrent layers the state at its end.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field


class Reach(enum.Enum):
    """The kind of a group's layers, which says how far back they look."""

    ALL = "full attention"
    WINDOW = "a sliding window"
    CHUNK = "chunked attention"
    STATE = "a recurrent state"


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group. `span` is the number of tokens of its window or chunk, 0 for the other
    kinds. `block_tokens`, those of a FlexKV block, are computed once, because they are read often.
    """

    index: int
    reach: Reach
    span: int
    engine_block_tokens: int
    engine_blocks: int
    block_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_tokens", self.engine_block_tokens * self.engine_blocks)

    def first_needed(self, tokens: int) -> int:
        """The first FlexKV block that is needed to compute token `tokens`, if it and those before
        it are complete blocks. vLLM skips the others (`get_num_skipped_tokens` of its managers,
        vllm.v1.core.single_type_kv_cache_manager)."""
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
        all_of_engine: whether the engine has no other groups, such as a draft model's.
        plain: whether there is only full attention in the engine's only group. Then any prefix of
            blocks is worth loading, and the engine accepts a load that failed in part.
        alignment: a load ends at a multiple of these tokens: all groups have a block that ends
            there. Computed once, as `plain` is, because each lookup needs it.
        furthest: the first group that reaches furthest back: one of full attention, if there is
            one.
    """

    members: tuple[Group, ...]
    hash_tokens: int
    all_of_engine: bool = True
    plain: bool = field(init=False)
    alignment: int = field(init=False)
    furthest: Group = field(init=False)

    def __post_init__(self) -> None:
        only = self.members[0]
        plain = len(self.members) == 1 and only.reach is Reach.ALL and self.all_of_engine
        object.__setattr__(self, "plain", plain)
        alignment = math.lcm(*(group.block_tokens for group in self.members))
        object.__setattr__(self, "alignment", alignment)
        full = (each for each in self.members if each.reach is Reach.ALL)
        object.__setattr__(self, "furthest", next(full, only))

    def describe(self) -> str:
        """Text for the fingerprint: number, kind, span and engine block of each group."""
        return "; ".join(
            f"{group.index} {group.reach.name} {group.span} {group.engine_block_tokens}"
            for group in self.members
        )
