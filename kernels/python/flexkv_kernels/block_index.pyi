# SPDX-License-Identifier: Apache-2.0
"""The native indexes of tiers, and the keys that their calls take. `kernels/src/index` has the
code; `flexkv.index` says what an index is."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias, overload

from flexkv.eviction import EvictionPolicy, RequestContext
from flexkv.index.block_index import BlockState, Buffer
from flexkv.types.packed_keys import PackedKeys
from flexkv.types.tenants import NO_TENANT

TenantParts: TypeAlias = Sequence[tuple[int, float, EvictionPolicy | None]]
"""See `flexkv.eviction.TenantPolicies.parts`; a tuple."""

class Block:
    """What stands for a block that has a slot; callers hand it back to the index. The index makes
    one when it is asked for, and the same one for a block as long as somebody keeps it. It may be
    kept after the block has left: it is dropped then, and has its key and the slot that it had.

    Attributes:
        key: as reserved.
        slot: of the tier.
        state: of the block.
        parent: the block that it builds on; None for the first of a prefix, and once that block has
            left and its slot was given to another.
        parent_key: the key of the block that it builds on, whether that has left or not; None for
            the first of a prefix. Of a block that has left, it may be empty.
        tenant: number of the tenant for whom it counts.
        leases: those that have not ended.
        used: number of its last use; each use of any block has a larger number than the one before.
    """

    @property
    def key(self) -> bytes: ...
    @property
    def slot(self) -> int: ...
    @property
    def state(self) -> BlockState: ...
    @property
    def parent(self) -> Block | None: ...
    @property
    def parent_key(self) -> bytes | None: ...
    @property
    def tenant(self) -> int: ...
    @property
    def leases(self) -> int: ...
    @property
    def used(self) -> int: ...

class BlockRow:
    """Some blocks of an index in a row, without an object for each. It may be kept after blocks
    have left: calls skip those whose slots were given to others since.

    Attributes:
        slots: their slots.
        keys: their keys; an empty one for a block whose slot was given to another since.
    """

    @property
    def slots(self) -> list[int]: ...
    @property
    def keys(self) -> list[bytes]: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Block]: ...
    @overload
    def __getitem__(self, position: int, /) -> Block: ...
    @overload
    def __getitem__(self, positions: slice, /) -> BlockRow: ...

SomeBlocks: TypeAlias = BlockRow | Sequence[Block]
"""What calls of an index take. A block that has left, and whose slot was given to another since, is
skipped: its leases and pins ended with it."""

class BlockIndex:
    """Keys, slots, states, leases and pins of one tier; `block_index` makes one.

    A call raises TypeError for a key that is no bytes or a block of another index, ValueError for a
    new key of more than `MAX_KEY_BYTES`, and what the policy raises. `lookup`,
    `present` and `missing` compare hashes of keys, which have 64 bits, and not the keys: they read
    a fifth of the memory. `lease` compares keys, so no reader gets the block of another key. Calls
    that take several keys take `PackedKeys`, too, and are faster with them.

    Attributes:
        num_slots: slots of the tier.
        free_slots: those without a block, stale ones included.
        stale_blocks: blocks that `clear` has dropped and whose slots are not free yet.
        has_room: whether a slot is free or a block may be evicted.
        blocks: all blocks that are ready or being written, by slot.
        evictions: blocks evicted so far.
        pinned_blocks: blocks that are pinned.
        tenants: for each tenant with a share, by its number, how many slots have its blocks, or are
            taken for it; those of all others under `NO_TENANT`. Empty without shares.
        changes: the keys of blocks that became ready (True) or left (False) since a reader took
            them from this dictionary, the oldest change first. A block that came and left, or left
            and came back, meanwhile is not in it. None when not watched.
    """

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicy | TenantParts | None,
        memory: Buffer | None,
        begun: bool,
        /,
    ) -> None:
        """See `flexkv.index.block_index.block_index`. A tuple has a policy for each tenant; without
        a policy, the least recently used block leaves first."""
    @property
    def num_slots(self) -> int: ...
    @property
    def free_slots(self) -> int: ...
    @property
    def stale_blocks(self) -> int: ...
    @property
    def has_room(self) -> bool: ...
    @property
    def blocks(self) -> BlockRow: ...
    @property
    def evictions(self) -> int: ...
    @property
    def pinned_blocks(self) -> int: ...
    @property
    def tenants(self) -> dict[int, int]: ...
    @property
    def changes(self) -> dict[bytes, bool] | None: ...
    def __len__(self) -> int:
        """Ready blocks."""

    def __contains__(self, key: bytes, /) -> bool:
        """Whether a block of this key has a slot, ready or being written."""

    def watch(self) -> None:
        """Begin to note `changes`, which start with all ready blocks."""

    def lookup(self, keys: Iterable[bytes], /) -> int:
        """How many of `keys`, from the first on, are ready. Changes nothing."""

    def present(self, keys: Iterable[bytes], /) -> list[bool]:
        """For each of `keys` whether it is ready. Changes nothing."""

    def missing(self, keys: Iterable[bytes], /) -> list[int]:
        """Positions of the keys whose blocks have no slot. Changes nothing."""

    def collect(self, blocks: SomeBlocks, /) -> BlockRow:
        """These blocks in a row."""

    def lease(self, keys: Sequence[bytes], /) -> BlockRow | None:
        """Protect the blocks of `keys` from eviction until `release`.

        Returns None, and leases nothing, if any of them is not ready.
        """

    def release(self, blocks: SomeBlocks, /) -> None:
        """End one lease of each block, which counts as its use.

        The blocks are those of a prefix, first block first: its end counts as used before its
        beginning.
        """

    def release_unused(self, blocks: SomeBlocks, /) -> None:
        """End one lease of each block, without counting a use."""

    def reserve(self, key: bytes, after: bytes | None, tenant: int = NO_TENANT, /) -> Block | None:
        """Give `key` a slot to write, and evict a block if no slot is free. Returns the block, in
        state WRITING. None if the key has a slot already, if no slot can be had, or if `after` has
        no slot, since no prefix would then lead to the block.

        Args:
            key: key of the new block.
            after: key of the block before it in the prefix; None for the first block.
            tenant: number of the tenant for whom it counts.
        """

    def reserve_all(
        self,
        keys: Sequence[bytes],
        positions: Iterable[int],
        prefix_starts: Iterable[int],
        fetched: bool = False,
        tenants: Sequence[int] | None = None,
        /,
    ) -> BlockRow:
        """Reserve slots for blocks of one prefix, or of several prefixes in a row. Returns the
        blocks that got a slot.

        Args:
            keys: keys of blocks, each of which builds on the one before.
            positions: positions in `keys` of the blocks that need a slot.
            prefix_starts: positions of the first blocks of prefixes.
            fetched: whether a lower tier will give the bytes, for a request that has not begun.
            tenants: for each of `keys` the tenant for whom its block counts; None for no tenant.
        """

    def take_slots(self, most: int, writer: int, tenant: int | None = None, /) -> list[int]:
        """Take up to `most` slots for a writer in another process, and evict blocks for them. They
        have no block until `place` or `give_back`, and count for `tenant` until then; None for a
        writer that stores for several. Raises ValueError if the writer's number is not one of 1 to
        255, or the tenant's is none."""

    def is_taken(self, slot: int, /) -> bool:
        """Whether `take_slots` took this slot, and it has no block. Raises ValueError if it is no
        slot of the index."""

    def is_taken_since_clear(self, slot: int, /) -> bool:
        """Whether `is_taken`, and there was no `clear` since the slot was taken, under an owner of
        the memory before this one either. Raises ValueError if it is no slot of the index."""

    def taken_by(self, writer: int, /) -> list[int]:
        """The slots that are taken for a writer, in order. Takes O(all slots). Raises ValueError as
        `take_slots` does."""

    def place(
        self,
        keys: Sequence[bytes],
        positions: Sequence[int],
        prefix_starts: Iterable[int],
        slots: Sequence[int],
        tenants: Sequence[int] | None = None,
        /,
    ) -> BlockRow:
        """As `reserve_all`, for blocks whose bytes lie in slots that `take_slots` took. Returns the
        blocks that got their slot, in state WRITING. The slots of the others stay taken. Raises
        ValueError if a slot was not taken.

        Args:
            keys: keys of blocks, each of which builds on the one before.
            positions: positions in `keys` of the blocks.
            prefix_starts: positions of the first blocks of prefixes.
            slots: for each of `positions` its slot.
            tenants: see `reserve_all`.
        """

    def give_back(self, slots: Sequence[int], /) -> None:
        """Free slots that `take_slots` took, and that nobody writes to any more. Raises ValueError
        if a slot was not taken, or has a block."""

    def add_reader(self, holds: Buffer, /) -> int:
        """A reader in another process holds slots from now on, in these counters; see
        `IndexReader`. Returns its number. Raises ValueError if the memory has another size than a
        16-bit counter for each slot."""

    def remove_reader(self, reader: int, /) -> None:
        """A reader has ended. What it held may be given away. Raises ValueError if there is no such
        reader."""

    def look_at_holds(self) -> int:
        """Look again at what readers held when it should have been evicted or given away. To be
        called from time to time. Returns how much of it they still hold."""

    def publish(self, blocks: SomeBlocks, /) -> None:
        """Make blocks ready, whose bytes are complete; from now on lookups find them.

        The first block of the prefix comes first, as in `release`.
        """

    def abandon(self, blocks: SomeBlocks, /) -> None:
        """Free the slots of blocks that could not be written."""

    def discard(self, blocks: SomeBlocks, /) -> None:
        """Keep blocks from becoming ready, because the bytes written to them are wrong."""

    def drop(self, blocks: SomeBlocks, /) -> None:
        """Remove leased blocks that proved unreadable, and all blocks that build on them. Lookups
        no longer find these."""

    def pin(self, key: bytes, /) -> Block | None:
        """Keep a block from eviction until `unpin` has been called as often as this method.

        Returns None if the block has no slot.
        """

    def unpin(self, block: Block, /) -> None:
        """End one pin of a block. Does nothing if the block has left since."""

    def holds(self, block: Block, /) -> bool:
        """Whether a block that was pinned still has its slot."""

    def lease_victim(self) -> Block | None:
        """Lease the next victim, so that a lower tier can save it first. `retire` ends the lease.

        The next call may lease the block before it in the prefix. Then the end of the prefix is
        best retired first. Returns None without a victim, and while there are stale blocks, whose
        slots become free first.
        """

    def lease_to_leave(self, key: bytes, /) -> Block | None:
        """Lease the block of `key`, as `lease_victim` leases a victim. `retire` or `keep` ends the
        lease. Returns None if the block may not be evicted now, and while there are stale
        blocks."""

    def keep(self, block: Block, /) -> None:
        """End a lease of `lease_victim` or `lease_to_leave`. The block stays."""

    def retire(self, block: Block, /) -> None:
        """End a lease of `lease_victim`, and evict the block unless it was leased, used or pinned
        since, or another block builds on it. Blocks of `lease_victim` that build on it leave with
        it."""

    def began(self, keys: Sequence[bytes], context: RequestContext, now: float, /) -> None:
        """A request with the prompt `keys` was scheduled; see `EvictionPolicy.began`."""

    def ended(self, request_id: str, output_tokens: int, now: float, /) -> None:
        """A request has ended; see `EvictionPolicy.ended`."""

    def hit(self, keys: Sequence[bytes], context: RequestContext, /) -> None:
        """Count the ready blocks of `keys` as used by a scheduled request, the last block first."""

    def touch(self, keys: Sequence[bytes], /) -> None:
        """Count the ready blocks of `keys` as used by a request that ends now."""

    def clear(self) -> None:
        """Drop every block. It takes the same time for any number of blocks: their slots become
        free, and their changes are noted, by `sweep` and by calls that need a slot. Slots in use
        become free when their writer or reader is done."""

    def sweep(self, slots: int, /) -> int:
        """Look at up to `slots` slots for blocks that `clear` has dropped, and free these. Returns
        `stale_blocks`."""

    def settle(self, leased: SomeBlocks, writing: SomeBlocks, pinned: SomeBlocks, /) -> None:
        """Begin again from what is certain, after an error that may have lost leases: end all
        leases, writes and pins but these. Takes O(slots).

        Args:
            leased: the blocks that are still read, each once for each lease.
            writing: the blocks that are still written; all others in state WRITING are removed.
            pinned: the blocks that are still pinned, each once for each pin; those that have left
                are skipped.
        """

