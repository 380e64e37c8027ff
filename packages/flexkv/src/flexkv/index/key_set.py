# SPDX-License-Identifier: Apache-2.0
"""Which keys a tier has, in memory that other processes read.

A set has hashes of 64 bits in place of keys, and takes 11 to 32 bytes for each. So it may have a
key that nobody added, and lose one with another that is removed, by a chance that nobody meets. It
tells where to look for a block; who reads the block compares its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flexkv.index.block_index import Buffer
from flexkv.system.native import kernels


class KeySet(Protocol):
    """A set of keys. One process owns it and makes every change. The calls of others take no lock,
    make no system call, and go on while the owner hangs or after it has ended; what they meet in
    the middle of a change is absent. A call that changes the set raises TypeError in other
    processes.

    Attributes:
        is_complete: whether a key that the set lacks is one that the tier lacks; False at first.
    """

    is_complete: bool

    def __len__(self) -> int:
        """The number of keys; only its owner knows it."""
        ...

    def contains(self, keys: Sequence[bytes], /) -> list[bool]:
        """For each of `keys` whether it is in the set."""
        ...

    def lookup(self, keys: Sequence[bytes], /) -> int:
        """How many of `keys`, from the first on, are in the set."""
        ...

    def add(self, keys: Sequence[bytes], /) -> int:
        """Add keys. Returns for how many there was no room."""
        ...

    def remove(self, keys: Sequence[bytes], /) -> None:
        """Remove keys, some of which may be absent."""
        ...


def key_set(memory: Buffer, *, is_owner: bool) -> KeySet:
    """The set in `memory`, which is kept.

    Args:
        memory: of `key_set_bytes` bytes; zero, if this process is to own the set.
        is_owner: whether this process owns the set.

    Raises:
        ConfigError: the kernels are not installed.
        ValueError: the memory is no set of this layout.
    """
    made: KeySet = kernels("block_index").NativeKeySet(memory, is_owner)
    return made


def key_set_bytes(keys: int) -> int:
    """Bytes of the memory of a set of so many keys.

    Raises:
        ConfigError: the kernels are not installed.
    """
    size: int = kernels("block_index").key_set_bytes(keys)
    return size
