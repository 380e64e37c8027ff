# SPDX-License-Identifier: Apache-2.0
"""The blocks that became loadable, or stopped being loadable, since the last question.

An index notes only the keys of blocks that come and go. The state of a noted block is looked up
when a reader asks, so the answer is current even if the block changed several times in between.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Medium(enum.Enum):
    """The media of tiers, the fastest first. The values are labels of metrics."""

    HOST = "host"
    DISK = "disk"
    MOONCAKE = "mooncake"
    OBJECTS = "objects"

    @property
    def is_shared(self) -> bool:
        """Whether nodes share the tier. Such a tier must be asked which blocks it has."""
        return self in (Medium.MOONCAKE, Medium.OBJECTS)


BELOW = tuple(medium for medium in Medium if medium is not Medium.HOST)
"""The media of tiers below host memory."""


class Change(NamedTuple):
    """A block that may have become loadable or stopped being loadable.

    Attributes:
        medium: the medium of the tier.
        key: the key of the block.
        loadable: whether the tier has the complete block.
    """

    medium: Medium
    key: bytes
    loadable: bool


def take_newest(changed: dict[bytes, None] | None, limit: int) -> list[bytes]:
    """Remove up to `limit` keys from `changed`, the newest first, and return them."""
    if not changed:
        return []
    return [changed.popitem()[0] for _ in range(min(limit, len(changed)))]
