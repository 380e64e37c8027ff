# SPDX-License-Identifier: Apache-2.0
"""Which blocks can be loaded now and could not before, and the other way round.

An index notes the keys of blocks that come and go, nothing else; what became of them is looked up
when somebody asks. So what happened to a block in between costs nothing to tell, and what is told
is true whatever happened.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Medium(enum.Enum):
    """Where a tier keeps its blocks."""

    HOST = "host"
    DISK = "disk"
    MOONCAKE = "mooncake"
    OBJECTS = "objects"


class Change(NamedTuple):
    """A block that may have come or gone.

    Attributes:
        medium: of the tier.
        name: what the tier calls the block; see `KVCache.name_of`.
        loadable: whether the tier has it, complete.
    """

    medium: Medium
    name: bytes
    loadable: bool


def take_newest(changed: dict[bytes, None] | None, limit: int) -> list[bytes]:
    """Take up to `limit` keys out of `changed`, those that were noted last."""
    if not changed:
        return []
    return [changed.popitem()[0] for _ in range(min(limit, len(changed)))]
