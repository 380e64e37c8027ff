# SPDX-License-Identifier: Apache-2.0
"""The index of a tier: which key's block lies in which slot, and in what state.

A block is absent, then writing (its slot is reserved, and no reader may use it), then ready. Ready
blocks may be leased; a leased block is neither evicted nor moved until its last lease ends. A
pinned block stays until it is unpinned, the index is cleared, or the block proves unreadable.
Lookups find ready blocks only, so a block that was never completed is a miss.

Each block of a prefix builds on the block before it, and is useless without that block. The index
therefore never evicts a block while another block with a slot builds on it: prefixes lose their
last block first, and a prefix never evicts its own beginning. A use of a block counts as a use of
the blocks that it builds on.

The module is pure and single-threaded. Every operation is O(1) per block, apart from the policy's.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from flexkv.eviction import EvictionPolicy, RequestContext


class BlockState(enum.Enum):
    """The states of a block in a tier."""

    WRITING = "writing"
    READY = "ready"
    DROPPED = "dropped"
    """Removed while it was written or leased. Lookups do not find the block; its slot becomes free
    when the writer or the last reader is done."""


@dataclass(slots=True, eq=False)
class Block:
    """A block that has a slot. The index owns it; callers hand it back and do not change it."""

    key: bytes
    slot: int
    state: BlockState
    parent: Block | None = field(default=None, repr=False)
    """The block that it builds on; None for the first of a prefix."""
    children: int = 0
    """Blocks with a slot that build on this block, without blocks that `lease_victim` leased."""
    used: int = 0
    """Number of its last use; each use of any block has a larger number than the one before."""
    leases: int = 0
    pins: int = 0
    leaving: int = 0
    """Its `used` when `lease_victim` leased it; 0 if the block was not leased so."""

    @property
    def is_evictable(self) -> bool:
        """Whether the block may be evicted. The policy knows every other block as held."""
        return (
            self.state is BlockState.READY
            and not self.leases
            and not self.children
            and not self.pins
        )


class BlockIndex:
    """Keys, slots, states, leases and pins of one tier of `num_slots` slots.

    Attributes:
        evictions: blocks evicted so far.
        pinned_blocks: blocks that are pinned.
        changed: keys of blocks that became ready, left, or failed since a reader emptied this
            dictionary; None when not watched.
    """

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        self.num_slots = num_slots
        self._policy = policy
        self._free = list(range(num_slots - 1, -1, -1))
        self._writing: dict[bytes, Block] = {}
        self._ready: dict[bytes, Block] = {}
        self._uses = 0
        self.evictions = 0
        self.pinned_blocks = 0
        self.changed: dict[bytes, None] | None = None

    def __len__(self) -> int:
        """Ready blocks."""
        return len(self._ready)

    def __contains__(self, key: bytes) -> bool:
        """Whether a block of this key has a slot, ready or being written."""
        return key in self._ready or key in self._writing

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def watch(self) -> None:
        """Begin to note changes in `changed`, which starts with all ready blocks."""
        self.changed = dict.fromkeys(self._ready)

    def lookup(self, keys: Iterable[bytes]) -> int:
        """How many of `keys`, from the first on, are ready. Changes nothing."""
        return len(list(takewhile(self._ready.__contains__, keys)))

    def present(self, keys: Iterable[bytes]) -> list[bool]:
        """For each of `keys` whether it is ready. Changes nothing."""
        return list(map(self._ready.__contains__, keys))

    def lease(self, keys: Sequence[bytes]) -> list[Block] | None:
        """Protect the blocks of `keys` from eviction until `release`.

        Returns None, and leases nothing, if any of them is not ready.
        """
        try:
            blocks = [self._ready[key] for key in keys]
        except KeyError:
            return None
        for block in blocks:
            if block.is_evictable:
                self._policy.held(block.key)
            block.leases += 1
        return blocks

    def release(self, blocks: Sequence[Block]) -> None:
        """End one lease of each block, which counts as its use.

        The blocks are those of a prefix, first block first: its end counts as used before its
        beginning.
        """
        self._uses += len(blocks)
        for age, block in enumerate(blocks):
            block.used = self._uses - age
            self._end_lease(block)

    def release_unused(self, blocks: Iterable[Block]) -> None:
        """End one lease of each block, without counting a use."""
        for block in blocks:
            self._end_lease(block)

    def reserve(self, key: bytes, after: bytes | None) -> Block | None:
        """Give `key` a slot to write, and evict a block if no slot is free.

        Args:
            key: key of the new block.
            after: key of the block before it in the prefix; None for the first block.

        Returns:
            The block, in state WRITING. None if the key has a slot already, if no slot can be had,
            or if `after` has no slot, since no prefix would then lead to the block.
        """
        if after is None:
            blocks = self.reserve_all((key,), (0,), (0,))
        else:
            blocks = self.reserve_all((after, key), (1,), ())
        return blocks[0] if blocks else None

    def reserve_all(
        self, keys: Sequence[bytes], positions: Iterable[int], begins: Container[int]
    ) -> list[Block]:
        """Reserve slots for the keys at `positions`, each behind the key before it in `keys`.

        Keys at the positions `begins` are the first of their prefix. Returns the blocks that got a
        slot.
        """
        ready, writing, free, policy = self._ready, self._writing, self._free, self._policy
        blocks = []
        for position in positions:
            key = keys[position]
            if key in writing or key in ready:
                continue
            parent = None
            if position not in begins:
                before = keys[position - 1]
                parent = writing.get(before) or ready.get(before)
                if parent is None:
                    continue
                # Held from now on: the parent must not be evicted to make room for its child.
                if parent.is_evictable:
                    policy.held(before)
                parent.children += 1
            slot = free.pop() if free else self._evict(key)
            block = Block(key, -1 if slot is None else slot, BlockState.WRITING, parent)
            if slot is None:
                self._detach(block)
                continue
            writing[key] = block
            blocks.append(block)
        return blocks

    def publish(self, blocks: Sequence[Block]) -> None:
        """Make blocks ready, whose bytes are complete; from now on lookups find them.

        The first block of the prefix comes first, as in `release`.
        """
        ready, writing, policy, changed = self._ready, self._writing, self._policy, self.changed
        self._uses += len(blocks)
        for age, block in enumerate(blocks):
            if block.state is BlockState.DROPPED:
                self._free.append(block.slot)
                continue
            key = block.key
            del writing[key]
            block.state = BlockState.READY
            block.used = self._uses - age
            ready[key] = block
            if changed is not None:
                changed[key] = None
            parent = block.parent
            policy.inserted(key, None if parent is None else parent.key)
            if block.is_evictable:
                policy.released(key, block.used)

    def abandon(self, blocks: Iterable[Block]) -> None:
        """Free the slots of blocks that could not be written."""
        for block in blocks:
            if block.state is not BlockState.DROPPED:
                del self._writing[block.key]
                self._remove(block)
            self._free.append(block.slot)

    def discard(self, blocks: Iterable[Block]) -> None:
        """Keep blocks from becoming ready, because the bytes written to them are wrong."""
        for block in blocks:
            if block.state is BlockState.WRITING:
                del self._writing[block.key]
                self._remove(block)

    def drop(self, blocks: Iterable[Block]) -> None:
        """Remove leased blocks that proved unreadable; lookups no longer find them."""
        for block in blocks:
            if block.state is BlockState.READY:
                del self._ready[block.key]
                self._policy.evicted(block.key)
                self._remove(block)

    def pin(self, key: bytes) -> Block | None:
        """Keep a block from eviction until `unpin` has been called as often as this method.

        Returns None if the block has no slot.
        """
        block = self._ready.get(key) or self._writing.get(key)
        if block is None:
            return None
        if block.is_evictable:
            self._policy.held(key)
        self.pinned_blocks += not block.pins
        block.pins += 1
        return block

    def unpin(self, block: Block) -> None:
        """End one pin of a block. Does nothing if the block has left since."""
        if not self.holds(block):
            return
        block.pins -= 1
        self.pinned_blocks -= not block.pins
        if block.is_evictable:
            self._policy.released(block.key, block.used)

    def holds(self, block: Block) -> bool:
        """Whether a block that was pinned still has its slot."""
        return block.state is not BlockState.DROPPED

    def lease_victim(self) -> Block | None:
        """Lease the next victim, so that a lower tier can save it first. `retire` ends the lease.

        The next call may lease the block before it in the prefix. Returns None without a victim.
        """
        key = self._policy.victim()
        if key is None:
            return None
        block = self._ready[key]
        self._policy.held(key)
        block.leases += 1
        self._detach(block)
        block.leaving = block.used
        return block

    def retire(self, block: Block) -> None:
        """End a lease of `lease_victim`, and evict the block unless it was leased or used again."""
        used = block.leases > 1 or block.used > block.leaving
        if block.state is BlockState.READY and not used:
            self.drop([block])
            self.evictions += 1
        block.leaving = 0
        if block.state is BlockState.READY:
            self._attach(block)
        self._end_lease(block)

    def began(self, keys: Sequence[bytes], context: RequestContext, now: float) -> None:
        """A request with the prompt `keys` was scheduled; see `EvictionPolicy.began`."""
        self._policy.began(keys, self.lookup(keys), context, now)

    def ended(self, request_id: str, output_tokens: int, now: float) -> None:
        """A request has ended; see `EvictionPolicy.ended`."""
        self._policy.ended(request_id, output_tokens, now)

    def hit(self, keys: Sequence[bytes], context: RequestContext) -> None:
        """Count the ready blocks of `keys` as used by a scheduled request, the last block first."""
        ready, policy = self._ready, self._policy
        self._uses += len(keys)
        for age, key in enumerate(keys):
            block = ready.get(key)
            if block is not None:
                block.used = self._uses - age
                policy.hit(key, block.used, context)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count the ready blocks of `keys` as used by a request that ends now."""
        ready = self._ready
        self._uses += len(keys)
        for age, key in enumerate(keys):
            block = ready.get(key)
            if block is not None:
                block.used = self._uses - age
                if block.is_evictable:
                    self._policy.touched(key, block.used)

    def clear(self) -> None:
        """Drop every block. Slots in use become free when their writer or reader is done."""
        for block in self._writing.values():
            self._forget(block)
        for block in self._ready.values():
            self._forget(block)
            if block.leases == 0:
                self._free.append(block.slot)
        self._writing.clear()
        self._ready.clear()
        self._policy.clear()

    def _end_lease(self, block: Block) -> None:
        block.leases -= 1
        if block.leases:
            return
        if block.state is BlockState.DROPPED:
            self._free.append(block.slot)
        elif block.is_evictable:
            self._policy.released(block.key, block.used)

    def _evict(self, newcomer: bytes) -> int | None:
        """Evict a block for `newcomer` and return its slot; None if the policy names no victim."""
        key = self._policy.victim(newcomer)
        if key is None:
            return None
        self._policy.evicted(key)
        block = self._ready.pop(key)
        block.state = BlockState.DROPPED  # it is not pinned, or it could not leave
        if self.changed is not None:
            self.changed[key] = None
        if block.parent is not None:
            self._detach(block)
        self.evictions += 1
        return block.slot

    def _attach(self, block: Block) -> None:
        """Hold the block that `block` builds on."""
        parent = block.parent
        if parent is not None:
            if parent.is_evictable:
                self._policy.held(parent.key)
            parent.children += 1

    def _detach(self, block: Block) -> None:
        """End the hold of `block` on the block that it builds on."""
        parent = block.parent
        if parent is not None:
            parent.children -= 1
            parent.used = max(parent.used, block.used)
            if parent.is_evictable:
                self._policy.released(parent.key, parent.used)

    def _remove(self, block: Block) -> None:
        """Mark `block` as dropped, and end its hold on the block before it."""
        self._forget(block)
        if not block.leaving:
            self._detach(block)

    def _forget(self, block: Block) -> None:
        """Mark `block` as dropped. The caller has removed it from the tables of keys."""
        block.state = BlockState.DROPPED
        self.pinned_blocks -= block.pins > 0
        block.pins = 0
        self._note(block.key)

    def _note(self, key: bytes) -> None:
        if self.changed is not None:
            self.changed[key] = None
