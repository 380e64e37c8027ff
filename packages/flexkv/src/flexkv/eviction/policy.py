# SPDX-License-Identifier: Apache-2.0
"""The policies that choose an index's victims: their protocol, LRU, and FlexKV's own `hazard`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from flexkv.system.native import kernels
from flexkv.types.errors import ConfigError
from flexkv.types.tenants import NO_TENANT

MOST_BLOCKS = (1 << 24) - 1
"""The most blocks of a tier that evicts by `hazard`; the kernels number them in 24 bits."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What is known of a request.

    Attributes:
        prompt_tokens: tokens of its prompt; 0 if unknown.
        hit_tokens: tokens of the prompt that any cache had, the engine's own included; 0 if
            unknown.
        request_id: id of the request, unique among those that have not ended; empty if it has none.
        session: name of its conversation; empty if the client did not name one.
        returns: whether the client expects to send a prompt that begins with this one soon; None
            if the client did not say.
        tenant: number of its tenant; see `flexkv.types.tenants`.
        priority: its priority; among blocks that a policy values alike, those of requests with a
            lower priority go first.
        stores: whether the engine stores all blocks of its prompt that it computes.
    """

    prompt_tokens: int = 0
    hit_tokens: int = 0
    request_id: str = ""
    session: str = ""
    returns: bool | None = None
    tenant: int = NO_TENANT
    stores: bool = False
    priority: int = 0


class GuardState(NamedTuple):
    """What a policy's guard, which compares the policy with LRU, has counted since the start.

    Attributes:
        trusts_hazard: whether the policy's own order rules, and not LRU's.
        credit: blocks that the policy may still lose to LRU before LRU's order rules.
        immune_blocks: of the blocks used last, how many the policy's own order must not evict.
        hits: blocks that requests found.
        lru_hits: blocks that they would have found with LRU.
        switches: times that LRU's order took over.
    """

    trusts_hazard: bool
    credit: float
    immune_blocks: int
    hits: int
    lru_hits: int
    switches: int


NO_GUARD = GuardState(True, 0.0, 0, 0, 0, 0)
"""Of a policy that has none."""

UNKNOWN_REQUEST = RequestContext()
"""A request of which nothing is known."""


class EvictionPolicy(Protocol):
    """Follows the lives of a tier's blocks, and chooses the next to evict.

    The index calls the policy. It inserts a block, already held, when the bytes are complete. Then
    it releases and holds the block by turns: the block is held while it is leased or pinned, or
    another block builds on it. `evicted` ends its life. The policy keeps its knowledge of a held
    block, but never chooses it.

    A policy sees keys and requests, no bytes or slots, and has no clock of its own. The index
    numbers all uses of blocks: a greater number is a later use. These numbers may differ from the
    order of the calls, because the end of a prefix counts as used before its beginning.

    A call takes amortised O(1) or O(log n) for n blocks, and a policy keeps a bounded number of
    bytes for each block of the tier.
    """

    def began(self, keys: Sequence[bytes], context: RequestContext, now: float) -> None:
        """A request was scheduled.

        Args:
            keys: keys of its prompt's blocks, in the tier or not, first block first.
            context: what is known of the request.
            now: the time in seconds since any start. A time before an earlier one counts as that.
        """
        return

    def ended(self, request_id: str, output_tokens: int, now: float) -> None:
        """The request with this id has ended, if it had begun. Its answer has `output_tokens`
        tokens; `now` as in `began`."""
        return

    def inserted(self, key: bytes, after: bytes | None, fetched: bool = False) -> None:
        """The block of `key` is complete, and held. The policy does not have it.

        Args:
            key: the block's key.
            after: key of the block that it builds on; None if it is the first of its prefix.
            fetched: whether a lower tier gave the block for a request that has not begun.
        """
        ...

    def hit(self, key: bytes, used: int, context: RequestContext) -> None:
        """A scheduled request found the block, held or not: its latest use so far. The index calls
        this once for each such request."""
        return

    def touched(self, key: bytes, used: int) -> None:
        """A block that is not held was used as part of the same request as before, and no use
        before was as late."""
        return

    def held(self, key: bytes) -> None:
        """The block must not be evicted. It was not held before."""
        ...

    def released(self, key: bytes, used: int) -> None:
        """The block was held, and may be evicted now. Its last use was `used`, perhaps long ago."""
        ...

    def evicted(self, key: bytes) -> None:
        """The block, held or not, has left the tier: as a victim, or because it was unreadable."""
        ...

    def victim(self) -> bytes | None:
        """Choose the block to evict next. It stays in the tier until `evicted`. None if all blocks
        are held."""
        ...

    def guard_state(self) -> GuardState:
        """The state of the policy's guard."""
        return NO_GUARD

    def clear(self) -> None:
        """All blocks have left the tier, or an error may have torn what is known of them. The index
        inserts those again that it has."""
        ...


class LRUPolicy:
    """Selects LRU for an index. It is no `EvictionPolicy`: an index knows the order of uses
    itself."""

    def guard_state(self) -> GuardState:
        """LRU needs no guard."""
        return NO_GUARD


def hazard_policy(slots: int) -> EvictionPolicy:
    """Make the policy `hazard` for a tier of `slots` blocks. The kernels have its code, because
    Python would be too slow. Raises ConfigError if the kernels are not installed, or the tier has
    too many blocks."""
    try:
        policy: EvictionPolicy = kernels("hazard").HazardPolicy(slots)
    except ValueError as error:
        raise ConfigError(f"host memory evicts by hazard and its {error}; or lru") from None
    return policy
