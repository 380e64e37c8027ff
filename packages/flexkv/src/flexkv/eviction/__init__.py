# SPDX-License-Identifier: Apache-2.0
"""Eviction policies, which choose the block that a full tier evicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from flexkv.eviction.policy import (
    MOST_BLOCKS,
    NO_GUARD,
    UNKNOWN_REQUEST,
    EvictionPolicy,
    GuardState,
    LRUPolicy,
    RequestContext,
    hazard_policy,
)
from flexkv.eviction.tenant_policies import TenantPolicies

AUTO = "auto"
"""The value that leaves the choice to FlexKV."""

FOLLOWING = "hazard"
"""What `auto` selects if requests are followed. Its guard keeps it from finding much less than LRU;
`docs/pages/design/eviction.md` has the figures."""

OTHERWISE = "lru"
"""What `auto` selects else, and the other value. Without requests `hazard` loses to it."""

OnePolicy: TypeAlias = EvictionPolicy | LRUPolicy
"""A policy of all blocks of a tier, or of a tenant's."""

AnyPolicy: TypeAlias = OnePolicy | TenantPolicies
"""The policies that an index accepts."""

POLICIES: dict[str, Callable[[int], OnePolicy]] = {
    "lru": lambda slots: LRUPolicy(),
    "hazard": hazard_policy,
}
"""Functions that make each policy, for a tier with a number of slots."""

__all__ = [
    "AUTO",
    "FOLLOWING",
    "MOST_BLOCKS",
    "NO_GUARD",
    "OTHERWISE",
    "POLICIES",
    "UNKNOWN_REQUEST",
    "AnyPolicy",
    "EvictionPolicy",
    "GuardState",
    "LRUPolicy",
    "OnePolicy",
    "RequestContext",
    "TenantPolicies",
    "choose_policy",
]


def choose_policy(setting: str, slots: int, *, follows_requests: bool) -> str:
    """The name of the policy that `eviction_policy` selects for a tier of `slots` blocks.
    `follows_requests`: whether the policy learns of each request all blocks of its prompt that the
    tier may hold, and its end."""
    may_follow = setting == AUTO and follows_requests and slots <= MOST_BLOCKS
    return FOLLOWING if may_follow else OTHERWISE
