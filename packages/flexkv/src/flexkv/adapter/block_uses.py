# SPDX-License-Identifier: Apache-2.0
"""Records the step that last used each of the engine's blocks. Loads into them must follow it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence, Set

from flexkv.adapter.orders import EVERYTHING


class BlockUses:
    """The blocks that the engine's workers know, and the last step that used each other block.

    The caller reports the same blocks that the engine sends to its workers with each step. Workers
    compute on these blocks only. If a step takes a block from its last request, the step before it
    was the last that used the block. No step has used a block that was never reported.

    In doubt, loads follow all steps. A block that a request seems to keep counts as in use.

    Attributes:
        step: number of the step that the engine is preparing; the first is 1.
    """

    def __init__(self) -> None:
        self.step = 0
        self._tables: dict[str, set[int]] = {}
        self._held: set[int] = set()
        self._also_held: Counter[int] = Counter()
        self._touched: set[int] = set()
        self._last: dict[int, int] = {}
        self._lost = False

    def begin_step(self, ended: Iterable[str]) -> None:
        """Begin the next step. The requests `ended` lose their blocks; they may get others."""
        if self._touched:
            self._last.update(dict.fromkeys(self._touched, self.step))
            self._touched.clear()
        self.step += 1
        for request_id in ended:
            self._release(request_id)

    def touched(self, blocks: Iterable[int]) -> None:
        """Record that the workers use these blocks in this step, whichever request has them."""
        self._touched.update(blocks)

    def last_use(self, blocks: Sequence[int]) -> int:
        """The last step that may use any of the blocks; 0 if no step does, EVERYTHING if a request
        has one of them or this object has lost track."""
        if self._lost or not self._held.isdisjoint(blocks):
            return EVERYTHING
        if not self._touched.isdisjoint(blocks):
            return self.step
        return max(map(self._last.get, blocks, itertools.repeat(0)), default=0)

    def give(self, request_id: str, blocks: Iterable[int]) -> None:
        """Record that a request has exactly these blocks in this step."""
        self._release(request_id)
        table = self._tables[request_id] = set(blocks)
        self._hold(table)

    def add(self, request_id: str, blocks: Iterable[int]) -> None:
        """Record that a request gets these further blocks in this step."""
        table = self._tables.get(request_id)
        if table is None:
            self.lose()
            return
        new = set(blocks) - table
        table |= new
        self._hold(new)

    def check(self, computed: Set[str]) -> None:
        """Check that the blocks of all requests that the step computes are known; else `lose`."""
        if not self._tables.keys() >= computed:
            self.lose()

    def lose(self) -> None:
        """Forget all blocks. From now on, loads follow all steps."""
        self._lost = True
        for known in (self._tables, self._held, self._also_held, self._touched, self._last):
            known.clear()

    def _hold(self, new: set[int]) -> None:
        """Record that one more request has each of these blocks."""
        if not self._held.isdisjoint(new):
            self._also_held.update(self._held & new)
        self._held |= new

    def _release(self, request_id: str) -> None:
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        self._last.update(dict.fromkeys(table, self.step - 1))
        shared = self._also_held.keys() & table
        self._held -= table - shared
        for block in shared:
            self._also_held[block] -= 1
            if not self._also_held[block]:
                del self._also_held[block]
