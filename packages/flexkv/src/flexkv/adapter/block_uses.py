# SPDX-License-Identifier: Apache-2.0
"""The step that last used each of the engine's blocks: what a load into them must follow."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence, Set

from flexkv.adapter.orders import EVERYTHING


class BlockUses:
    """Which blocks the engine's workers know, and until which step they used the others.

    It is told what the workers are told with each step. They compute on these blocks only, so a
    block that no request has any more was last used by the step before the one that took it away.
    A block that it was never told of was not used by any step.

    All doubts end the same way: loads follow everything. A block that a request has seemingly kept
    counts as in use.

    Attributes:
        step: number of the step that is being made; the first is 1.
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
        """The engine makes the next step. In it the requests `ended` have no blocks any more, or
        other ones."""
        self._last.update(dict.fromkeys(self._touched, self.step))
        self._touched.clear()
        self.step += 1
        for request_id in ended:
            self._release(request_id)

    def touched(self, blocks: Iterable[int]) -> None:
        """The workers use these blocks in this step, whoever has them."""
        self._touched.update(blocks)

    def last_use(self, blocks: Sequence[int]) -> int:
        """The last step that may use any of the blocks; 0 if none ever did."""
        if self._lost or not self._held.isdisjoint(blocks):
            return EVERYTHING
        if not self._touched.isdisjoint(blocks):
            return self.step
        return max(map(self._last.get, blocks, itertools.repeat(0)), default=0)

    def give(self, request_id: str, blocks: Iterable[int]) -> None:
        """In this step a request has exactly these blocks."""
        self._release(request_id)
        table = self._tables[request_id] = set(blocks)
        self._hold(table)

    def add(self, request_id: str, blocks: Iterable[int]) -> None:
        """In this step a request has these blocks, too."""
        table = self._tables.get(request_id)
        if table is None:
            self.lose()
            return
        new = set(blocks) - table
        table |= new
        self._hold(new)

    def check(self, computed: Set[str]) -> None:
        """The step computes these requests: their blocks must be known."""
        if not self._tables.keys() >= computed:
            self.lose()

    def lose(self) -> None:
        """What is known here may be wrong, from now on."""
        self._lost = True
        for known in (self._tables, self._held, self._also_held, self._touched, self._last):
            known.clear()

    def _hold(self, new: set[int]) -> None:
        """One more request has each of these blocks."""
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
