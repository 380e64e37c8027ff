# SPDX-License-Identifier: Apache-2.0
"""The seam between the index and the policy that picks its victims."""

from __future__ import annotations

from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the blocks that may be evicted; every call is O(1), or O(log n) for n of them.

    The index owns the blocks. It adds a key when its block becomes evictable (complete, leased by
    nobody, and no other block builds on it), removes it when that ends, and asks for a victim when
    a tier is full. A policy sees keys only, and when each was used: a number that grows from use
    to use. It sees no bytes, slots or time.
    """

    def add(self, key: bytes, used: int) -> None:
        """`key` became evictable; it was `used` then, perhaps long ago. It is not in the policy
        yet."""
        ...

    def remove(self, key: bytes) -> None:
        """`key` is no longer evictable. It is in the policy."""
        ...

    def touch(self, key: bytes, used: int) -> None:
        """`key` was used, as never so late before. It is in the policy."""
        ...

    def victim(self) -> bytes | None:
        """The key to evict next, still in the policy; None if nothing is evictable."""
        ...

    def clear(self) -> None:
        """Forget every key."""
        ...
