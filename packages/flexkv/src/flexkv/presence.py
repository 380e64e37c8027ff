# SPDX-License-Identifier: Apache-2.0
"""Where a cache has the block of a key."""

from __future__ import annotations

import enum


class Presence(enum.Enum):
    """Where a cache has the block of a key now."""

    HOST = "host"
    """In host memory: it can be loaded."""
    BELOW = "below"
    """In a lower tier: it can be fetched."""
    UNKNOWN = "unknown"
    """Perhaps in a lower tier that needs a query. `KVCache.ask` and a fetch make the query."""
    ABSENT = "absent"


_BELOW: dict[bool | None, Presence] = {
    True: Presence.BELOW,
    None: Presence.UNKNOWN,
    False: Presence.ABSENT,
}


def presence_below(has: bool | None) -> Presence:
    """The presence of a block that host memory does not have.

    Args:
        has: whether a lower tier has the block; None if a tier needs a query to know.
    """
    return _BELOW[has]
