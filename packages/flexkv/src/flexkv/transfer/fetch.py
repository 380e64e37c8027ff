# SPDX-License-Identifier: Apache-2.0
"""A fetch: lower tiers give the blocks of a prefix to the arena."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from flexkv.index.block_index import Block
from flexkv.tiers.job import Priority
from flexkv.transfer.sources import Source
from flexkv.types.changes import Medium


@dataclass(slots=True, eq=False)
class Fetch:
    """A prefix that a request wants in the arena. `KVCache.fetch` makes it; the caller reads it and
    ends it with `KVCache.end_fetch`. Times are time.monotonic(), in seconds.

    Attributes:
        keys: keys of the prefix, first block first. The list grows if the fetch is extended.
        blocks: the blocks by position; None for one that the arena lacks. This fetch leases the
            others. The list grows while tiers are asked which blocks they have.
        arrived: how many blocks the arena has, from the first on without a gap.
        stop: how many blocks can still arrive, from the first on. It falls when a block fails or
            no tier has the block.
        begun: when the fetch began.
        first: how many blocks the arena had then, from the first on.
        progressed: when `arrived` last grew; `begun` if it has not.
        priority: priority of the reads.
        awaited: keys of the blocks that the arena lacked when the fetch began and that may come.
        asking: the first tier that is asked for the blocks behind `blocks`; None if no tier is.
        sources: the tier that gave each block since, or is expected to give it.
        expected: how many blocks each tier is expected to give; blocks that tiers are asked for
            do not count.
        gave: how many blocks each tier has given, and when it gave the last.
    """

    keys: list[bytes]
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
        """Whether no further block can arrive."""
        return self.arrived >= self.stop

    @property
    def seconds_left(self) -> float:
        """Seconds that the remaining blocks take at the pace of those that have arrived; infinite
        if none has arrived."""
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
        """Whether each tier that may still give blocks has them for certain, and has given some.
        Only then does `seconds_left` hold for all tiers."""
        return self.asking is None and self.missing.keys() <= self.gave.keys()

    @property
    def next_medium(self) -> Medium | None:
        """The tier that is expected to give the next block; None if unknown."""
        source = None if self.done else self.sources.get(self.keys[self.arrived])
        return None if source is None else source.medium

    def medium_of(self, key: bytes) -> Medium:
        """The medium that had the block of `key` when the fetch began."""
        source = self.sources.get(key)
        return Medium.HOST if source is None else source.medium

    def advance(self) -> None:
        """Recount `arrived`."""
        before = self.arrived
        while self.arrived < self.stop and (
            self.arrived < len(self.blocks) and self.blocks[self.arrived] is not None
        ):
            self.arrived += 1
        if self.arrived > before:
            self.progressed = time.monotonic()

    def cut(self, position: int) -> None:
        """End the prefix before the block at `position`, which no tier gives."""
        self.stop = min(self.stop, position)
        self.asking = None

    def end_empty(self) -> None:
        """End the prefix before its first block. The caller has released the leases."""
        self.blocks.clear()
        self.arrived = 0
        self.cut(0)

    def expect(self, keys: Sequence[bytes], source: Source) -> None:
        """Record that a tier reads the blocks of `keys`."""
        self.sources.update(dict.fromkeys(keys, source))
        self.expected[source.medium] = self.expected.get(source.medium, 0) + len(keys)

    def settle(self, key: bytes, source: Source | None) -> None:
        """Record that the read of the block of `key` has ended.

        Args:
            key: key of the block.
            source: the tier that gave the block; None if none did.
        """
        expected = self.sources.pop(key, None)
        if expected is not None:
            self.expected[expected.medium] -= 1
        if source is not None:
            self.sources[key] = source
            count, _ = self.gave.get(source.medium, (0, 0.0))
            self.gave[source.medium] = count + 1, time.monotonic()