class IndexReader(Protocol):
    """An index in shared memory, as another process than its owner has it. Calls take no lock, make
    no system call, and go on while the owner hangs or after it has ended. What a call meets in the
    middle of a change is a miss.

    Attributes:
        held: holds that have not ended; takes O(slots).
        held_slots: slots that are held, however often.
    """

    @property
    def held(self) -> int: ...
    @property
    def held_slots(self) -> int: ...
    def lookup(self, keys: Sequence[bytes], /) -> int:
        """See `BlockIndex.lookup`."""

    def present(self, keys: Sequence[bytes], /) -> list[bool]:
        """See `BlockIndex.present`."""

    def missing(self, keys: Iterable[bytes], /) -> list[int]:
        """See `BlockIndex.missing`."""

    def lease(self, keys: Sequence[bytes], /) -> list[int] | None:
        """Hold the blocks of `keys`, until `release`. Returns the slot of each, whose bytes do not
        change meanwhile. None, and nothing is held, if one of them is not ready."""

    def release(self, slots: Sequence[int], /) -> None:
        """End one hold of each slot. Raises ValueError if a slot is not held."""

    def settle(self, slots: Sequence[int], /) -> None:
        """After an error that may have lost holds: end all but one of each of these slots, which
        may be named several times. Takes O(all slots). Raises ValueError if a slot is none of the
        index."""

