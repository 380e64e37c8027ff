# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side keeps of a request."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flexkv_vllm.scheduler.wishes import Wishes

if TYPE_CHECKING:
    from vllm.v1.request import Request

NEVER = sys.maxsize
"""A `next_fill` that no request reaches: its blocks are not looked at."""


@dataclass(frozen=True, slots=True)
class Match:
    """What vLLM was told about a request, in tokens.

    Attributes:
        local_tokens: vLLM has itself.
        disk_tokens: came from a lower tier, of those that can be loaded.
        layerwise: the load runs beside the forward of the same step.
        junction: where other requests' full attention went on with this prompt, but nothing that
            looks back less far did; 0 if nowhere.
    """

    local_tokens: int
    disk_tokens: int = 0
    layerwise: bool = False
    junction: int = 0


@dataclass(slots=True)
class TrackedRequest:
    """What is known of a request that vLLM gave blocks to.

    Attributes:
        request: vLLM's own object; read, never changed.
        wishes: what the user asks for it.
        next_fill: tokens with which the first block that was not considered for storing is full.
        engine_blocks: ids of the blocks that hold its tokens, in order, for each cached group.
        stores: ids of its stores under way, which read its blocks.
        loading: vLLM waits for a load, so the blocks do not hold yet what it counts as computed.
        disk_tokens: of its last load, that came from a lower tier.
        built_on: id of the load beside whose copies its forward ran; 0 if there was none.
        junction: see `Match`.
        ran: it was scheduled since vLLM gave it its blocks. Before that, they need not hold what
            vLLM counts as computed: another connector may be loading it.
    """

    request: Request
    wishes: Wishes
    next_fill: int
    engine_blocks: list[list[int]] = field(default_factory=list)
    stores: set[int] = field(default_factory=set)
    loading: bool = False
    disk_tokens: int = 0
    built_on: int = 0
    junction: int = 0
    ran: bool = False

    @property
    def has_blocks(self) -> bool:
        """Whether vLLM's blocks hold something of it; a preempted request has none."""
        return any(self.engine_blocks)

    def set_blocks(self, tables: Sequence[Sequence[int]]) -> None:
        """It has exactly these blocks, by cached group."""
        self.engine_blocks = [list(table) for table in tables]
