# SPDX-License-Identifier: Apache-2.0
"""Lets one eviction policy choose which block of the indexes of a disk tier is evicted next."""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol

from flexkv.eviction import EvictionPolicy
from flexkv.tiers.disk.slot_map import NO_SLOT

_MOST_STEPS = 64
"""Blocks of a prefix that are looked at for one that is ready: more than are written at once,
mostly. Not tuned."""


class PolicedIndex(Protocol):
    """What a `SlotPolicy` asks of an index.

    Attributes:
        stale_blocks: blocks of before a reset that still have a slot.
    """

    stale_blocks: int

    def find(self, key: bytes) -> int:
        """The slot of a block that is not of before a reset, or NO_SLOT."""
        ...

    def set_free(self, slot: int) -> None:
        """The slot is free from now on."""
        ...

    def drop_stale(self, key: bytes) -> None:
        """Forget the block if it is of before a reset."""
        ...


@dataclass(eq=False, slots=True)
class Slots:
    """What a `SlotPolicy` knows of one index.

    Attributes:
        index: the index.
        keys: the key of each slot; the index's.
        uses: the slots in use; the index's.
        waiting: slots without a block that are not free, because blocks build on theirs.
    """

    index: PolicedIndex
    keys: Sequence[bytes | None]
    uses: Container[int]
    waiting: int = 0


class SlotPolicy:
    """Reports the blocks of `SlotIndex`es, one for each directory of a tier, to one policy. Slots
    have numbers over all indexes here: those of an index follow its first one. Single-threaded.

    The policy may evict a ready block that is not in use and on which no block with a slot builds,
    in whatever directory. If such a block is lost all the same, because its bytes are damaged, its
    slot stays empty until the blocks have left that build on it.

    Args:
        policy: decides; owned. It learns uses by `began`, which names all blocks of a request: it
            gets no single hits and touches, and 0 as the number of each use.
        num_slots: slots of one index.
        indexes: how many indexes join, at most.
    """

    def __init__(self, policy: EvictionPolicy, num_slots: int, indexes: int = 1) -> None:
        self.policy = policy
        self._num_slots = num_slots
        self._joined: list[Slots] = []
        self._parents = array("i", [NO_SLOT]) * (num_slots * indexes)
        self._children = array("i", [0]) * (num_slots * indexes)
        # Whether the policy knows the block: it is ready, or was before a reset.
        self._known = bytearray(num_slots * indexes)

    def join(self, slots: Slots) -> int:
        """Report an index, too. Returns the number of its first slot."""
        self._joined.append(slots)
        return (len(self._joined) - 1) * self._num_slots

    def drop_stale(self, key: bytes) -> None:
        """A block of `key` is about to be written: none of before a reset may stay."""
        for slots in self._joined:
            if slots.index.stale_blocks:
                slots.index.drop_stale(key)

    def slot_of(self, key: bytes) -> int:
        """The slot of a block, whichever index has it, or NO_SLOT."""
        for number, slots in enumerate(self._joined):
            if (slot := slots.index.find(key)) != NO_SLOT:
                return number * self._num_slots + slot
        return NO_SLOT

    def hold_parent(self, slot: int) -> None:
        """A block is about to get a slot that builds on the block in `slot`, if that is one."""
        if slot == NO_SLOT:
            return
        if not self._children[slot] and self._known[slot] and not self._is_used(slot):
            self.policy.held(self._key(slot))
        self._children[slot] += 1

    def set_parent(self, slot: int, parent: int) -> None:
        """The block in `slot` builds on that in `parent`, for which `hold_parent` was called."""
        self._parents[slot] = parent

    def release_parent(self, parent: int) -> None:
        """A block that builds on that in `parent` has left."""
        if parent == NO_SLOT:
            return
        self._children[parent] -= 1
        if self._children[parent] or self._is_used(parent):
            return
        if self._known[parent]:
            self.policy.released(self._key(parent), 0)
            return
        number, slot = divmod(parent, self._num_slots)
        slots = self._joined[number]
        if slots.keys[slot] is None:
            slots.waiting -= 1
            slots.index.set_free(slot)

    def published(self, slot: int) -> None:
        """The block in `slot`, which is in use, is ready.

        Writes end in any order. If the block that it builds on is still being written, the policy
        gets the nearest one before that which is ready; later it gets the other as the next one of
        the same.
        """
        before, steps = self._parents[slot], 0
        while before != NO_SLOT and not self._known[before]:
            steps += 1
            before = self._parents[before] if steps < _MOST_STEPS else NO_SLOT
        self._known[slot] = True
        after = None if before == NO_SLOT else self._key(before)
        self.policy.inserted(self._key(slot), after)

    def restored(self, slot: int) -> bool:
        """Report a ready block that was there before this process, unless it has left and another
        has its slot. Those used longest ago come first. Returns False if another index has the
        block, too; then it must leave this one."""
        if self._known[slot]:
            return True
        key = self._key(slot)
        if any(slots.index.find(key) != NO_SLOT for slots in self._others(slot)):
            return False
        self._known[slot] = True
        self.policy.inserted(key, None)
        if not self._children[slot] and not self._is_used(slot):
            self.policy.released(key, 0)
        return True

    def used(self, slot: int) -> None:
        """The slot of a ready block is in use, and was not before."""
        if self._known[slot] and not self._children[slot]:
            self.policy.held(self._key(slot))

    def unused(self, slot: int) -> None:
        """The last use of the slot of a ready block has ended."""
        if self._known[slot] and not self._children[slot]:
            self.policy.released(self._key(slot), 0)

    def left(self, slot: int) -> None:
        """The block in `slot` leaves; called before the index forgets its key and state."""
        if self._known[slot]:
            self._known[slot] = False
            self.policy.evicted(self._key(slot))
        parent, self._parents[slot] = self._parents[slot], NO_SLOT
        self.release_parent(parent)

    def is_needed(self, slot: int) -> bool:
        """Whether blocks build on that in `slot`."""
        return self._children[slot] > 0

    def keeps(self, slot: int) -> bool:
        """Whether a slot without a block, whose last use has ended, must stay empty; it then counts
        as waiting."""
        if not self._children[slot]:
            return False
        self._joined[slot // self._num_slots].waiting += 1
        return True

    def victim(self) -> bytes | None:
        """Key of the block to evict next; None if none may be."""
        return self.policy.victim()

    def _others(self, slot: int) -> Sequence[Slots]:
        number = slot // self._num_slots
        return self._joined[:number] + self._joined[number + 1 :]

    def _is_used(self, slot: int) -> bool:
        number, at = divmod(slot, self._num_slots)
        return at in self._joined[number].uses

    def _key(self, slot: int) -> bytes:
        number, at = divmod(slot, self._num_slots)
        key = self._joined[number].keys[at]
        assert key is not None
        return key
