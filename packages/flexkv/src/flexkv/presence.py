# SPDX-License-Identifier: Apache-2.0
"""Where a cache has the block of a key."""

from __future__ import annotations

import enum


class Presence(enum.Enum):
    """Where the block of a key can be had from now."""

    HOST = "host"
    """It can be loaded."""
    BELOW = "below"
    """A lower tier has it: it can be fetched."""
    UNKNOWN = "unknown"
    """A lower tier has to be asked: `KVCache.ask` does, and so does a fetch."""
    ABSENT = "absent"


_BELOW: dict[bool | None, Presence] = {
    True: Presence.BELOW,
    None: Presence.UNKNOWN,
    False: Presence.ABSENT,
}


def presence_below(has: bool | None) -> Presence:
    """Where the block of a key is that host memory does not have.

    Args:
        has: whether a lower tier has the block; None if one has to be asked.
    """
    return _BELOW[has]