class SlotIndex:
    """The index of a directory on disk; `flexkv.index.slot_index.slot_index` makes one.

    A slot is free, being written, or ready. A slot in use, which is one being read or written, is
    not evicted. If the block of a slot in use is removed, the slot becomes free with its last use.

    Without a policy, the least recently used block leaves first. With one, the policy chooses among
    the ready blocks of all indexes that follow it which are not in use, and on which no block with
    a slot builds. It learns uses by `began`, which names all blocks of a request: it gets no single
    hits and touches, and 0 as the number of each use.

    A reset takes the same time for any number of blocks. It makes them stale: no call finds them,
    and their slots are reused before those of later blocks, because none was used as long ago.

    A call raises TypeError for a key that is no bytes, ValueError for a key of more than
    `MAX_KEY_BYTES`, a slot that is none of the index or not in use, and what the policy raises.

    Attributes:
        usable_slots: slots that `reserve` can return: those that are not in use.
        stale_blocks: blocks of before a reset that still have a slot.
        evictions: blocks evicted so far.
        noted_slots: slots, from the first on, whose changes are noted as they occur.
        has_room: whether a reservation evicts no block that can be found.
        has_victim: whether the block is here that the policy would evict next.
        is_reporting: whether `report_restored` has blocks to report.
        has_changes: whether `note_changes` may note any.
    """

    num_slots: int
    free_slots: int
    usable_slots: int
    stale_blocks: int
    evictions: int
    noted_slots: int
    has_room: bool
    has_victim: bool
    is_reporting: bool
    has_changes: bool

    def __init__(self, num_slots: int, /) -> None: ...
    def __len__(self) -> int:
        """Ready blocks."""

    def __contains__(self, key: bytes, /) -> bool:
        """Whether the block is ready."""

    def present(self, keys: Iterable[bytes], oldest: int = 0, /) -> list[bool]:
        """For each key whether its block is ready, and was not stored before the time `oldest`."""

    def has_all(self, keys: Iterable[bytes], /) -> list[bool]:
        """For each key whether its block is ready or being written."""

    def ready_slots(self, keys: Iterable[bytes], /) -> list[int | None]:
        """The slot of each block; None if the block is not ready."""

    def lease(self, key: bytes, /) -> int | None:
        """Use the slot of a ready block until `release`. None if the block is not ready."""

    def lease_all(self, keys: Iterable[bytes], /) -> list[int | None]:
        """`lease` for each key."""

    def release(self, slot: int, /) -> None:
        """End one use of a slot."""

    def discard(self, slot: int, /) -> None:
        """Forget the block in a slot in use."""

    def enter(
        self, records: Sequence[tuple[int, bytes, bytes, int, int]], /
    ) -> tuple[int, int, list[int]]:
        """Fill an empty index with some records of a table; see `flexkv.index.slot_index.restore`.
        Returns the greatest generation and time of these, and the slots of the records that do not
        count."""

    def begin(self) -> None:
        """End `enter`. No other thread has the index yet."""

    def follow(self, policy: EvictionPolicy | None, other: SlotIndex = ..., /) -> None:
        """Evict by this policy from now on, as `other` does if that is given; None for LRU."""

    def report_restored(self, limit: int, /) -> None:
        """Report up to `limit` of the blocks that `enter` got to the policy, those used
        longest ago first. A block leaves that another index of the policy has, too."""

    def reserve(
        self, key: bytes, after: bytes | None = None, behind: int | None = None, /
    ) -> int | None:
        """Reserve a slot to write the block of `key` to, which is neither ready nor being written.
        If none is free, a block is evicted. Returns the slot, in use until `release`; None if every
        other one is in use or, without a policy, has a block that was used since the one that this
        block builds on.

        Args:
            key: as above.
            after: key of the block that it builds on, before which it counts as used if that is
                here; None if that is unknown, or there is none.
            behind: a slot in use. The block counts as used just before the block there; if None, as
                used now.
        """

    def publish(self, slot: int, checksum: bytes, /) -> bool:
        """Make the block of a written slot ready, and end this use of the slot. Returns False if
        the block was removed meanwhile. Then the slot stays in use."""

    def key_of(self, slot: int, /) -> bytes | None:
        """The key of the block in a slot; None if it has none."""

    def checksums(self, slots: Sequence[int], /) -> list[bytes]:
        """The checksums that the bytes of ready slots must have."""

    def times(self, slots: Sequence[int], /) -> list[int]:
        """When the blocks in these slots were stored; see `flexkv.index.ages`."""

    def set_times(self, slots: Sequence[int], times: Sequence[int], /) -> None: ...
    def touch(self, keys: Sequence[bytes], /) -> list[int]:
        """Count the blocks of a prefix as used, also while they are written. The first block counts
        last, so that the prefix is evicted from its end. Returns slots of the blocks whose records
        must be written again, in that order. A record is written again once as many writes as half
        of all slots have begun since: after a restart, the order of the records is the order of
        use. The blocks before such a block are among them, so that they are not evicted before
        it."""

    def end_uses(self, used: Sequence[int], /) -> list[int]:
        """End all uses of slots but those in `used`, each of which is one, after an error that may
        have lost some. Takes O(slots). Returns slots whose blocks were being written or are
        forgotten, and whose records are to be erased. Each stays in use until `release`."""

    def take_old(self, oldest: int, most: int, searched: int, /) -> list[int]:
        """Use the slots of up to `most` blocks that were stored before the time `oldest`, of the
        next `searched` slots."""

    def clear(self) -> None:
        """Forget every block. Those that were ready count as changes once `sweep` has come to
        them, or their slots are reused."""

    def sweep(self, limit: int, /) -> None:
        """Free the slots of up to `limit` stale blocks."""

    def watch(self) -> None:
        """Note changes from now on. All ready blocks count as changes. It takes the same time for
        any number of blocks."""

    def has_changes_before(self, stop: int, /) -> bool:
        """Whether `note_changes` may note any with this `stop`."""

    def note_changes(self, limit: int, stop: int, /) -> dict[bytes, bool] | None:
        """Note more changes until there are `limit`. Stale blocks leave first. Ready blocks that
        were there before `watch` come from slots before `stop`, a part at a time. Returns all
        changes that no reader has taken from it, the oldest first; None without `watch`."""

    def is_reported(self, key: bytes, /) -> bool:
        """Whether the block is ready by the changes that were taken."""

