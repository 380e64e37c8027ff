# SPDX-License-Identifier: Apache-2.0
"""Hands the descriptions of a store's slots from the thread that reads them to the one that reports
their blocks, in the order of the slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

_PARTS_AHEAD = 2
"""Parts that are read before their blocks are reported; see `Descriptions.read`. Not tuned."""

_BYTES_PER_CALL = 1 << 14
_BLOCKS_PER_CALL = 64
"""The most descriptions that one call reports. Their events take about 0.5 ms: 8 us for a block of
16 tokens, 40 us for one of 256."""

Part = tuple[int, dict[bytes, bytes]]


class DescribedSlots:
    """The descriptions of slots that are read and not reported. One thread calls `read_part` and
    `stop`, another one all other methods. None waits for the other.

    Args:
        parts: the slot after those of each part, and its texts by key; None if there are none.
        num_slots: slots of the store.

    Attributes:
        stop_slot: the slot after those whose blocks can be reported.
    """

    def __init__(self, parts: Iterator[Part] | None, num_slots: int) -> None:
        self._unread = parts
        self._num_slots = num_slots
        self._parts: deque[Part] = deque()
        self.stop_slot = 0 if parts is not None else num_slots

    @property
    def is_wanted(self) -> bool:
        """Whether the next part is to be read."""
        return self._unread is not None and len(self._parts) < _PARTS_AHEAD

    def read_part(self) -> None:
        """Read the next part; waits for the disk."""
        part = None if self._unread is None else next(self._unread, None)
        if part is None:
            self.stop()
        else:
            self._parts.append(part)
            self.stop_slot = part[0]

    def stop(self) -> None:
        """Read no more. The blocks of the other slots are reported without descriptions."""
        self._unread = None
        self.stop_slot = self._num_slots

    def limit(self, blocks: int) -> int:
        """How many of so many blocks can be reported with one call."""
        if not self._parts:
            return blocks
        texts = self._parts[0][1].values()
        longest = max(map(len, texts), default=1)
        return min(blocks, _BLOCKS_PER_CALL, max(1, _BYTES_PER_CALL // longest))

    def take(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """The descriptions of blocks, as far as they were read and not taken."""
        taken: dict[bytes, bytes] = {}
        for key in keys if self._parts else ():
            for _, texts in self._parts:
                text = texts.pop(key, None)
                if text is not None:
                    taken[key] = text
        return taken

    def forget(self, slots: int) -> None:
        """Forget the descriptions of so many slots, which are reported."""
        while self._parts and self._parts[0][0] <= slots:
            self._parts.popleft()
