# SPDX-License-Identifier: Apache-2.0
"""FlexKV's own eviction policy: keep what is likely to come back soon for the time that it is kept.

What tells whether a block comes back is the request that it came from: which turn of a
conversation, how long, how much of it was new, how long the answer, and how long ago. The policy
learns how soon blocks of each such class come back, and evicts the block of which the fewest hits
are expected per second of keeping it. `kernels/src/eviction` says how.
"""

from __future__ import annotations

from typing import Protocol

from flexkv.eviction import EvictionPolicy
from flexkv_kernels._library import LIBRARY


class _HazardPolicy(EvictionPolicy, Protocol):
    """See `EvictionPolicy`. It keeps the keys of the blocks alive that it has.

    A call raises KeyError for a block that it does not have, and TypeError for what is no key.
    """

    def size_in_bytes(self) -> tuple[int, int]:
        """What it takes: for the blocks of the tier, in proportion to their number; and for what it
        has learned."""
        ...


class _MakeHazardPolicy(Protocol):
    def __call__(self, capacity: int, /) -> _HazardPolicy:
        """A policy for a tier of so many blocks.

        Raises:
            ValueError: the capacity is not allowed.
        """
        ...


HazardPolicy: _MakeHazardPolicy = LIBRARY.brief.fkv_hazard_policy_type()
