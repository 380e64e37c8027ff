# SPDX-License-Identifier: Apache-2.0
"""Adds the blocks that a step gives to requests to what is known of these.

The code is among the kernels, because an engine's step waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.system.native import kernels


class ExtendTables(Protocol):
    """The function that `extend_tables` returns."""

    def __call__(
        self,
        requests: Mapping[str, TrackedRequest],
        request_ids: Sequence[str],
        blocks: Sequence[Sequence[Sequence[int]] | None],
        replaced: AbstractSet[str],
        members: Sequence[int],
        /,
    ) -> tuple[list[int], bool]:
        """Append new blocks to the `engine_blocks` of requests whose blocks are known.

        Args:
            requests: the tracked requests, by id; a dictionary. Requests that are not tracked may
                get blocks, too.
            request_ids: ids of requests.
            blocks: for each request its new blocks by the engine's groups; None if it gets none.
            replaced: ids of requests that are left out.
            members: the engine's numbers of the cached groups.

        Returns:
            All new blocks; and whether each request with an entry got at least one.
        """
        ...


def extend_tables() -> ExtendTables:
    """The function that extends the tables of requests.

    Raises:
        ConfigError: the kernels are not installed.
    """
    function: ExtendTables = kernels("steps").extend_tables
    return function
