# SPDX-License-Identifier: Apache-2.0
"""What an engine's steps do to its blocks. `kernels/src/steps` has the code."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

from flexkv.engine.scheduler.request import TrackedRequest

class AccessLog:
    """The blocks that the engine's workers know, and the last step that used each other block.

    The caller reports the same blocks that the engine sends to its workers with each step. Workers
    compute on these blocks only. If a step takes a block from its last request, the step before it
    was the last that used the block. No step has used a block that was never reported.

    In doubt, loads follow all steps. A block that a request seems to keep counts as in use. After
    an error, the caller calls `lose`.

    A call raises ValueError for the number of a block that no engine has. `step`: number of the
    step that the engine is preparing; the first is 1.
    """

    @property
    def step(self) -> int: ...
    def begin_step(self, ended: Iterable[str], /) -> None:
        """Begin the next step. The requests `ended` lose their blocks; they may get others."""

    def touched(self, blocks: Iterable[int], /) -> None:
        """Record that the workers use these blocks in this step, whichever request has them."""

    def last_use(self, blocks: Sequence[int], /) -> int:
        """The last step that may use any of the blocks; 0 if no step does, EVERYTHING if a request
        has one of them or this object has lost track."""

    def give(self, request_id: str, blocks: Iterable[int], /) -> None:
        """Record that a request has exactly these blocks in this step."""

    def follow(
        self,
        request_ids: Sequence[str],
        blocks: Sequence[Sequence[Sequence[int]] | None],
        replaced: AbstractSet[str],
        /,
    ) -> None:
        """Record the blocks that requests get in this step. An unknown request makes this object
        `lose` track.

        Args:
            request_ids: ids of requests.
            blocks: for each request the blocks of the engine's only group; None if it gets none.
            replaced: ids of the requests that have exactly these blocks; the others keep theirs.
        """

    def check(self, computed: Mapping[str, Any], /) -> None:
        """Check that the blocks of all requests that the step computes are known; else `lose`.
        `computed`: a dictionary whose keys are ids of the requests."""

    def lose(self) -> None:
        """Forget all blocks. From now on, loads follow all steps."""

NativeAccessLog: Final = AccessLog

class FullBlocks:
    """Requests by the step in which their next block is full if they compute one token per step.

    A decoding request computes one token or none in a step, so its block is never full earlier.
    Requests that compute more tokens are due in every step.
    """

    def __init__(self, group_tokens: Sequence[int], alignment: int, /) -> None:
        """A calendar that watches no request. Raises ValueError if the alignment is not allowed.

        Args:
            group_tokens: tokens of an engine block of each cached group; 0 for a group of states.
            alignment: see `Groups`.
        """

    def watch(self, tracked: TrackedRequest, tokens: int, /) -> None:
        """Make a request due once it has computed `tokens` more tokens, at least one, after the
        step of the last `take`."""

    def filled(
        self, tracked: TrackedRequest, computed_tokens: int, hash_tokens: int, /
    ) -> tuple[int, int] | None:
        """Find the blocks of a request that are full once `computed_tokens` are computed, and that
        no earlier call has found.

        Speculative decoding also computes draft tokens, and asynchronous scheduling counts tokens
        that are not sampled yet. A block has a hash once all of its tokens are final. They are not
        computed again: later steps do not change the block. Returns the number of tokens before the
        first block, and that before the end of the last. None if there is no such block, or the
        request's blocks are unknown.

        Args:
            tracked: the request; its `next_fill` is changed.
            computed_tokens: number of its tokens.
            hash_tokens: tokens of one of the engine's block hashes.
        """

    def take(
        self,
        scheduled: Mapping[str, int],
        requests: Mapping[str, TrackedRequest],
        hash_tokens: int,
        several: bool,
        /,
    ) -> list[tuple[TrackedRequest, int, int]]:
        """Begin the next step and find the blocks that it fills. Returns the due requests with full
        blocks. Raises what a request raises that lacks an attribute. The others are due again.

        Args:
            scheduled: tokens that the step computes, by request; a dictionary.
            requests: all tracked requests, by id; a dictionary.
            hash_tokens: as for `filled`.
            several: whether a request of the step computes more than one token.
        """

NativeFullBlocks: Final = FullBlocks

def extend_tables(
    requests: Mapping[str, TrackedRequest],
    request_ids: Sequence[str],
    blocks: Sequence[Sequence[Sequence[int]] | None],
    replaced: AbstractSet[str],
    members: Sequence[int],
    /,
) -> tuple[list[int], bool]:
    """Append new blocks to the `engine_blocks` of requests whose blocks are known. Returns all new
    blocks; and whether each request with an entry got at least one.

    Args:
        requests: the tracked requests, by id; a dictionary. Requests that are not tracked may
            get blocks, too.
        blocks: for each request its new blocks by the engine's groups; None if it gets none.
    """
