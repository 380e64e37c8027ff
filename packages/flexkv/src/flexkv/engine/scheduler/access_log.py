# SPDX-License-Identifier: Apache-2.0
"""Records the step that last used each of the engine's blocks. Loads into them must follow it.

The code is among the kernels, because an engine's step waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

from flexkv.system.native import kernels


class AccessLog(Protocol):
    """The blocks that the engine's workers know, and the last step that used each other block.

    The caller reports the same blocks that the engine sends to its workers with each step. Workers
    compute on these blocks only. If a step takes a block from its last request, the step before it
    was the last that used the block. No step has used a block that was never reported.

    In doubt, loads follow all steps. A block that a request seems to keep counts as in use. After
    an error, the caller calls `lose`.

    A call raises ValueError for the number of a block that no engine has.

    Attributes:
        step: number of the step that the engine is preparing; the first is 1.
    """

    @property
    def step(self) -> int: ...

    def begin_step(self, ended: Iterable[str], /) -> None:
        """Begin the next step. The requests `ended` lose their blocks; they may get others."""
        ...

    def touched(self, blocks: Iterable[int], /) -> None:
        """Record that the workers use these blocks in this step, whichever request has them."""
        ...

    def last_use(self, blocks: Sequence[int], /) -> int:
        """The last step that may use any of the blocks; 0 if no step does, EVERYTHING if a request
        has one of them or this object has lost track."""
        ...

    def give(self, request_id: str, blocks: Iterable[int], /) -> None:
        """Record that a request has exactly these blocks in this step."""
        ...

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
        ...

    def check(self, computed: Mapping[str, Any], /) -> None:
        """Check that the blocks of all requests that the step computes are known; else `lose`.

        Args:
            computed: a dictionary whose keys are ids of the requests.
        """
        ...

    def lose(self) -> None:
        """Forget all blocks. From now on, loads follow all steps."""
        ...


def access_log() -> AccessLog:
    """A `AccessLog` that knows no request.

    Raises:
        ConfigError: the kernels are not installed.
    """
    uses: AccessLog = kernels("steps").NativeAccessLog()
    return uses
