# SPDX-License-Identifier: Apache-2.0
"""The times at which the blocks of a disk store were stored, by slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from flexkv.tiers.disk.slot_index import SlotIndex
from flexkv.types.ages import UNIT_SECONDS, UNKNOWN, BlockAges

_SEARCHED_SLOTS = 1 << 20
"""Slots that are searched at once: 1 ms on a cloud machine's core."""

_Record = tuple[int, bytes, bytes, int, int]


class SlotAges:
    """Drops the blocks that are too old. Takes 4 bytes for each slot. Single-threaded.

    Args:
        ages: of the cache; shared with the other directories.
        num_slots: slots of the store.

    Attributes:
        old_slots: slots of records that were too old when the store was opened.
    """

    def __init__(self, ages: BlockAges, num_slots: int) -> None:
        self._ages = ages
        self._stored = np.zeros(num_slots, np.uint32)
        self._next = 0
        self.old_slots: list[int] = []

    def restore(self, records: Iterable[_Record]) -> Iterator[tuple[int, bytes, bytes, int]]:
        """Note the times of records as they are read. Yields slot, key, checksum and generation of
        those that are not too old."""
        whole = list(records)
        # A record of a time to come says that the clock has fallen.
        self._ages.at_least(UNIT_SECONDS * max((units for *_, units in whole), default=UNKNOWN))
        oldest = self._ages.oldest
        for slot, key, checksum, generation, units in whole:
            stored = UNIT_SECONDS * units
            if stored < oldest:
                self.old_slots.append(slot)
                continue
            self._stored[slot] = stored
            yield slot, key, checksum, generation

    def written(self, slots: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """Blocks of host memory are about to be written to these slots. Returns what their records
        have of their times."""
        stored = self._ages.of(keys)
        self._stored[slots] = stored
        return [at // UNIT_SECONDS for at in stored]

    def of_slot(self, slot: int) -> int:
        """What the record of a slot has of the time of its block."""
        return int(self._stored[slot]) // UNIT_SECONDS

    def fetched(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """These blocks come into host memory."""
        self._ages.note(keys, self._stored[slots].tolist())

    def present(self, index: SlotIndex, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether its block is ready and not too old."""
        oldest, stored = self._ages.oldest, self._stored
        return [slot is not None and stored[slot] >= oldest for slot in index.ready_slots(keys)]

    def take_old(self, index: SlotIndex, most: int) -> list[bytes]:
        """Up to `most` keys of blocks that are too old, of a part of the slots. The caller removes
        these."""
        stop = min(self._next + _SEARCHED_SLOTS, len(self._stored))
        part = self._stored[self._next : stop]
        found = np.flatnonzero((part != UNKNOWN) & (part < self._ages.oldest))[:most]
        slots = (found + self._next).tolist()
        part[found] = UNKNOWN
        if len(slots) < most:
            self._next = stop % len(self._stored)
        keys = [index.key_of(slot) for slot in slots]
        return [key for key in keys if key is not None]
