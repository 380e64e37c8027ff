# SPDX-License-Identifier: Apache-2.0
"""The blocks to load for a request, group by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from flexkv.engine.scheduler.groups import Group


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks of a group to load: position of the first, and their keys."""

    group: Group
    start: int
    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Plan:
    """The load of a request with several groups, as planned when its turn came.

    Attributes:
        local_tokens: tokens that the engine had itself.
        limit: the most tokens of the hit.
        hit: tokens of the hit.
        divergence: as in `Match`.
        in_host: whether all blocks were in host memory when this was made.
        wanted: the blocks for the hit; none if all are in host memory.
    """

    local_tokens: int
    limit: int
    hit: int
    divergence: int
    in_host: bool
    wanted: Sequence[Wanted]


def flat(wanted: Sequence[Wanted]) -> Sequence[bytes]:
    """The keys of all groups, one after the other."""
    if len(wanted) == 1:
        return wanted[0].keys
    return list(chain.from_iterable(each.keys for each in wanted))
