# SPDX-License-Identifier: Apache-2.0
"""The scheduler side's state of a request, from its queueing to its end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from flexkv.client import FetchId, FetchState
from flexkv.engine.choice.chooser import Left
from flexkv.engine.scheduler.engine import EngineRequest
from flexkv.engine.scheduler.groups import Group
from flexkv.engine.scheduler.options import RequestOptions
from flexkv.types.changes import Medium

NEVER = sys.maxsize
"""A number of tokens that no request reaches."""

HitTokens: TypeAlias = Mapping[Medium, int]
"""Tokens of a hit by the tier that they came from."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks of a group to load: position of the first, and their keys."""

    group: Group
    start: int
    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks to load for a hit, as found when a request's turn came.

    Attributes:
        hit: tokens of the longest hit that may be had.
        start: number of the first block in a model of plain attention, else `local_tokens`.
        announced: how many of the blocks, from the first on, another engine writes to a shared
            store.
        divergence: as in `Match`.
        in_host: whether all blocks are known to be in host memory.
    """

    local_tokens: int
    limit: int
    hit: int
    wanted: Sequence[Wanted]
    keys: Sequence[bytes]
    start: int
    announced: int = 0
    divergence: int = 0
    in_host: bool = False


def flat(wanted: Sequence[Wanted]) -> Sequence[bytes]:
    """The keys of all groups, one after the other."""
    if len(wanted) == 1:
        return wanted[0].keys
    return list(chain.from_iterable(each.keys for each in wanted))


@dataclass(frozen=True, slots=True)
class Match:
    """The answer to the engine's lookup for a request, in tokens.

    Attributes:
        layerwise: whether the load runs beside the forward pass of the same step.
        divergence: where the full attention of other requests continued with this prompt, but no
            group that looks back less far did; 0 if there is no such place.
        keys: keys of the blocks that were looked up, from the first one with a token behind
            `local_tokens` on.
        blocks: how many of them are loaded, from the first on.
    """

    local_tokens: int
    fetched: HitTokens = field(default_factory=dict)
    layerwise: bool = False
    left: tuple[tuple[Left, int], ...] = ()
    divergence: int = 0
    keys: Sequence[bytes] = field(default=(), repr=False, compare=False)
    blocks: int = 0


@dataclass(slots=True)
class WantedFetch:
    """A fetch for a request.

    Attributes:
        start: see `Plan`.
        queued: whether the request's turn has not come.
        turn: when it came, and what had arrived then; None if the fetch began then.
        is_extended: whether `keys` is a list of its own.
    """

    id: FetchId
    keys: Sequence[bytes]
    start: int
    queued: bool = False
    turn: tuple[float, FetchState] | None = None
    is_extended: bool = False

    def since_turn(self, state: FetchState) -> FetchState:
        """The state without what the fetch did while the request was queued."""
        return state if self.turn is None else state.since(*self.turn)


@dataclass(slots=True)
class MadeKeys:
    """Keys of a request's first blocks in a group, as far as `BlockKeys` has made them. They end
    with `ending`; `last` is the hash behind the last key, which covers all tokens before it."""

    ending: bytes
    keys: list[bytes] = field(default_factory=list)
    last: bytes = b""

    def fit(self, hashes: Sequence[bytes], step: int, ending: bytes) -> bool:
        """Whether the keys were made of every `step`th of these hashes, and of `ending`. The engine
        discards some hashes if a session continues differently."""
        if ending != self.ending:
            return False
        count = len(self.keys) * step
        return count == 0 or (count <= len(hashes) and hashes[count - 1] == self.last)


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """The state of one request; it ends with the request.

    Attributes:
        match: the engine's last lookup; None before it, and after an error in it.
        awaited: the media of blocks that had to come from a lower tier, by key; see
            `Fetches.media_of`.
        failed_at: tokens before the first failed load; later tokens are not offered again.
        fetched: tokens of its load that lower tiers gave.
        built_on: id of the load that ran beside its forward pass, until the load is known to have
            succeeded; 0 if there is none.
        engine_blocks: ids of the engine's blocks with its tokens, in order, for each cached group.
            Empty if they are not known; then none of its blocks are stored.
        ran: whether it was scheduled since the engine gave it its blocks. Before that, the blocks
            may lack tokens that the engine counts as computed: another connector may load them.
        next_fill: number of tokens that fills the first block not yet considered for storing;
            `NEVER` if no more of its blocks are stored.
        due_step: step in which its fills are checked, by the count of `FullBlocks`.
        keys: keys of its blocks by group.
    """

    request: EngineRequest
    options: RequestOptions
    plan: Plan | None = None
    match: Match | None = None
    fetch: WantedFetch | None = None
    awaited: dict[bytes, Medium] = field(default_factory=dict)
    failed_at: int = NEVER
    fetched: HitTokens = field(default_factory=dict)
    built_on: int = 0
    engine_blocks: list[list[int]] = field(default_factory=list)
    ran: bool = False
    next_fill: int = NEVER
    due_step: int = 0
    keys: dict[int, MadeKeys] = field(default_factory=dict)
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.request.request_id

    @property
    def may_load(self) -> bool:
        """Whether the request's options and the engine allow loads for it."""
        skips = getattr(self.request, "skip_reading_prefix_cache", False)
        return self.options.load and not skips

    def begin(self, tables: Sequence[Sequence[int]], first_fill: int) -> None:
        """Take over the blocks that the engine gave the request, for the first time or after it had
        taken all of them away."""
        self.set_blocks(tables)
        self.ran = False
        self.next_fill = first_fill
        self.built_on = 0

    def set_blocks(self, tables: Sequence[Sequence[int]]) -> None:
        """It has exactly these blocks, by cached group."""
        self.engine_blocks = list(map(list, tables))

    def store_nothing(self) -> None:
        """Nothing more of it is stored."""
        self.next_fill = NEVER

    def skip_fills(self, tokens: int) -> None:
        """Its blocks up to `tokens` tokens need not be stored, unless nothing of it is stored."""
        if self.next_fill != NEVER:
            self.next_fill += tokens

    def fill_again(self, first_fill: int) -> None:
        """The engine computes blocks of it again: consider all of them for storing, unless nothing
        of it is stored."""
        if self.next_fill != NEVER:
            self.next_fill = first_fill

    def lose_blocks(self) -> None:
        """Its blocks are unknown: the engine has taken them, or the state here may be wrong. None
        of them are stored until the request begins again."""
        self.engine_blocks = []
        self.ran = False
        self.store_nothing()

    def hit_tokens(self, tokens: int) -> HitTokens:
        """Divide `tokens` tokens that are loaded for it among the tiers that had them."""
        fetched = limited(self.fetched, tokens)
        return {**fetched, Medium.HOST: tokens - sum(fetched.values())}

    def fail_from(self, tokens: int) -> None:
        """Offer it no tokens from `tokens` on: a load failed there."""
        self.failed_at = min(self.failed_at, tokens)


def limited(fetched: HitTokens, tokens: int) -> dict[Medium, int]:
    """Limit the tokens that came from lower tiers to `tokens` in all. The slowest tiers keep theirs
    first."""
    kept: dict[Medium, int] = {}
    for medium in reversed(Medium):
        count = min(fetched.get(medium, 0), tokens)
        if count > 0:
            kept[medium] = count
            tokens -= count
    return kept
