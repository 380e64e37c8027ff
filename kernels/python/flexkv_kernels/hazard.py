# SPDX-License-Identifier: Apache-2.0
"""FlexKV's own eviction policy, `hazard`. It expects hits by the request that a block is from.

The request's turn in its conversation, its length, its new tokens, the length of its answer and the
time since say how likely its blocks come back. The policy learns how soon blocks of each class of
requests come back. It evicts the block with the fewest hits to expect per second of keeping it.
`kernels/src/eviction` has the code.
"""

from __future__ import annotations

from typing import Protocol

from flexkv.eviction import EvictionPolicy, GuardState
from flexkv_kernels._library import LIBRARY


class _HazardPolicy(EvictionPolicy, Protocol):
    """See `EvictionPolicy`. The policy holds references to the keys of its blocks.

    A call raises KeyError for a key whose block the policy lacks, and TypeError for a value that is
    no key.
    """

    def guard_state(self) -> GuardState:
        """The state of the guard."""
        ...

    def size_in_bytes(self) -> tuple[int, int]:
        """Bytes of memory: first those in proportion to the number of blocks in the tier, then
        those of what the policy has learned."""
        ...


class _MakeHazardPolicy(Protocol):
    def __call__(self, capacity: int, /) -> _HazardPolicy:
        """Make a policy.

        Args:
            capacity: the number of blocks that the tier holds.

        Raises:
            ValueError: the capacity is not allowed; the message names the allowed ones.
        """
        ...


HazardPolicy: _MakeHazardPolicy = LIBRARY.brief.fkv_hazard_policy_type()
