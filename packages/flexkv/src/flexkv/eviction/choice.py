# SPDX-License-Identifier: Apache-2.0
"""The policy that the setting `eviction_policy` selects for an engine."""

from __future__ import annotations

from flexkv.eviction.hazard import MOST_BLOCKS

AUTO = "auto"
"""The value that leaves the choice to FlexKV."""

FOLLOWING = "hazard"
"""What `auto` selects if requests are followed. Its guard keeps it from finding much less than LRU;
`docs/pages/design/eviction.md` has the figures."""

OTHERWISE = "lru"
"""What `auto` selects else, and the other value. Without requests `hazard` loses to it."""


def choose_policy(setting: str, slots: int, *, follows_requests: bool) -> str:
    """The name of the policy to use.

    Args:
        setting: value of `eviction_policy`: `auto` or `lru`.
        slots: blocks of the tier.
        follows_requests: whether the policy is told of each request: all blocks of its prompt that
            the tier may hold, and its end.
    """
    may_follow = setting == AUTO and follows_requests and slots <= MOST_BLOCKS
    return FOLLOWING if may_follow else OTHERWISE
