# SPDX-License-Identifier: Apache-2.0
"""The seam between the index and the policy that picks its victims."""

from __future__ import annotations

from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the blocks that may be evicted; every call is O(1).

    The index owns the blocks. It adds a key when its block becomes evictable (complete, and
    leased by nobody), removes it when the block is leased or dropped, and asks for a victim
    when a tier is full. A policy sees keys only, never bytes, slots or time.
    """

    def add(self, key: bytes) -> None:
        """`key` became evictable, and counts as just used. It is not in the policy yet."""
        ...

    def remove(self, key: bytes) -> None:
        """`key` is no longer evictable. It is in the policy."""
        ...

    def touch(self, key: bytes) -> None:
        """`key` was used. It is in the policy."""
        ...

    def victim(self) -> bytes | None:
        """The key to evict next, still in the policy; None if nothing is evictable."""
        ...

    def clear(self) -> None:
        """Forget every key."""
        ...
