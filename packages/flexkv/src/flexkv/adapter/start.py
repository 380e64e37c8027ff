# SPDX-License-Identifier: Apache-2.0
"""Start of an engine's cache: the ranks meet, threads get their processors, tiers are opened."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from flexkv.admission import ADMISSIONS
from flexkv.cache import KVCache
from flexkv.config import GIB, CacheConfig
from flexkv.errors import FlexKVError
from flexkv.eviction import POLICIES
from flexkv.host.arena import plan_arena
from flexkv.host.session import Session, Shard, join, lead
from flexkv.tiers.base import LowerTier
from flexkv.tiers.disk import open_disk_tier

logger = logging.getLogger(__name__)

_QUEUE_SHARE = 2
"""Writes that wait for a disk hold at most half of the arena: what waits cannot be evicted, and new
blocks need room."""


def make_cache(config: CacheConfig, session: Session, *, keeps_on_disk: bool) -> KVCache:
    """The cache over the arena of `session`, with the lower tiers that the settings name.

    Args:
        config: of the engine.
        session: attached; closed if this raises, else the caller's.
        keeps_on_disk: whether blocks on disk mean the same to the next process.

    Raises:
        DiskError: a cache directory cannot be used.
    """
    try:
        tiers = open_tiers(config, session) if keeps_on_disk else []
    except FlexKVError:
        session.close()
        raise
    return KVCache(
        session.arena,
        POLICIES[config.eviction_policy](),
        tiers,
        ADMISSIONS[config.ssd_admission],
        config.ssd_timeout_seconds,
        pin_seconds=config.pin_seconds,
    )


def open_tiers(config: CacheConfig, session: Session) -> list[LowerTier]:
    """The tiers below the arena that the settings name.

    Raises:
        DiskError: a cache directory cannot be used.
    """
    if config.ssd_cache_gb is None:
        return []
    spec = session.arena.spec
    day_gb = config.ssd_write_gb_per_day
    tier = open_disk_tier(
        config.ssd_cache_dir,
        session.info.fingerprint,
        spec.format.slot_bytes,
        int(config.ssd_cache_gb * GIB),
        share=config.ssd_in_use == "own",
        keep_others=config.ssd_other_models == "keep",
        day_bytes=None if day_gb is None else int(day_gb * GIB),
        queue_bytes=spec.num_slots * spec.format.slot_bytes // _QUEUE_SHARE,
        stall_seconds=config.ssd_timeout_seconds,
    )
    for drive in tier.drives:
        index = drive.index
        logger.info(
            "FlexKV keeps blocks in %s: %d of %d slots are warm",
            drive.path,
            len(index),
            index.num_slots,
        )
    return [tier]


def meet(config: CacheConfig, engine_id: str, shard: Shard, ranks: int, threads: int) -> Session:
    """Meet the other ranks; rank 0 makes the arena.

    Args:
        config: of the engine.
        engine_id: its name for the session.
        shard: this rank's.
        ranks: of the engine.
        threads: that fill the arena.

    Raises:
        ArenaError: they do not come, disagree, or the memory is not there.
    """
    if shard.rank > 0:
        session = join(config.session_root, engine_id, shard)
        session.arena.populate(threads)
        return session
    return lead(
        config.session_root,
        engine_id,
        shard,
        ranks,
        lambda block_format: plan_arena(block_format, config.cpu_cache_gb),
        threads=threads,
    )


def copy_cpus() -> set[int]:
    """Processors that copies may run on: this process's, and those of the one that started it.

    An engine may pin a worker, and with it all threads it starts, to the processors that compute
    (vLLM's CPU build does). Copies there would take turns with the forward pass while others are
    idle.
    """
    return os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid())


@contextlib.contextmanager
def running_on(cpus: set[int]) -> Iterator[None]:
    """Let this thread run on `cpus`: threads that it starts meanwhile keep them."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
