# SPDX-License-Identifier: Apache-2.0
"""Which keys a tier has, in memory that other processes read.

A set has hashes of 64 bits in place of keys, and takes 11 to 32 bytes for each. So it may have a
key that nobody added, and lose one with another that is removed, by a chance that nobody meets. It
tells where to look for a block; who reads the block compares its key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexkv.index.block_index import Buffer
from flexkv.system.native import kernels

if TYPE_CHECKING:
    from flexkv_kernels.block_index import KeySet
else:
    KeySet = object  # see `flexkv.index.block_index`

__all__ = ["KeySet", "key_set", "key_set_bytes"]


def key_set(memory: Buffer, *, is_owner: bool) -> KeySet:
    """The set in `memory`, which is kept. Raises ConfigError if the kernels are not installed;
    ValueError if the memory is no set of this layout.

    Args:
        memory: of `key_set_bytes` bytes; zero, if this process is to own the set.
        is_owner: whether this process owns the set.
    """
    made: KeySet = kernels("block_index").NativeKeySet(memory, is_owner)
    return made


def key_set_bytes(keys: int) -> int:
    """Bytes of the memory of a set of so many keys. Raises ConfigError if the kernels are not
    installed."""
    size: int = kernels("block_index").key_set_bytes(keys)
    return size
