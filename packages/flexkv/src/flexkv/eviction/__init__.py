# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: which block leaves a full tier first. One policy a file."""

from __future__ import annotations

from collections.abc import Callable

from flexkv.eviction.arc import ARCPolicy
from flexkv.eviction.base import UNKNOWN_REQUEST, EvictionPolicy, RequestContext
from flexkv.eviction.lru import LRUPolicy
from flexkv.eviction.s3fifo import S3FIFOPolicy


def _hazard() -> EvictionPolicy:
    from flexkv.eviction.hazard import HazardPolicy  # needs NumPy, which takes time to import

    return HazardPolicy()


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRUPolicy,
    "s3fifo": S3FIFOPolicy,
    "arc": ARCPolicy,
    "hazard": _hazard,
}

__all__ = [
    "POLICIES",
    "UNKNOWN_REQUEST",
    "ARCPolicy",
    "EvictionPolicy",
    "LRUPolicy",
    "RequestContext",
    "S3FIFOPolicy",
]
