# SPDX-License-Identifier: Apache-2.0
"""Finds the requests of a step whose blocks it fills, without a look at the others.

The code is among the kernels, because an engine's step waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from flexkv.engine.scheduler.groups import Groups, Reach
from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.system.native import kernels

Filled = tuple[TrackedRequest, int, int]
"""A request whose blocks between two numbers of tokens are full."""


class FullBlocks(Protocol):
    """Requests by the step in which their next block is full if they compute one token per step.

    A decoding request computes one token or none in a step, so its block is never full earlier.
    Requests that compute more tokens are due in every step.
    """

    def watch(self, tracked: TrackedRequest, tokens: int, /) -> None:
        """Make a request due once it has computed `tokens` more tokens, at least one, after the
        step of the last `take`."""
        ...

    def filled(
        self, tracked: TrackedRequest, computed_tokens: int, hash_tokens: int, /
    ) -> tuple[int, int] | None:
        """Find the blocks of a request that are full once `computed_tokens` are computed, and that
        no earlier call has found.

        Speculative decoding also computes draft tokens, and asynchronous scheduling counts tokens
        that are not sampled yet. A block has a hash once all of its tokens are final. They are not
        computed again: later steps do not change the block.

        Args:
            tracked: the request; its `next_fill` is changed.
            computed_tokens: number of its tokens.
            hash_tokens: tokens of one of the engine's block hashes.

        Returns:
            The number of tokens before the first block, and that before the end of the last. None
            if there is no such block, or the request's blocks are unknown.
        """
        ...

    def take(
        self,
        scheduled: Mapping[str, int],
        requests: Mapping[str, TrackedRequest],
        hash_tokens: int,
        several: bool,
        /,
    ) -> list[Filled]:
        """Begin the next step and find the blocks that it fills.

        Args:
            scheduled: tokens that the step computes, by request; a dictionary.
            requests: all tracked requests, by id; a dictionary.
            hash_tokens: as for `filled`.
            several: whether a request of the step computes more than one token.

        Returns:
            The due requests with full blocks.

        Raises:
            Exception: what a request raises that lacks an attribute. The others are due again.
        """
        ...


def full_blocks(groups: Groups) -> FullBlocks:
    """A calendar of requests to a model with these groups. The engine offers recurrent states when
    they are complete, so their blocks are not looked at.

    Raises:
        ConfigError: the kernels are not installed.
    """
    tokens = [0 if g.reach is Reach.STATE else g.engine_block_tokens for g in groups.members]
    calendar: FullBlocks = kernels("steps").NativeFullBlocks(tokens, groups.alignment)
    return calendar
