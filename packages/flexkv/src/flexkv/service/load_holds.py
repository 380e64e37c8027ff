# SPDX-License-Identifier: Apache-2.0
"""The slots that the loads of one engine hold, and how many they may."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.index.block_index import IndexReader
from flexkv.service.engine_page import LOADS, MOST_HELD


def most_at_once(most_held: int) -> int:
    """The slots that a load may hold if it is the only one: so a long prompt is a hit in a small
    pool, too.

    Args:
        most_held: see `engine_page.MOST_HELD`.
    """
    return 2 * most_held


class LoadHolds:
    """The holds of an engine that keeps the service's limit. Single-threaded.

    Args:
        reader: of the pool's index; borrowed.
        bell: see `EnginePage`; borrowed.
    """

    def __init__(self, reader: IndexReader, bell: memoryview) -> None:
        self._reader = reader
        self._bell = bell

    @property
    def room(self) -> int | None:
        """How many further slots a load may hold now. None if there is no limit."""
        most, held = self._bell[MOST_HELD], self._reader.held_slots
        if not most:
            return None
        return max(0, most - held) if held else most_at_once(most)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """The number of blocks that can be loaded, from the first key on."""
        found, room = self._reader.lookup(keys), self.room
        if room is None or found <= room:
            return found
        slots = self._lease(keys[:found])  # loads may hold some of them already
        if not slots:
            return room
        self._reader.release(slots)
        return found

    def lease(self, keys: Sequence[bytes]) -> list[int] | None:
        """Hold the blocks of `keys`, until `release`. Returns their slots; None, and holds nothing,
        if one of them is not ready, or they would be too many."""
        slots = self._lease(keys) if self._bell[MOST_HELD] else self._reader.lease(keys)
        if slots:
            self._count()
        return slots

    def release(self, slots: Sequence[int]) -> None:
        """End a hold of each slot."""
        self._reader.release(slots)
        self._count()

    def settle(self, slots: Sequence[int]) -> None:
        """See `IndexReader.settle`."""
        self._reader.settle(slots)
        self._count()

    def _lease(self, keys: Sequence[bytes]) -> list[int] | None:
        held, room = self._reader.held_slots, self.room
        slots = self._reader.lease(keys)
        if slots and room is not None and self._reader.held_slots - held > room:
            self._reader.release(slots)
            return None
        return slots

    def _count(self) -> None:
        self._bell[LOADS] = (self._bell[LOADS] + 1) % (1 << 32)
