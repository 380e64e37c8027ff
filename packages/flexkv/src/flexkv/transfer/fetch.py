# SPDX-License-Identifier: Apache-2.0
"""A prefix on its way from lower tiers into the arena."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from flexkv.changes import Medium
from flexkv.index import Block
from flexkv.tiers.job import Priority
from flexkv.transfer.sources import Source


@dataclass(slots=True, eq=False)
class Fetch:
    """A prefix that a request wants in the arena. Made by `KVCache.fetch`; whoever asked for it
    reads it and ends it with `KVCache.end_fetch`.

    Attributes:
        keys: of the prefix.
        blocks: by position; those that are there are leased by this fetch. As long as tiers are
            asked what they have, blocks are added.
        arrived: blocks that are there, from the first on.
        stop: blocks that can still be there, from the first on; fewer once one has failed, or no
            tier has it.
        begun: time.monotonic() when it began.
        first: blocks that were there when it began, from the first on.
        progressed: time.monotonic() when it began or last had another block without a gap.
        priority: of its reads.
        awaited: keys of the blocks that may come and were not there when it began.
        asking: the first tier that is asked for the blocks behind `blocks`; None if none is.
        sources: which tier gave each block that has come since, or is to give it.
        expected: blocks that are to come, by tier, apart from those that tiers are asked for.
        gave: of each tier that gave blocks, how many, and time.monotonic() of the last.
    """

    keys: Sequence[bytes]
    blocks: list[Block | None] = field(repr=False)
    arrived: int = 0
    stop: int = 0
    begun: float = field(default=0.0, repr=False)
    first: int = 0
    progressed: float = field(default=0.0, repr=False)
    priority: Priority = Priority.LOAD
    awaited: list[bytes] = field(default_factory=list, repr=False)
    asking: Medium | None = None
    sources: dict[bytes, Source] = field(default_factory=dict, repr=False)
    expected: dict[Medium, int] = field(default_factory=dict, repr=False)
    gave: dict[Medium, tuple[int, float]] = field(default_factory=dict, repr=False)

    @property
    def done(self) -> bool:
        """Whether waiting brings no further block."""
        return self.arrived >= self.stop

    @property
    def seconds_left(self) -> float:
        """How long the rest will take if it comes as fast as what came so far; infinite as long as
        nothing has come."""
        if self.done:
            return 0.0
        came = self.arrived - self.first
        seconds = time.monotonic() - self.begun
        return seconds * (self.stop - self.arrived) / came if came else math.inf

    @property
    def missing(self) -> dict[Medium, int]:
        """How many blocks each tier may still give."""
        left = self.stop - self.arrived
        missing = {medium: min(count, left) for medium, count in self.expected.items() if count}
        if self.asking is not None:
            unknown = self.stop - len(self.blocks)
            missing[self.asking] = missing.get(self.asking, 0) + unknown
        return missing

    @property
    def is_steady(self) -> bool:
        """Whether each tier that may still give blocks is known to have them, and has given some:
        only then `seconds_left` holds for all of them."""
        return self.asking is None and self.missing.keys() <= self.gave.keys()

    @property
    def next_medium(self) -> Medium | None:
        """Which tier is to give the next block; None if that is not known."""
        source = None if self.done else self.sources.get(self.keys[self.arrived])
        return None if source is None else source.medium

    def medium_of(self, key: bytes) -> Medium:
        """Where the block of `key` was when the fetch began."""
        source = self.sources.get(key)
        return Medium.HOST if source is None else source.medium

    def advance(self) -> None:
        """Count the blocks that are there without a gap."""
        before = self.arrived
        while self.arrived < self.stop and (
            self.arrived < len(self.blocks) and self.blocks[self.arrived] is not None
        ):
            self.arrived += 1
        if self.arrived > before:
            self.progressed = time.monotonic()

    def cut(self, position: int) -> None:
        """The block at `position` does not come."""
        self.stop = min(self.stop, position)
        self.asking = None

    def expect(self, key: bytes, source: Source) -> None:
        """A tier reads the block of `key`."""
        self.sources[key] = source
        self.expected[source.medium] = self.expected.get(source.medium, 0) + 1

    def settle(self, key: bytes, source: Source | None) -> None:
        """The block of `key` is no longer being read; `source` gave it, if a tier did."""
        expected = self.sources.pop(key, None)
        if expected is not None:
            self.expected[expected.medium] -= 1
        if source is not None:
            self.sources[key] = source
            count, _ = self.gave.get(source.medium, (0, 0.0))
            self.gave[source.medium] = count + 1, time.monotonic()
