# SPDX-License-Identifier: Apache-2.0
"""The index of a disk store: which block is in which slot, and which is evicted next.

It is made for millions of slots: it has no object for each block except the key. With keys of 32
bytes it takes about 120 bytes for each slot, and about 100 more with a policy;
`bench/disk_index.py` measures that.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

from flexkv.eviction import EvictionPolicy, LRUPolicy, OnePolicy, RequestContext
from flexkv.tiers.disk.slot_map import NO_SLOT, SlotMap
from flexkv.tiers.disk.slot_policy import SlotPolicy, Slots
from flexkv.tiers.disk.table import CHECKSUM_BYTES
from flexkv.types.changes import note, take_oldest

_NONE = 0
"""The state of a slot without a block. The other states are odd while the block is written and even
when it is ready; each reset begins two new ones."""

_LAST_STATE = (1 << 16) - 2
"""The largest even state. A state takes two bytes."""

_MOST_STEPS = 256
"""Blocks that are looked at for one to evict if that of the policy is in another directory. Not
tuned."""

_NOTED_SLOTS = 8192
"""Slots that a drain of changes looks at for blocks that were there before `watch`: about 1 ms. Not
tuned."""


class SlotIndex:
    """Keys, slots, checksums and order of use of one store. Without I/O; single-threaded.

    A slot is free, being written, or ready. A slot in use, which is one being read or written, is
    not evicted. If the block of a slot in use is removed, the slot becomes free with its last use.
    Without a policy, the least recently used block is evicted first.

    A reset takes the same time for any number of blocks. It makes them stale: no call finds them,
    and their slots are reused before those of later blocks, because none was used as long ago.

    Args:
        num_slots: slots of the store.
        policy: chooses the block that is evicted next; see `SlotPolicy`. None for LRU, too, until
            `follow`.

    Attributes:
        num_slots: slots of the store.
        stale_blocks: blocks of before a reset that still have a slot.
        evictions: blocks evicted so far.
        noted_slots: slots, from the first on, whose changes are noted as they occur. Drains note
            the blocks of later slots.
    """

    def __init__(self, num_slots: int, policy: OnePolicy | None = None) -> None:
        self.num_slots = num_slots
        self.stale_blocks = 0
        self.evictions = 0
        self._changes: dict[bytes, bool] | None = None  # None when not watched
        self.noted_slots = 0
        self._keys: list[bytes | None] = [None] * num_slots
        self._slots = SlotMap(self._keys)
        self._states = array("H", bytes(2 * num_slots))
        self._writing, self._ready = 1, 2
        self._blocks = 0  # with a slot, stale ones included
        self._ready_blocks = 0
        self._checksums = bytearray(num_slots * CHECKSUM_BYTES)
        # For each slot, how many writes had begun when its record was written.
        self._writes = 0
        self._recorded = array("q", bytes(8 * num_slots))
        self._uses: dict[int, int] = {}
        # Blocks in order of use, as a ring through one slot that does not exist; free slots as a
        # chain through `_next`.
        self._next = array("i", range(1, num_slots + 2))
        self._previous = array("i", bytes(4 * (num_slots + 1)))
        self._ring = num_slots
        self._next[self._ring] = self._previous[self._ring] = self._ring
        self._free = 0 if num_slots else NO_SLOT
        if num_slots:
            self._next[num_slots - 1] = NO_SLOT
        self._used_slots = 0
        self._restored = array("i")  # slots that `report_restored` has to report, newest first
        self._policy: SlotPolicy | None = None
        self._first = 0  # number of the first slot in the policy
        self._own = Slots(self, self._keys, self._uses)
        if policy is not None and not isinstance(policy, LRUPolicy):
            self.follow(SlotPolicy(policy, num_slots))

    def __len__(self) -> int:
        """The number of ready blocks."""
        return self._ready_blocks

    def __contains__(self, key: bytes) -> bool:
        """Whether the block is ready."""
        return self._find_ready(key) != NO_SLOT

    def present(self, keys: Iterable[bytes]) -> list[bool]:
        """For each key whether its block is ready."""
        states, ready = self._states, self._ready
        return [slot >= 0 and states[slot] == ready for slot in self._slots.get_all(keys)]

    def ready_slots(self, keys: Iterable[bytes]) -> list[int | None]:
        """The slot of each block; None if the block is not ready."""
        states, ready = self._states, self._ready
        return [
            slot if slot >= 0 and states[slot] == ready else None
            for slot in self._slots.get_all(keys)
        ]

    @property
    def free_slots(self) -> int:
        return self.num_slots - self._used_slots

    @property
    def usable_slots(self) -> int:
        """The number of slots that `reserve` can return: those that are not in use."""
        return self.num_slots - len(self._uses) - self._own.waiting

    @property
    def policy(self) -> EvictionPolicy | None:
        """What chooses the blocks to evict; None for LRU."""
        return None if self._policy is None else self._policy.policy

    @property
    def has_room(self) -> bool:
        """Whether a reservation evicts no block that can be found."""
        return self._free != NO_SLOT or self.stale_blocks > 0

    @property
    def has_victim(self) -> bool:
        """Whether the block is here that the policy would evict next."""
        key = None if self._policy is None else self._policy.victim()
        return key is not None and self._slots.get(key) != NO_SLOT

    @property
    def is_reporting(self) -> bool:
        """Whether `report_restored` has blocks to report."""
        return len(self._restored) > 0

    def follow(self, policy: SlotPolicy | None) -> None:
        """Evict by this policy from now on; None for LRU. The index follows none yet."""
        self._policy = policy
        if policy is None:
            self._restored = array("i")
            return
        self._first = policy.join(self._own)

    def report_restored(self, limit: int) -> None:
        """Report up to `limit` of the blocks that `restore` has found to the policy, those used
        longest ago first. A block leaves that another directory has, too."""
        policy = self._policy
        assert policy is not None
        for _ in range(min(limit, len(self._restored))):
            slot = self._restored.pop()
            is_ready = self._states[slot] == self._ready
            if is_ready and not policy.restored(self._first + slot):
                self._expel(slot)

    def began(self, keys: Sequence[bytes], context: RequestContext, now: float) -> None:
        """See `EvictionPolicy.began`; `keys` are all blocks of the prompt."""
        if self._policy is not None:
            self._policy.policy.began(keys, context, now)

    def ended(self, request_id: str, output_tokens: int, now: float) -> None:
        """See `EvictionPolicy.ended`."""
        if self._policy is not None:
            self._policy.policy.ended(request_id, output_tokens, now)

    def watch(self) -> None:
        """Record changes for `drain_changes` from now on. All ready blocks count as changes. It
        takes the same time for any number of blocks."""
        self._changes = {}
        self.noted_slots = 0 if self._blocks else self.num_slots

    @property
    def has_changes(self) -> bool:
        """Whether `drain_changes` may return any."""
        return self.has_changes_before(self.num_slots)

    def has_changes_before(self, stop: int) -> bool:
        """Whether `drain_changes` may return any with this `stop`."""
        if self._changes is None:
            return False
        return bool(self._changes or self.stale_blocks or self.noted_slots < stop)

    def drain_changes(self, limit: int, stop: int | None = None) -> dict[bytes, bool]:
        """Up to `limit` blocks that became ready or left since the last call, the oldest change
        first; for the key of each whether it became ready. Blocks that were there before `watch`
        only come from slots before `stop`. Empty without `watch`."""
        if self._changes is None:
            return {}
        self.sweep(limit)
        self._note_first_blocks(self._changes, limit, self.num_slots if stop is None else stop)
        return take_oldest(self._changes, limit)

    def is_reported(self, key: bytes) -> bool:
        """Whether the block is ready by the changes that `drain_changes` has returned."""
        slot = self._slots.get(key)
        is_noted = 0 <= slot < self.noted_slots and self._states[slot] % 2 == 0
        return is_noted != (key in (self._changes or ()))

    def has_all(self, keys: Iterable[bytes]) -> list[bool]:
        """For each key whether its block is ready or being written."""
        states, least = self._states, self._writing
        return [slot >= 0 and states[slot] >= least for slot in self._slots.get_all(keys)]

    def restore(self, records: Iterable[tuple[int, bytes, bytes, int]]) -> tuple[int, list[int]]:
        """Fill an empty index with the records of a table.

        If several records have one key, the latest counts. A block of an earlier generation counts
        as used longer ago.

        Args:
            records: slot, key, checksum and generation of each.

        Returns:
            The greatest generation, 0 if there is none; and the slots of the records that do not
            count.
        """
        outdated = []
        width = CHECKSUM_BYTES
        slots, keys, checksums = self._slots, self._keys, self._checksums
        generations = array("Q", bytes(8 * self.num_slots))
        for slot, key, checksum, generation in records:
            known = slots.get(key)
            if known != NO_SLOT:
                if generations[known] >= generation:
                    outdated.append(slot)
                    continue
                outdated.append(known)
                slots.remove(known)
                keys[known] = None
            keys[slot] = key
            slots.add(key, slot)
            generations[slot] = generation
            checksums[slot * width : (slot + 1) * width] = checksum
        used = [slot for slot, key in enumerate(keys) if key is not None]
        for slot in used:
            self._states[slot] = self._ready
        self._blocks = self._ready_blocks = len(used)
        used.sort(key=generations.__getitem__)
        for age, slot in enumerate(reversed(used)):
            self._recorded[slot] = -age
        self._relink(used)
        self._restored = array("i", reversed(used))
        if self._policy is not None:
            self.report_restored(len(used))
        return max(generations, default=0), outdated

    def reserve(
        self, key: bytes, behind: int | None = None, after: bytes | None = None
    ) -> int | None:
        """Reserve a slot to write the block of `key` to. If none is free, a block is evicted.

        Args:
            key: key of a block that is neither ready nor being written.
            behind: a slot in use. The block counts as used just before the block there; if None, as
                used now.
            after: key of the block that it builds on, before which it counts as used if that is
                here; None if that is unknown, or there is none.

        Returns:
            The slot, in use until `release`; None if every other one is in use or, without a
            policy, has a block that was used since the one that this block builds on.
        """
        policy = self._policy
        if policy is None:
            self.drop_stale(key)
            before = NO_SLOT if after is None else self.find(after)
            if self._free == NO_SLOT and not self._evict_oldest(before):
                return None
            behind = behind if before == NO_SLOT else before
        else:
            policy.drop_stale(key)
            parent = NO_SLOT if after is None else policy.slot_of(after)
            policy.hold_parent(parent)
            if not self._make_room(policy):
                policy.release_parent(parent)
                return None
            policy.set_parent(self._first + self._free, parent)
        slot = self._free
        self._free = self._next[slot]
        self._used_slots += 1
        self._writes += 1
        self._recorded[slot] = self._writes
        self._keys[slot] = key
        self._slots.add(key, slot)
        self._states[slot] = self._writing
        self._blocks += 1
        self._uses[slot] = 1
        self._link(slot, self._ring if behind is None else behind)
        return slot

    def reserve_all(
        self, keys: Sequence[bytes], after: Sequence[bytes | None] | None = None
    ) -> list[int]:
        """Reserve slots for blocks of a prefix, in its order. Each block counts as used just before
        the one before it. Ends with the first block that gets no slot.

        Args:
            keys: as in `reserve`.
            after: for each of them the key of the block that it builds on; see `reserve`.
        """
        slots: list[int] = []
        last = None
        for key, before in zip(keys, after or itertools.repeat(None), strict=False):
            last = self.reserve(key, last, before)
            if last is None:
                break
            slots.append(last)
        return slots

    def publish(self, slot: int, checksum: bytes) -> bool:
        """Make the block of a written slot ready, and end this use of the slot.

        Args:
            slot: the slot, as `reserve` returned it.
            checksum: checksum of the block's bytes.

        Returns:
            False if the block was removed meanwhile. Then the slot stays in use.
        """
        if self._states[slot] != self._writing:
            return False
        self._states[slot] = self._ready
        self._ready_blocks += 1
        start = slot * CHECKSUM_BYTES
        self._checksums[start : start + CHECKSUM_BYTES] = checksum
        self._note(slot, True)
        if self._policy is not None:
            self._policy.published(self._first + slot)
        self.release(slot)
        return True

    def lease(self, key: bytes) -> int | None:
        """Protect a ready block from eviction until `release`. Returns its slot; None if the block
        is not ready."""
        slot = self._find_ready(key)
        if slot == NO_SLOT:
            return None
        number = self._uses.get(slot, 0)
        if not number and self._policy is not None:
            self._policy.used(self._first + slot)
        self._uses[slot] = number + 1
        return slot

    def lease_all(self, keys: Sequence[bytes]) -> list[int | None]:
        """`lease` for each key."""
        states, ready, uses, policy = self._states, self._ready, self._uses, self._policy
        slots: list[int | None] = []
        for slot in self._slots.get_all(keys):
            if slot >= 0 and states[slot] == ready:
                number = uses.get(slot, 0)
                if not number and policy is not None:
                    policy.used(self._first + slot)
                uses[slot] = number + 1
                slots.append(slot)
            else:
                slots.append(None)
        return slots

    def release(self, slot: int) -> None:
        """End one use of `slot`."""
        uses = self._uses[slot] - 1
        if uses:
            self._uses[slot] = uses
            return
        del self._uses[slot]
        if self._states[slot] != self._ready:
            self._expel(slot)
        elif self._policy is not None:
            self._policy.unused(self._first + slot)

    def key_of(self, slot: int) -> bytes | None:
        """The key of the block in a slot; None if it has none."""
        return self._keys[slot]

    def checksum(self, slot: int) -> bytes:
        """The checksum that the bytes of a ready slot must have."""
        start = slot * CHECKSUM_BYTES
        return bytes(self._checksums[start : start + CHECKSUM_BYTES])

    def checksums(self, slots: Iterable[int]) -> list[bytes]:
        """The `checksum` of each slot."""
        known, size = self._checksums, CHECKSUM_BYTES
        return [bytes(known[slot * size : (slot + 1) * size]) for slot in slots]

    def touch(self, keys: Sequence[bytes]) -> list[bytes]:
        """Count the blocks of a prefix as used, also while they are written. The first block counts
        last, so that the prefix is evicted from its end.

        Returns:
            Keys of the blocks whose records must be written again, in that order. A record is
            written again once as many writes as half of all slots have begun since: after a
            restart, the order of the records is the order of use. The blocks before such a block
            are among them, so that they are not evicted before it.
        """
        outdated: list[bytes] = []
        following, previous, ring = self._next, self._previous, self._ring
        oldest = self._writes - self.num_slots // 2
        for key, slot in zip(reversed(keys), self._slots.get_all(reversed(keys)), strict=True):
            if slot == NO_SLOT or self._states[slot] < self._writing:
                continue
            # `_unlink` and `_link`, without two calls for each block of a prefix.
            before, after = previous[slot], following[slot]
            following[before], previous[after] = after, before
            newest = following[ring]
            following[slot], previous[slot] = newest, ring
            previous[newest] = following[ring] = slot
            if self._states[slot] == self._ready and (outdated or self._recorded[slot] < oldest):
                self._recorded[slot] = self._writes
                outdated.append(key)
        return outdated

    def discard(self, slot: int) -> None:
        """Forget the block in a slot in use."""
        self._forget(slot)

    def end_uses(self, used: Iterable[int]) -> list[int]:
        """End all uses of slots but those in `used`, each of which is one, after an error that may
        have lost some.

        Returns:
            Slots whose blocks were being written or are forgotten, and whose records are to be
            erased. Each stays in use until `release`.
        """
        held = Counter(used)
        erased = [
            slot for slot in self._uses if self._states[slot] != self._ready and slot not in held
        ]
        for slot in erased:
            self._forget(slot)
        held.update(erased)
        before = set(self._uses)
        self._uses.clear()
        self._uses.update(held)
        if self._policy is not None:
            for slot in before ^ held.keys():
                if self._states[slot] == self._ready:
                    report = self._policy.used if slot in held else self._policy.unused
                    report(self._first + slot)
        return erased

    def clear(self) -> None:
        """Forget every block. Those that were ready count as changes once `sweep` has come to
        them, or their slots are reused."""
        self._writing += 2
        self._ready += 2
        self.stale_blocks = self._blocks
        self._ready_blocks = 0
        if self._ready > _LAST_STATE:
            self.sweep(self.num_slots)
            self._writing, self._ready = 1, 2

    def sweep(self, limit: int) -> None:
        """Free the slots of up to `limit` stale blocks."""
        for _ in range(min(limit, self.stale_blocks)):
            self._expel(self._previous[self._ring])

    def find(self, key: bytes) -> int:
        """See `PolicedIndex.find`."""
        slot = self._slots.get(key)
        return slot if slot >= 0 and self._states[slot] >= self._writing else NO_SLOT

    def drop_stale(self, key: bytes) -> None:
        """See `PolicedIndex.drop_stale`."""
        slot = self._slots.get(key) if self.stale_blocks else NO_SLOT
        if slot != NO_SLOT and self._states[slot] < self._writing:
            self._expel(slot)

    def set_free(self, slot: int) -> None:
        """See `PolicedIndex.set_free`."""
        self._next[slot] = self._free
        self._free = slot
        self._used_slots -= 1

    def _note(self, slot: int, ready: bool) -> None:
        key = self._keys[slot]
        if self._changes is not None and slot < self.noted_slots and key is not None:
            note(self._changes, key, ready)

    def _note_first_blocks(self, changes: dict[bytes, bool], limit: int, stop: int) -> None:
        """Note ready blocks that `watch` has found, a part of the slots at a time. Stale blocks
        leave before: nobody knows of those in later slots."""
        end = min(self.noted_slots + _NOTED_SLOTS, stop)
        while len(changes) < limit and self.noted_slots < end and not self.stale_blocks:
            slot = self.noted_slots
            self.noted_slots += 1
            if self._states[slot] == self._ready:
                self._note(slot, True)

    def _find_ready(self, key: bytes) -> int:
        slot = self._slots.get(key)
        return slot if slot >= 0 and self._states[slot] == self._ready else NO_SLOT

    def _forget(self, slot: int) -> None:
        state = self._states[slot]
        if state == _NONE:
            return
        if state == self._ready:
            self._ready_blocks -= 1
        if state % 2 == 0:
            self._note(slot, False)
        if self._policy is not None:
            self._policy.left(self._first + slot)
        self.stale_blocks -= state < self._writing
        self._blocks -= 1
        self._states[slot] = _NONE
        self._slots.remove(slot)
        self._keys[slot] = None
        self._unlink(slot)

    def _oldest(self, before: int = NO_SLOT) -> int:
        """The slot of the least recently used block that is not in use, and was used before that of
        the slot `before`; or NO_SLOT."""
        slot = self._previous[self._ring]
        while slot in self._uses and slot != before:
            slot = self._previous[slot]
        return NO_SLOT if slot in (self._ring, before) else slot

    def _evict_oldest(self, before: int) -> bool:
        """Evict by LRU a block that was used before that of a slot. Whether a slot is free now."""
        slot = self._oldest(before)
        if slot != NO_SLOT:
            self.evictions += self._states[slot] >= self._writing
            self._expel(slot)
        return slot != NO_SLOT

    def _make_room(self, policy: SlotPolicy) -> bool:
        """Evict by the policy, unless a slot is free. Whether one is now."""
        while self._free == NO_SLOT:
            stale = self._oldest() if self.stale_blocks else NO_SLOT
            if stale != NO_SLOT and self._states[stale] < self._writing:
                self._expel(stale)
                continue
            key = policy.victim()
            slot = NO_SLOT if key is None else self._slots.get(key)
            if slot == NO_SLOT:
                slot = self._oldest_unneeded(policy)
            if slot == NO_SLOT:
                return False
            self.evictions += 1
            self._expel(slot)
        return True

    def _oldest_unneeded(self, policy: SlotPolicy) -> int:
        """The slot of the least recently used block that is not in use and on which no block
        builds, of so many as may be looked at; or NO_SLOT."""
        slot = self._ring
        for _ in range(_MOST_STEPS):
            slot = self._previous[slot]
            if slot == self._ring:
                break
            if slot not in self._uses and not policy.is_needed(self._first + slot):
                return slot
        return NO_SLOT

    def _expel(self, slot: int) -> None:
        """Forget the block of a slot, which becomes free now or with its last use."""
        self._forget(slot)
        policy = self._policy
        if slot in self._uses or (policy is not None and policy.keeps(self._first + slot)):
            return
        self.set_free(slot)

    def _link(self, slot: int, behind: int) -> None:
        """Link `slot` as used just before `behind`; behind the ring's own place, as used now."""
        older = self._next[behind]
        self._next[slot] = older
        self._previous[slot] = behind
        self._previous[older] = slot
        self._next[behind] = slot

    def _unlink(self, slot: int) -> None:
        before, after = self._previous[slot], self._next[slot]
        self._next[before] = after
        self._previous[after] = before

    def _relink(self, slots: Sequence[int]) -> None:
        """Link `slots`, given with the one used longest ago first, and chain all others as free."""
        following, preceding = self._next, self._previous
        newer = self._ring
        for slot in reversed(slots):
            following[newer] = slot
            preceding[slot] = newer
            newer = slot
        following[newer] = self._ring
        preceding[self._ring] = newer
        self._used_slots = len(slots) + len(self._uses)
        self._free = NO_SLOT
        for slot in reversed(range(self.num_slots)):
            if self._keys[slot] is None and slot not in self._uses:
                following[slot] = self._free
                self._free = slot
