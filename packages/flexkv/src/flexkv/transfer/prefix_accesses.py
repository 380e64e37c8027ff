# SPDX-License-Identifier: Apache-2.0
"""Counts the uses of prefixes in every tier.

A long prompt has more blocks than one step of the engine has time for. So `note` records a use at
once, and each poll counts some of its blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flexkv.eviction import RequestContext
from flexkv.index.block_index import BlockIndex
from flexkv.tiers.base import IndexedTier
from flexkv.transfer.demote import Demoter
from flexkv.types.backlog import share_of

_BLOCKS = 32
"""The least number of blocks that one poll counts: about 0.03 ms with a disk of a million slots."""


@dataclass(slots=True)
class _Use:
    """A used prefix. Its first `left` blocks are not counted yet."""

    keys: Sequence[bytes]
    left: int
    hit: RequestContext | None
    lacking: list[Demoter] = field(default_factory=list)
    """The writers of tiers that lack a block of the prefix that the arena has."""
    then: Callable[[], None] | None = None
    """Called when the prefix is counted."""


class PrefixAccesses:
    """Counts uses in the order in which they were noted. Single-threaded.

    Args:
        index: index of the arena; the caller's.
        tiers: the tiers that count uses.
        demoters: the writers of the tiers that are offered each prefix that a request found, if
            they lack a block of it.

    Attributes:
        waiting: the uses of which a block is not counted yet.
    """

    def __init__(
        self, index: BlockIndex, tiers: Sequence[IndexedTier], demoters: Sequence[Demoter]
    ) -> None:
        self._index = index
        self._tiers = tiers
        self._demoters = demoters
        self.waiting: deque[_Use] = deque()
        self._backlog = 0

    def note(self, keys: Sequence[bytes], hit: RequestContext | None) -> None:
        """Note the use of a prefix.

        Args:
            keys: keys of the prefix, first block first; copied.
            hit: the scheduled request that found the prefix. None if a request ends that made the
                prefix, or whose hit was noted before.
        """
        if keys:
            self.waiting.append(_Use(keys[:], len(keys), hit))
            self._backlog += len(keys)

    def call_after(self, call: Callable[[], None]) -> None:
        """Make a call once all uses that are noted so far are counted."""
        self.waiting.append(_Use((), 0, None, then=call))

    def count(self) -> None:
        """Count some of the noted blocks. The last block of a prefix is counted first, so that it
        is evicted first."""
        blocks = share_of(self._backlog, _BLOCKS) if self.waiting else 0
        while self.waiting and blocks > 0:
            use = self.waiting[0]
            stop, use.left = use.left, max(0, use.left - blocks)
            part = use.keys[use.left : stop]
            blocks -= len(part)
            self._backlog -= len(part)
            self._count_part(use, part)
            if use.left == 0:
                self.waiting.popleft()
                for demoter in use.lacking:
                    demoter.complete(use.keys)
                if use.then is not None:
                    use.then()

    def clear(self) -> None:
        """Discard all noted uses, because the arena was cleared."""
        self.waiting.clear()
        self._backlog = 0

    def _count_part(self, use: _Use, part: Sequence[bytes]) -> None:
        if use.hit is None:
            self._index.touch(part)
        else:
            self._index.hit(part, use.hit)
        for tier in self._tiers:
            tier.touch(part)
        for demoter in self._demoters if use.hit is not None else ():
            if demoter not in use.lacking and demoter.lacks_any(part):
                use.lacking.append(demoter)
