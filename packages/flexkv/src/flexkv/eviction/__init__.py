# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: which block leaves a full tier first. One policy a file."""

from __future__ import annotations

from collections.abc import Callable

from flexkv.eviction.arc import ARCPolicy
from flexkv.eviction.base import UNKNOWN_REQUEST, EvictionPolicy, RequestContext
from flexkv.eviction.hazard import has_hazard_policy, hazard_policy
from flexkv.eviction.lru import LRUPolicy
from flexkv.eviction.s3fifo import S3FIFOPolicy

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda slots: LRUPolicy(),
    "s3fifo": lambda slots: S3FIFOPolicy(),
    "arc": lambda slots: ARCPolicy(),
    "hazard": hazard_policy,
}
"""What makes each policy, for a tier of so many blocks."""


def installed_policies() -> list[str]:
    """Names of the policies that can be made: without the kernels, all but `hazard`."""
    return [name for name in POLICIES if name != "hazard" or has_hazard_policy()]


__all__ = [
    "POLICIES",
    "UNKNOWN_REQUEST",
    "ARCPolicy",
    "EvictionPolicy",
    "LRUPolicy",
    "RequestContext",
    "S3FIFOPolicy",
    "installed_policies",
]
