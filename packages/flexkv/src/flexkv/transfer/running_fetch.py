# SPDX-License-Identifier: Apache-2.0
"""A fetch that has not ended: what has arrived, and what may still arrive."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from flexkv.client import AwaitedBlocks, FetchId, FetchState
from flexkv.index.block_index import Block
from flexkv.tiers.job import Priority, Urgency
from flexkv.types.changes import Medium


@dataclass(slots=True, eq=False)
class RunningFetch:
    """A prefix that a request wants in the arena. Times are time.monotonic(), in seconds.

    For `begun`, `arrived`, `stop`, `first`, `queried` and `gave` see `FetchState`.

    Attributes:
        keys: of the prefix, first block first; those of an extension follow.
        progressed: when `arrived` last grew or another tier was tried; `begun` before that.
        blocks: the blocks by position; None for one that the arena lacks. The fetch leases the
            others. The list is shorter than `keys` while tiers are queried.
        media: the medium of each of `blocks`; None for one that the arena had at once. See
            `AwaitedBlocks`.
        announced: how many of `keys`, from the first on, another node writes to a shared store, as
            far as is known now.
        announced_until: when they are waited for no longer.
        awaits_others: whether no tier had the next block when last queried, and it is announced.
        ask_at: when stores are to be queried about it again; 0 until the first such wait.
        expected: how many blocks each tier is expected to give, beside those it is queried about.
        beyond: how many blocks behind `stop` could come if the arena had room for them.
    """

    id: FetchId
    keys: list[bytes]
    urgency: Urgency
    tenant: int
    begun: float
    progressed: float
    blocks: list[Block | None]
    media: list[Medium | None]
    announced: int = 0
    announced_until: float = 0.0
    awaits_others: bool = False
    ask_at: float = 0.0
    arrived: int = 0
    stop: int = 0
    first: int = 0
    queried: Medium | None = None
    gave: dict[Medium, tuple[int, float]] = field(default_factory=dict)
    expected: dict[Medium, int] = field(default_factory=dict)
    beyond: int = 0
    _runs: list[AwaitedBlocks] = field(default_factory=list)
    _later: tuple[AwaitedBlocks, ...] = ()
    _grouped: int = 0
    _state: FetchState | None = None

    @property
    def may_wait(self) -> bool:
        """Whether its request is still queued."""
        return self.urgency.priority is not Priority.LOAD

    @property
    def state(self) -> FetchState:
        """The state for the caller. Made anew only after a change."""
        state = self._state
        if state is None:
            state = self._state = FetchState(
                self.begun,
                len(self.keys),
                self.first,
                self.arrived,
                self.stop,
                self.queried,
                self._count_missing(),
                dict(self.gave),
                self._next_medium(),
                self._list_awaited(),
                self.stop + self.beyond,
                self._later,
            )
        return state

    def add(self, blocks: Sequence[Block | None], media: Sequence[Medium | None]) -> None:
        """Add blocks behind the others, which end the prefix unless `wait_for_answer` is called."""
        self.blocks += blocks
        self.media += media
        for medium in media:
            if medium is not None and medium is not Medium.HOST:
                self.expected[medium] = self.expected.get(medium, 0) + 1
        self._end_at(len(self.blocks))

    def fall_short(self, media: Sequence[Medium | None]) -> None:
        """Blocks of these media could follow the others, but the arena has no room for them."""
        runs, start = list[AwaitedBlocks](), self.stop
        for medium, group in itertools.groupby(media):
            first, start = start, start + len(list(group))
            if medium is not None:
                runs.append(AwaitedBlocks(first, start, medium))
        self.beyond, self._later, self._state = len(media), tuple(runs), None

    def wait_for_answer(self, medium: Medium | None, count: int) -> None:
        """Further `count` blocks may arrive, about the first of which a tier is queried."""
        self.stop += count
        self.queried, self._state = medium, None

    def complete(
        self, positions: Sequence[int], blocks: Sequence[Block | None], medium: Medium | None
    ) -> None:
        """The blocks at `positions` are no longer being written: `blocks` are leased, None for one
        that nobody gave; `medium` is that of the tier that gave them, None if none did."""
        came = medium or Medium.HOST
        for position, block in zip(positions, blocks, strict=True):
            expected = self.media[position]
            if expected in self.expected:
                self.expected[expected] -= 1
            if expected is not came:
                self.media[position] = came
                self._runs, self._grouped = [], 0
            self.blocks[position] = block
            if block is None:
                self.cut(position)
        if medium is not None:
            count, _ = self.gave.get(medium, (0, 0.0))
            self.gave[medium] = count + len(positions), time.monotonic()
        self._state = None

    def advance(self) -> bool:
        """Recount `arrived`. Returns whether it has grown."""
        blocks, arrived, end = self.blocks, self.arrived, min(self.stop, len(self.blocks))
        while arrived < end and blocks[arrived] is not None:
            arrived += 1
        if arrived == self.arrived:
            return False
        self.arrived, self.progressed, self._state = arrived, time.monotonic(), None
        return True

    def cut(self, position: int) -> None:
        """End the prefix before the block at `position`."""
        self._end_at(min(self.stop, position))
        self.arrived = min(self.arrived, self.stop)

    def _end_at(self, stop: int) -> None:
        self.stop, self.beyond, self._later = stop, 0, ()
        self.queried = self._state = None

    def _next_medium(self) -> Medium | None:
        if self.arrived >= min(self.stop, len(self.media)):
            return None
        medium = self.media[self.arrived]
        return None if medium is Medium.HOST else medium

    def _count_missing(self) -> dict[Medium, int]:
        left = self.stop - self.arrived
        missing = {medium: min(count, left) for medium, count in self.expected.items() if count}
        if self.queried is not None:
            unknown = self.stop - len(self.blocks)
            missing[self.queried] = missing.get(self.queried, 0) + unknown
        return missing

    def _list_awaited(self) -> Sequence[AwaitedBlocks]:
        for medium, group in itertools.groupby(self.media[self._grouped :]):
            start, self._grouped = self._grouped, self._grouped + len(list(group))
            if medium is not None:
                self._runs.append(AwaitedBlocks(start, self._grouped, medium))
        if self.queried is None:
            return tuple(self._runs)
        return *self._runs, AwaitedBlocks(len(self.blocks), self.stop, self.queried)
