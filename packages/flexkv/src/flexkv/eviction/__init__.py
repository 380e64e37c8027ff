# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: which block leaves a full tier first. One policy a file."""

from __future__ import annotations

from collections.abc import Callable

from flexkv.eviction.base import UNKNOWN_REQUEST, EvictionPolicy, RequestContext
from flexkv.eviction.lru import LRUPolicy
from flexkv.eviction.s3fifo import S3FIFOPolicy

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRUPolicy, "s3fifo": S3FIFOPolicy}

__all__ = [
    "POLICIES",
    "UNKNOWN_REQUEST",
    "EvictionPolicy",
    "LRUPolicy",
    "RequestContext",
    "S3FIFOPolicy",
]