class KeySet:
    """A set of keys. One process owns it and makes every change. The calls of others take no lock,
    make no system call, and go on while the owner hangs or after it has ended; what they meet in
    the middle of a change is absent. A call that changes the set raises TypeError in other
    processes. `is_complete`: whether a key that the set lacks is one that the tier lacks; False at
    first."""

    is_complete: bool

    def __init__(self, memory: Buffer, is_owner: bool, /) -> None: ...
    def __len__(self) -> int:
        """The number of keys; only its owner knows it."""

    def contains(self, keys: Sequence[bytes], /) -> list[bool]:
        """For each of `keys` whether it is in the set."""

    def lookup(self, keys: Sequence[bytes], /) -> int:
        """How many of `keys`, from the first on, are in the set."""

    def add(self, keys: Sequence[bytes], /) -> int:
        """Add keys. Returns for how many there was no room."""

    def remove(self, keys: Sequence[bytes], /) -> None:
        """Remove keys, some of which may be absent."""

def pack_keys(hashes: Sequence[str], end: bytes, /) -> PackedKeys:
    """Make keys of hashes in hexadecimal digits, all of the same length, each followed by `end`.
    Raises ValueError if a hash is not hexadecimal, or has another length than the first one."""

def index_bytes(num_slots: int) -> int: ...
def key_set_bytes(keys: int) -> int: ...

NativeBlockIndex = BlockIndex
NativeKeySet = KeySet
NativeSlotIndex = SlotIndex
NativeIndexReader: Callable[[Buffer, Buffer], IndexReader]
