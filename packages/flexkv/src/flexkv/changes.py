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
    """Where a tier keeps its blocks, the fastest first. The values are labels of metrics."""

    HOST = "host"
    DISK = "disk"
    MOONCAKE = "mooncake"
    OBJECTS = "objects"

    @property
    def is_shared(self) -> bool:
        """Whether nodes share the tier. It does not tell what it holds, and has to be asked."""
        return self in (Medium.MOONCAKE, Medium.OBJECTS)


BELOW = tuple(medium for medium in Medium if medium is not Medium.HOST)
"""The media of tiers below host memory."""


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
