# SPDX-License-Identifier: Apache-2.0
"""What an engine holds of a pool, as the service sees it in the engine's page, and its limit."""

from __future__ import annotations

import logging

import numpy as np

from flexkv.service.engine_page import LOADS, MOST_HELD, EnginePage
from flexkv.service.load_holds import most_at_once

logger = logging.getLogger(__name__)

_SHARE = 4
"""Of a pool's slots, the loads of an engine may hold one of so many if there are other engines. Not
tuned."""

STALLED_SECONDS = 10.0
"""Loads of an engine that begins and ends none for so long are stalled: a load takes milliseconds.
Not tuned."""


class EngineHolds:
    """The holds of one engine. Single-threaded.

    A slot that an engine holds is never given away, whatever the limit: the engine may read it. The
    service limits what else the engine gets.

    Args:
        page: the engine's; borrowed.
        num_slots: slots of the pool.
        name: the engine's id, for logs.
    """

    def __init__(self, page: EnginePage, num_slots: int, name: str) -> None:
        self._holds = np.frombuffer(page.holds, np.uint16)
        self._bell = page.bell
        self._num_slots = num_slots
        self._name = name
        self._most = 0
        self._loads = self._bell[LOADS]
        self._changed_at: float | None = None
        self._is_over = False

    @property
    def slots(self) -> int:
        """How many slots it holds; takes O(slots)."""
        return int(np.count_nonzero(self._holds))

    @property
    def is_over(self) -> bool:
        """Whether it held more than any engine should, at the last `look`."""
        return self._is_over

    def limit(self, engines: int) -> None:
        """Tell the engine how much it may hold, for so many engines of the pool. One alone may hold
        all."""
        self._most = max(1, self._num_slots // _SHARE) if engines > 1 else 0
        self._bell[MOST_HELD] = self._most

    def allows(self, others: int, blocks: int) -> bool:
        """Whether a fetch of so many blocks may begin or go on beside those of `others` blocks."""
        most = self._most if others else most_at_once(self._most)
        return not self._is_over and (not most or others + blocks <= most)

    def look(self, now: float, *, is_short: bool) -> None:
        """Look at what it holds.

        Args:
            now: time.monotonic().
            is_short: whether evictions have met many slots that engines hold.
        """
        loads = self._bell[LOADS]
        if loads != self._loads or self._changed_at is None:
            self._loads, self._changed_at = loads, now
        if not (is_short or self._is_over):
            return
        most, held = most_at_once(self._most), self.slots
        was_over, self._is_over = self._is_over, 0 < most < held
        if self._is_over and not was_over:
            logger.warning(
                "engine %r holds %d of the pool's %d blocks for its loads; allowed: %d; it gets no "
                "further slots for stores and no fetches until it holds fewer; restart it if it "
                "hangs",
                self._name,
                held,
                self._num_slots,
                most,
            )

    def is_stalled(self, now: float) -> bool:
        """Whether loads that it may have do not end."""
        return self._changed_at is not None and now - self._changed_at > STALLED_SECONDS
