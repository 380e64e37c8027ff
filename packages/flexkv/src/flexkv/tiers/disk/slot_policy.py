# SPDX-License-Identifier: Apache-2.0
"""Lets an eviction policy choose which block of a disk's index is evicted next."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Sequence

from flexkv.eviction import EvictionPolicy
from flexkv.tiers.disk.slot_map import NO_SLOT


class SlotPolicy:
    """Reports the blocks of a `SlotIndex` to a policy. Single-threaded.

    The policy may evict a ready block that is not in use and on which no block with a slot builds.
    If such a block is lost all the same, because its bytes are damaged, its slot stays empty until
    the blocks have left that build on it.

    Args:
        policy: decides; owned. It learns uses by `began`, which names all blocks of a request: it
            gets no single hits and touches, and 0 as the number of each use.
        keys: the key of each slot; the index's.
        states: the state of each slot, even if the policy knows its block; the index's.
        uses: the slots in use; the index's.

    Attributes:
        waiting_slots: slots without a block that are not free, because blocks build on theirs.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        keys: Sequence[bytes | None],
        states: Sequence[int],
        uses: Container[int],
    ) -> None:
        self.policy = policy
        self.waiting_slots = 0
        self._keys = keys
        self._states = states
        self._uses = uses
        self._parents = array("i", [NO_SLOT]) * len(keys)
        self._children = array("i", [0]) * len(keys)

    def hold_parent(self, slot: int) -> None:
        """A block is about to get a slot that builds on the block in `slot`, if that is one."""
        if slot == NO_SLOT:
            return
        if not self._children[slot] and slot not in self._uses and self._is_known(slot):
            self.policy.held(self._key(slot))
        self._children[slot] += 1

    def set_parent(self, slot: int, parent: int) -> None:
        """The block in `slot` builds on that in `parent`, for which `hold_parent` was called."""
        self._parents[slot] = parent

    def release_parent(self, parent: int) -> int:
        """A block that builds on that in `parent` has left. Returns the slot that became free by
        it, or NO_SLOT."""
        if parent == NO_SLOT:
            return NO_SLOT
        self._children[parent] -= 1
        if self._children[parent] or parent in self._uses:
            return NO_SLOT
        if self._is_known(parent):
            self.policy.released(self._key(parent), 0)
        elif self._keys[parent] is None:
            self.waiting_slots -= 1
            return parent
        return NO_SLOT

    def published(self, slot: int) -> None:
        """The block in `slot`, which is in use, is ready."""
        parent = self._parents[slot]
        after = None if parent == NO_SLOT else self._keys[parent]
        self.policy.inserted(self._key(slot), after)

    def restored(self, slots: Iterable[int]) -> None:
        """The blocks in `slots` were there before this process, those used longest ago first."""
        inserted, released = self.policy.inserted, self.policy.released
        for slot in slots:
            key = self._key(slot)
            inserted(key, None)
            released(key, 0)

    def used(self, slot: int) -> None:
        """The slot of a ready block is in use, and was not before."""
        if not self._children[slot]:
            self.policy.held(self._key(slot))

    def unused(self, slot: int) -> None:
        """The last use of the slot of a ready block has ended."""
        if not self._children[slot]:
            self.policy.released(self._key(slot), 0)

    def left(self, slot: int) -> int:
        """The block in `slot` leaves; called before the index forgets its key and state. Returns
        the slot of another block that becomes free by it, or NO_SLOT."""
        if self._is_known(slot):
            self.policy.evicted(self._key(slot))
        parent, self._parents[slot] = self._parents[slot], NO_SLOT
        return self.release_parent(parent)

    def keeps(self, slot: int) -> bool:
        """Whether a slot without a block, whose last use has ended, must stay empty; it then counts
        as waiting."""
        if not self._children[slot]:
            return False
        self.waiting_slots += 1
        return True

    def victim(self) -> bytes | None:
        """Key of the block to evict next; None if none may be."""
        return self.policy.victim()

    def _is_known(self, slot: int) -> bool:
        """Whether the policy knows the block in `slot`: it is ready, or was before a reset."""
        state = self._states[slot]
        return state != 0 and state % 2 == 0

    def _key(self, slot: int) -> bytes:
        key = self._keys[slot]
        assert key is not None
        return key
