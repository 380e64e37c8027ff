# SPDX-License-Identifier: Apache-2.0
"""Runs of blocks that are judged together, and which of them is worth least to keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from flexkv.eviction.base import RequestContext
from flexkv.eviction.rates import ReturnRates

_SLOTS = 64
"""Rows of the table at first."""

_RANKED_SHARE = 64
_LEAST_RANKED = 8
"""A ranking finds the 64th of the segments that is worth least, and not fewer than eight. It holds
until these are gone."""


@dataclass(slots=True, eq=False)
class Request:
    """A request that made segments.

    Attributes:
        context: what is known of it.
        turn: of its conversation, from 0 on.
        blocks: of its prompt.
        levels: of the factors that all its segments share.
        segments: that it made, the last of the prompt first.
    """

    context: RequestContext
    turn: int
    blocks: int
    levels: tuple[int, ...]
    segments: list[Segment] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Segment:
    """Blocks `start` to `stop` of a request's prompt, which no later request has used.

    Attributes:
        request: the last that used them.
        kind, children, part: levels of factors, see `hazard`.
        cached: how many of them are in the tier.
        leaves: of these, those that are not held.
        ghosts: keys of those that are remembered though they are not in the tier.
        slot: row in the table; -1 once all of them belong to another request, or are forgotten.
        number: of their class.
        born: when their age began.
        weight: of all of them together.
        rank: what they were worth when they were ranked; -1 if they are not among the lowest.
    """

    request: Request
    start: int
    stop: int
    kind: int
    children: int = 0
    part: int = 0
    cached: int = 0
    leaves: dict[bytes, None] = field(default_factory=dict)
    ghosts: list[bytes] = field(default_factory=list)
    slot: int = -1
    number: int = 0
    born: float = 0.0
    weight: float = 0.0
    rank: float = -1.0

    @property
    def blocks(self) -> int:
        return self.stop - self.start


class SegmentTable:
    """All segments, with those on top that are worth least and have a block that may leave.

    What segments are worth changes with time and with what is learned. So now and then all are
    ranked at once, and the lowest are taken in that order until none is left; a segment that comes
    or changes meanwhile is put among them if it is worth less than the last of them.

    Args:
        rates: what blocks are worth.
    """

    def __init__(self, rates: ReturnRates) -> None:
        self._rates = rates
        self._segments: list[Segment | None] = [None] * _SLOTS
        self._free = list(range(_SLOTS - 1, -1, -1))
        self._numbers = np.zeros(_SLOTS, np.int64)
        self._born = np.zeros(_SLOTS)
        self._weights = np.zeros(_SLOTS)
        self._open = bytearray(_SLOTS)
        self._heap: list[tuple[float, float, int, Segment]] = []
        self._bound = -1.0
        self._pushed = 0

    def add(self, segment: Segment) -> None:
        """Give it a row; `place` says the rest."""
        if not self._free:
            self._grow()
        slot = segment.slot = self._free.pop()
        self._segments[slot] = segment
        self.resize(segment)

    def resize(self, segment: Segment) -> None:
        """The number of its blocks has changed. A long one weighs less than its blocks alone: they
        come back together or not at all."""
        segment.weight = self._weights[segment.slot] = segment.blocks**0.5

    def place(self, segment: Segment, number: int, now: float) -> None:
        """Its class is `number` from now on, and its age begins."""
        slot = segment.slot
        segment.number, segment.born, segment.rank = number, now, -1.0
        self._numbers[slot], self._born[slot] = number, now
        if segment.leaves:
            self._offer(segment, now)

    def remove(self, segment: Segment) -> None:
        """It has no blocks any more."""
        slot = segment.slot
        self._segments[slot] = None
        self._open[slot] = 0
        self._weights[slot] = 0.0
        self._free.append(slot)
        segment.slot = -1
        segment.leaves = {}

    def open(self, segment: Segment, now: float) -> None:
        """It has a block that may leave, and had none."""
        self._open[segment.slot] = 1
        if segment.rank < 0:
            self._offer(segment, now)

    def worth(self, segment: Segment, now: float) -> float:
        """Hits per block and second of keeping."""
        return self._rates.worth(segment.number, now - segment.born)

    def lowest(self, now: float) -> Segment | None:
        """The one that is worth least of those that have a block which may leave; None if none
        has."""
        heap = self._heap
        while True:
            while heap:
                rank, _, _, segment = heap[0]
                if segment.rank == rank:
                    if segment.leaves:
                        return segment
                    segment.rank = -1.0
                heappop(heap)
            if not self._rank(now):
                return None

    def learn(self, now: float) -> None:
        """Learn from all that is followed."""
        slots = np.flatnonzero(self._weights)
        self._rates.learn(self._numbers[slots], now - self._born[slots], self._weights[slots])
        for _, _, _, segment in self._heap:
            segment.rank = -1.0
        self._heap.clear()
        self._bound = -1.0

    def _offer(self, segment: Segment, now: float) -> None:
        self._open[segment.slot] = 1
        worth = self.worth(segment, now)
        if worth < self._bound:
            self._push(segment, worth)

    def _push(self, segment: Segment, worth: float) -> None:
        segment.rank = worth
        self._pushed += 1  # decides among equals, as segments have no order
        heappush(self._heap, (worth, segment.born, self._pushed, segment))

    def _rank(self, now: float) -> bool:
        """Find the lowest. False if no segment has a block that may leave."""
        while True:
            slots = np.flatnonzero(np.frombuffer(self._open, np.bool_))
            if not len(slots):
                self._bound = -1.0
                return False
            worths = self._rates.worths(self._numbers[slots], now - self._born[slots])
            count = max(_LEAST_RANKED, len(slots) // _RANKED_SHARE)
            if count < len(slots):
                chosen = np.argpartition(worths, count)[:count]
                slots, worths = slots[chosen], worths[chosen]
            order = np.argsort(worths)
            for slot, worth in zip(slots[order].tolist(), worths[order].tolist(), strict=True):
                segment = self._segments[slot]
                if segment is not None and segment.leaves:
                    self._push(segment, worth)
                else:
                    self._open[slot] = 0
            if self._heap:
                self._bound = float(worths.max())
                return True

    def _grow(self) -> None:
        rows = len(self._segments)
        self._segments += [None] * rows
        self._free = list(range(2 * rows - 1, rows - 1, -1))
        self._open += bytes(rows)
        self._numbers = np.concatenate((self._numbers, np.zeros(rows, np.int64)))
        self._born = np.concatenate((self._born, np.zeros(rows)))
        self._weights = np.concatenate((self._weights, np.zeros(rows)))
