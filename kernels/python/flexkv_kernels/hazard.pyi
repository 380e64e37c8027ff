# SPDX-License-Identifier: Apache-2.0
"""FlexKV's own eviction policy, `hazard`. It expects hits by the request that a block is from.

The request's turn in its conversation, its length, its new tokens, the length of its answer and the
time since say how likely its blocks come back. The policy learns how soon blocks of each class of
requests come back. It evicts the block with the fewest hits to expect per second of keeping it.
`kernels/src/eviction` has the code.
"""

from collections.abc import Callable
from typing import Protocol

from flexkv.eviction import EvictionPolicy

class _HazardPolicy(EvictionPolicy, Protocol):
    """See `EvictionPolicy`. The policy holds references to the keys of its blocks.

    A call raises KeyError for a key whose block the policy lacks, and TypeError for a value that is
    no key.
    """

    def size_in_bytes(self) -> tuple[int, int]:
        """Bytes of memory: first those in proportion to the number of blocks in the tier, then
        those of what the policy has learned."""

HazardPolicy: Callable[[int], _HazardPolicy]
"""Makes a policy for a tier that holds so many blocks. Raises ValueError if the capacity is not
allowed; the message names the allowed ones."""
