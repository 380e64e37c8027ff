# SPDX-License-Identifier: Apache-2.0
"""Blocks that clients want in lower tiers instead of in host memory.

A request that ends has blocks that are still being stored, written or loaded. They leave as soon as
nothing needs them any more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.index.block_index import Block, BlockIndex
from flexkv.transfer.demote import Demoter, EvictionWriteback
from flexkv.types.backlog import share_of

_BLOCKS = 16
"""The least number of blocks that one poll begins to demote. Not tuned."""

_PREFIXES = 64
"""The most prefixes that one poll looks at, whatever else keeps their blocks. Not tuned."""

HELD_SECONDS = 10.0
"""For so long a block that is in use may keep those before it from leaving. Not tuned."""

MOST_KEYS = 1 << 16
"""The most keys that are kept, about 7 MB; the prefixes whose turn it is are forgotten first. Not
tuned."""


@dataclass(slots=True)
class _Asked:
    """Blocks of a prefix that are to leave.

    Attributes:
        keys: of the blocks that have not begun to leave; the last goes first.
        until: time.monotonic(), in seconds, when the rest stays.
    """

    keys: list[bytes]
    until: float


class AskedDemotions:
    """Demotes the blocks of prefixes, the end of a prefix first. A block stays if another block
    builds on it, or if it is pinned, retained or used meanwhile. Single-threaded.

    Args:
        index: index of the arena; the caller's.
        demoters: the writers of all tiers; borrowed.
        writeback: evicts the blocks that a tier has; borrowed.

    Attributes:
        due: whether `follow` may have something to do.
    """

    def __init__(
        self, index: BlockIndex, demoters: Sequence[Demoter], writeback: EvictionWriteback
    ) -> None:
        self.due = False
        self._index = index
        self._demoters = demoters
        self._writeback = writeback
        self._waiting: deque[_Asked] = deque()
        self._count = 0
        self._unseen = 0  # prefixes at which no poll has looked since blocks were last given back

    def note(self, keys: Sequence[bytes]) -> None:
        """Demote the blocks of a prefix in later calls of `follow`.

        Args:
            keys: keys of the prefix, first block first; copied.
        """
        self._waiting.append(_Asked(list(keys), time.monotonic() + HELD_SECONDS))
        self._count += len(keys)
        while self._count > MOST_KEYS:
            self._count -= len(self._waiting.popleft().keys)
        self._unseen += 1
        self.due = True

    def retry(self) -> None:
        """Blocks that were in use may be so no longer."""
        self._unseen = len(self._waiting)
        self.due = bool(self._waiting)

    def follow(self) -> None:
        """Begin to demote some of the blocks. Once each poll."""
        if not self._waiting:
            return
        self.due = False
        now = time.monotonic()
        demoters = [demoter for demoter in self._demoters if not demoter.paused]
        most = share_of(self._count, _BLOCKS) if demoters else 0
        looked = min(len(self._waiting), _PREFIXES)
        for _ in range(looked):
            asked = self._waiting.popleft()
            self._count -= len(asked.keys)
            victims = self._take(asked, most)
            most -= len(victims)
            if victims:
                self._writeback.demote(victims, demoters)
            if asked.keys and now < asked.until:
                self._waiting.append(asked)
                self._count += len(asked.keys)
        self._unseen = max(0, self._unseen - looked)
        self.due = bool(self._waiting and demoters) and (most <= 0 or self._unseen > 0)

    def clear(self) -> None:
        """Discard all prefixes, because the arena was cleared."""
        self._waiting.clear()
        self._count, self._unseen, self.due = 0, 0, False

    def _take(self, asked: _Asked, most: int) -> list[Block]:
        """Lease up to `most` of the blocks, up to one that may not leave now."""
        index, keys, victims = self._index, asked.keys, list[Block]()
        while keys and len(victims) < most:
            victim = index.lease_to_leave(keys[-1])
            if victim is not None:
                victims.append(victim)
            elif keys[-1] in index:
                break
            keys.pop()
        return victims
