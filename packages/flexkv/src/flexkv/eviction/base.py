# SPDX-License-Identifier: Apache-2.0
"""The seam between the index and the policy that picks its victims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What is known of a request.

    Attributes:
        prompt_tokens: of its prompt; 0 if that is not known.
        hit_tokens: of these, found in a cache, the engine's own included; 0 if that is not known.
        request_id: unique among the requests that have not ended; empty if there is none.
        session: of the conversation that it belongs to; empty if its client did not say.
        returns: whether its client expects to send a prompt that begins with this one soon; None
            if it did not say.
    """

    prompt_tokens: int = 0
    hit_tokens: int = 0
    request_id: str = ""
    session: str = ""
    returns: bool | None = None


UNKNOWN_REQUEST = RequestContext()
"""A request of which nothing is known."""


class EvictionPolicy(Protocol):
    """Follows the lives of a tier's blocks, and picks the one to evict next.

    The index calls a policy: a block is inserted when its bytes are complete, and held then. It is
    released and held by turns: it is held while it is leased or pinned, and while another block
    builds on it. It ends with `evicted`. A held block keeps what the policy knows of it, but is no
    victim.

    A policy sees keys and requests, no bytes or slots, and has no clock of its own. The index
    numbers all uses of blocks: a greater number is a later use. These numbers may differ from the
    order of the calls, because the end of a prefix counts as used before its beginning.

    A call takes amortised O(1) or O(log n) for n blocks, and a policy keeps a bounded number of
    bytes for each block of the tier.
    """

    def began(self, keys: Sequence[bytes], ready: int, context: RequestContext, now: float) -> None:
        """A request was scheduled.

        Args:
            keys: of its prompt's blocks, in the tier or not, first block first.
            ready: how many of these, from the first on, are in the tier.
            context: of the request.
            now: the time in seconds, from any start, no earlier than in calls before.
        """
        return

    def ended(self, request_id: str, output_tokens: int, now: float) -> None:
        """The request of that id, if one began, has ended with an answer of so many tokens."""
        return

    def inserted(self, key: bytes, after: bytes | None) -> None:
        """The block of `key` is complete, and held. It builds on the block of `after`; None if it
        is the first of its prefix. The policy does not have it."""
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

    def victim(self, newcomer: bytes | None = None) -> bytes | None:
        """The key of the block to evict next, which stays until `evicted`.

        Args:
            newcomer: key of the block that is to have its slot; None if there is none yet.

        Returns:
            None if all blocks are held, or if the newcomer is worth less than all others.
        """
        ...

    def clear(self) -> None:
        """All blocks have left the tier."""
        ...
