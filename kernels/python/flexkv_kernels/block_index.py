# SPDX-License-Identifier: Apache-2.0
"""The native index of a tier, as `flexkv.index.block_index` describes it.

`kernels/src/index` has the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from flexkv.eviction import EvictionPolicy
from flexkv.index.block_index import BlockIndex, BlockState, Buffer, IndexReader
from flexkv.index.key_set import KeySet
from flexkv.types.packed_keys import PackedKeys
from flexkv_kernels._library import LIBRARY

TenantParts: TypeAlias = Sequence[tuple[int, float, EvictionPolicy | None]]
"""See `flexkv.eviction.TenantPolicies.parts`; a tuple."""


class _MakeBlockIndex(Protocol):
    def __call__(
        self,
        num_slots: int,
        policy: EvictionPolicy | TenantParts | None,
        memory: Buffer | None,
        begun: bool,
        /,
    ) -> BlockIndex:
        """Make an index.

        Args:
            num_slots: number of slots of the tier.
            policy: chooses the blocks to evict; kept alive. None evicts the least recently used. A
                tuple has a policy for each tenant.
            memory: shared memory of `index_bytes(num_slots)` bytes, in which others read the index;
                kept. None if nobody else reads it.
            begun: whether the memory is that of an index whose owner has ended; if not, it is zero.

        Raises:
            ValueError: the number of slots, or the size of the memory, is not allowed, or it is no
                index of this layout.
        """
        ...


class _MakeIndexReader(Protocol):
    def __call__(self, memory: Buffer, holds: Buffer, /) -> IndexReader:
        """Make a reader.

        Args:
            memory: the memory of an index; only read, and kept.
            holds: 16-bit counters, one for each slot, all zero, that the index knows by
                `add_reader` and nothing but this reader writes; kept.

        Raises:
            ValueError: `memory` is no index of this layout, or `holds` has another size.
        """
        ...


class _MakeKeySet(Protocol):
    def __call__(self, memory: Buffer, is_owner: bool, /) -> KeySet:
        """Make a set.

        Args:
            memory: memory of `key_set_bytes` bytes; kept. The owner's is zero.
            is_owner: whether this process changes the set.

        Raises:
            ValueError: `memory` is no set of this layout.
        """
        ...


class _PackKeys(Protocol):
    def __call__(self, hashes: Sequence[str], end: bytes, /) -> PackedKeys:
        """Make keys of hashes.

        Args:
            hashes: hashes in hexadecimal digits, all of the same length.
            end: the end of each key.

        Raises:
            ValueError: a hash is not hexadecimal, or has another length than the first one.
        """
        ...


NativeBlockIndex: _MakeBlockIndex = LIBRARY.brief.fkv_block_index_type(tuple(BlockState))
pack_keys: _PackKeys = LIBRARY.brief.fkv_packed_keys_type()
NativeKeySet: _MakeKeySet = LIBRARY.brief.fkv_key_set_type()
NativeIndexReader: _MakeIndexReader = LIBRARY.brief.fkv_index_reader_type()


def index_bytes(num_slots: int) -> int:
    """Bytes of the shared memory of an index."""
    size: int = LIBRARY.brief.fkv_block_index_bytes(num_slots)
    return size


def key_set_bytes(keys: int) -> int:
    """Bytes of the memory of a set of so many keys."""
    size: int = LIBRARY.brief.fkv_key_set_bytes(keys)
    return size
