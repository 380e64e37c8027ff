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

An index may lie in shared memory. Other processes then look blocks up and hold them by an
`IndexReader`, while one process owns it and makes every change. What they hold stays as it is, even
if the block leaves: its slot is given to another block only when nobody holds it any more.

An index is pure and single-threaded. Every operation is O(1) per block, apart from the policy's.
Its code is among the kernels, because an engine's step waits for it;
`flexkv_kernels/block_index.pyi` describes its calls.
"""

from __future__ import annotations

import enum
from mmap import mmap
from typing import TYPE_CHECKING, TypeAlias

from flexkv.eviction import AnyPolicy, LRUPolicy, TenantPolicies
from flexkv.system.native import kernels

if TYPE_CHECKING:
    from flexkv_kernels.block_index import Block, BlockIndex, BlockRow, IndexReader, SomeBlocks
else:  # annotations alone name these, and the core can be imported without the kernels
    Block = BlockIndex = BlockRow = IndexReader = SomeBlocks = object

__all__ = [
    "Block",
    "BlockIndex",
    "BlockRow",
    "BlockState",
    "Buffer",
    "IndexReader",
    "SomeBlocks",
    "block_index",
    "index_bytes",
    "index_reader",
    "publish",
]

Buffer: TypeAlias = mmap | memoryview | bytearray
"""Memory of another object, in one piece."""


class BlockState(enum.Enum):
    """The states of a block in a tier."""

    WRITING = "writing"
    READY = "ready"
    DROPPED = "dropped"
    """Removed while it was written or leased. Lookups do not find the block; its slot becomes free
    when the writer or the last reader is done."""


def block_index(
    num_slots: int, policy: AnyPolicy, memory: Buffer | None = None, *, begun: bool = False
) -> BlockIndex:
    """An index of `num_slots` slots, whose victims `policy` picks. Raises ConfigError if the
    kernels are not installed; ValueError if the memory has another size, or is no index of this
    layout.

    Args:
        num_slots: slots of the tier.
        policy: picks the victims.
        memory: shared memory of `index_bytes(num_slots)` bytes, in which other processes read the
            index; kept. None if none does.
        begun: whether `memory` is that of an index whose owner has ended; if not, it is zero. The
            index then has the blocks that were ready, and knows nothing of their uses. Slots that
            were taken stay so. Readers may go on meanwhile.
    """
    asked: object = None if isinstance(policy, LRUPolicy) else policy
    if isinstance(policy, TenantPolicies):
        asked = policy.parts
    index: BlockIndex = kernels("block_index").NativeBlockIndex(num_slots, asked, memory, begun)
    return index


def index_bytes(num_slots: int) -> int:
    """Bytes of the shared memory of an index. Raises ConfigError if the kernels are not
    installed."""
    size: int = kernels("block_index").index_bytes(num_slots)
    return size


def index_reader(memory: Buffer, holds: Buffer) -> IndexReader:
    """A reader of the index in `memory`. Raises ConfigError if the kernels are not installed;
    ValueError if `memory` is no index of this layout, or `holds` has another size.

    Args:
        memory: as the owner of the index has it; only read, and kept.
        holds: 16-bit counters, one for each slot, all zero, that the index knows by `add_reader`
            and nothing but this reader writes; kept.
    """
    reader: IndexReader = kernels("block_index").NativeIndexReader(memory, holds)
    return reader


def publish(index: BlockIndex, blocks: SomeBlocks) -> None:
    """Publish blocks as `BlockIndex.publish` does. If that raises, those that are not ready are
    abandoned: nobody else would end their writes."""
    try:
        index.publish(blocks)
    except BaseException:
        index.abandon([block for block in blocks if block.state is BlockState.WRITING])
        raise
