# SPDX-License-Identifier: Apache-2.0
"""Where a cache has the block of a key."""

from __future__ import annotations

import enum


class Presence(enum.Enum):
    """The place at which a cache has the block of a key now."""

    HOST = "host"
    """Host memory has the block: it can be loaded."""
    BELOW = "below"
    """A lower tier has the block: it can be fetched."""
    UNKNOWN = "unknown"
    """A lower tier that needs a query may have the block. `CacheClient.query` and a fetch make the
    query."""
    ABSENT = "absent"
    """No tier can give the block now."""


_BELOW: dict[bool | None, Presence] = {
    True: Presence.BELOW,
    None: Presence.UNKNOWN,
    False: Presence.ABSENT,
}


def presence_below(has: bool | None) -> Presence:
    """The presence of a block that host memory does not have. `has` says whether a lower tier has
    it, and is None if a tier needs a query to know."""
    return _BELOW[has]
