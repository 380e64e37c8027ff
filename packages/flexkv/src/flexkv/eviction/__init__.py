# SPDX-License-Identifier: Apache-2.0
"""Eviction policies, which choose the block that a full tier evicts. One policy per file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from flexkv.eviction.choice import AUTO, FOLLOWING, OTHERWISE, choose_policy
from flexkv.eviction.hazard import MOST_BLOCKS, hazard_policy
from flexkv.eviction.lru import LRUPolicy
from flexkv.eviction.policy import (
    NO_GUARD,
    UNKNOWN_REQUEST,
    EvictionPolicy,
    GuardState,
    RequestContext,
)
from flexkv.eviction.tenant_policies import TenantPolicies

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
