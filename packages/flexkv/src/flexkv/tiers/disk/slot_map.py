# SPDX-License-Identifier: Apache-2.0
"""Key to slot, for millions of slots.

A dict would take 42 to 84 bytes for each entry and 32 for its slot number, and would sometimes stop
the scheduler to grow. This map takes 6 to 12 bytes for each slot, beside the list of keys that the
index has anyway. It never grows, because the number of slots is known.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

NO_SLOT = -1


class SlotMap:
    """Finds the slot of a key.

    Args:
        keys: the key of each slot, None for an empty one. The caller changes it; the length is
            fixed.

    Open addressing with linear probing (Knuth, The Art of Computer Programming, volume 3, section
    6.4, algorithms L and R), at most two thirds full.
    """

    __slots__ = ("_keys", "_mask", "_places")

    def __init__(self, keys: list[bytes | None]) -> None:
        self._keys = keys
        self._mask = (1 << (len(keys) * 3 // 2).bit_length()) - 1
        self._places = array("i", [NO_SLOT]) * (self._mask + 1)

    def get(self, key: bytes) -> int:
        """The slot of `key`, or NO_SLOT."""
        places, keys, mask = self._places, self._keys, self._mask
        place = hash(key) & mask
        while (slot := places[place]) >= 0:
            if keys[slot] == key:
                return slot
            place = (place + 1) & mask
        return NO_SLOT

    def get_all(self, wanted: Iterable[bytes]) -> list[int]:
        """The slot of each key, or NO_SLOT."""
        places, keys, mask = self._places, self._keys, self._mask
        found = []
        for key in wanted:
            place = hash(key) & mask
            while (slot := places[place]) >= 0 and keys[slot] != key:
                place = (place + 1) & mask
            found.append(slot)
        return found

    def add(self, key: bytes, slot: int) -> None:
        """Add a key that the map lacks. `keys[slot]` must be that key already."""
        places, mask = self._places, self._mask
        place = hash(key) & mask
        while places[place] >= 0:
            place = (place + 1) & mask
        places[place] = slot

    def remove(self, slot: int) -> None:
        """Remove the key of `slot`. `keys[slot]` must still be that key."""
        places, keys, mask = self._places, self._keys, self._mask
        hole = hash(keys[slot]) & mask
        while places[hole] != slot:
            hole = (hole + 1) & mask
        places[hole] = NO_SLOT
        # Move entries back that the hole would hide from searches that begin before it.
        place = hole
        while (other := places[place := (place + 1) & mask]) >= 0:
            home = hash(keys[other]) & mask
            if (place - home) & mask >= (place - hole) & mask:
                places[hole] = other
                places[place] = NO_SLOT
                hole = place
