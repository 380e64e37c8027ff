# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side knows of a request, from the moment it is queued until it has ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from flexkv.adapter.engine import EngineRequest
from flexkv.adapter.keys import MadeKeys
from flexkv.adapter.load_choice import Left
from flexkv.adapter.load_in_parts import Loading
from flexkv.adapter.plan import Plan
from flexkv.adapter.request_options import RequestOptions
from flexkv.transfer.fetch import Fetch

NEVER = sys.maxsize
"""A number of tokens that no request reaches."""


@dataclass(frozen=True, slots=True)
class Match:
    """What the engine was told about a request, in tokens.

    Attributes:
        local_tokens: the engine has itself.
        disk_tokens: came from a lower tier, of those that can be loaded.
        layerwise: the load runs beside the forward of the same step.
        left: why tokens that follow are not loaded, and how many.
        junction: where other requests' full attention went on with this prompt, but nothing that
            looks back less far did; 0 if nowhere.
    """

    local_tokens: int
    disk_tokens: int = 0
    layerwise: bool = False
    left: tuple[tuple[Left, int], ...] = ()
    junction: int = 0


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """All that is known of one request. What ends with the request ends with this object.

    Attributes:
        request: the engine's own object; read, never changed.
        options: what the user asks for it.
        plan: what to load, while a lower tier reads it; the engine asks in every step.
        match: the last answer to the engine's lookup; None if that failed.
        early: fetch that began when the request was queued, until its turn comes.
        waiting: fetch of the blocks from `waiting_start` on, which the request waits for.
        waiting_start: position of the first block of `waiting` in the request.
        awaited: keys of the blocks that had to come from a lower tier.
        failed_at: tokens before the first load that failed; what follows is not offered again.
        loading: what the engine was promised to have loaded, as long as some of it is not ordered.
        disk_tokens: of its last load, that came from a lower tier.
        junction: see `Match`.
        built_on: id of the load beside whose copies its forward ran, until that is known to have
            succeeded; 0 if there is none.
        engine_blocks: ids of the blocks that hold its tokens, in order, for each cached group.
            Empty if they are not known: nothing is stored of it then.
        ran: it was scheduled since the engine gave it its blocks. Before that, they need not hold
            what the engine counts as computed: another connector may be loading it.
        next_fill: tokens with which the first block that was not considered for storing is full;
            `NEVER` if nothing more of it is stored.
        due_step: when it is looked at for that, by the count of `FillCalendar`.
        keys: of its blocks by group; `BlockKeys` makes each once.
    """

    request: EngineRequest
    options: RequestOptions
    plan: Plan | None = None
    match: Match | None = None
    early: Fetch | None = None
    waiting: Fetch | None = None
    waiting_start: int = 0
    awaited: AbstractSet[bytes] = frozenset()
    failed_at: int = NEVER
    loading: Loading | None = None
    disk_tokens: int = 0
    junction: int = 0
    built_on: int = 0
    engine_blocks: list[list[int]] = field(default_factory=list)
    ran: bool = False
    next_fill: int = NEVER
    due_step: int = 0
    keys: dict[int, MadeKeys] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def may_load(self) -> bool:
        """Whether its user and the engine allow blocks to be loaded for it."""
        skips = getattr(self.request, "skip_reading_prefix_cache", False)
        return self.options.load and not skips

    def begin(self, tables: Sequence[Sequence[int]], first_fill: int) -> None:
        """The engine gave it blocks for the first time, or anew after it had taken them all.

        Args:
            tables: its blocks by cached group.
            first_fill: tokens with which the first block that is stored is full.
        """
        self.set_blocks(tables)
        self.ran = False
        self.next_fill = first_fill
        self.built_on = 0

    def set_blocks(self, tables: Sequence[Sequence[int]]) -> None:
        """It has exactly these blocks, by cached group."""
        self.engine_blocks = [list(table) for table in tables]

    def add_blocks(self, tables: Sequence[Sequence[int]]) -> None:
        """It has these blocks beside those that are known; nothing if none are."""
        if self.engine_blocks:
            for table, blocks in zip(self.engine_blocks, tables, strict=True):
                table.extend(blocks)

    def lose_blocks(self) -> None:
        """The engine has taken its blocks, or what was known of them may be wrong: nothing of it is
        stored until it begins again."""
        self.engine_blocks = []
        self.ran = False
        self.next_fill = NEVER

    def fail_from(self, tokens: int) -> None:
        """Do not offer it anything from `tokens` on: a load failed there."""
        self.failed_at = min(self.failed_at, tokens)
