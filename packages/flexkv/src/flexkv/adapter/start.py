# SPDX-License-Identifier: Apache-2.0
"""Start of an engine's cache: the ranks meet, threads get their processors, tiers are opened."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from flexkv.adapter.load_choice import LoadChooser
from flexkv.adapter.lower_tiers import open_tiers
from flexkv.adapter.recorder import Recorder, open_recorder
from flexkv.cache import KVCache
from flexkv.config import CacheConfig
from flexkv.errors import LayoutError
from flexkv.eviction import POLICIES
from flexkv.host.arena import Arena, ArenaSpec, plan_arena
from flexkv.host.session import Session, SessionInfo, Shard, alone, attach, join, lead
from flexkv.layout import BlockFormat

Movers = TypeVar("Movers")
"""What copies of one rank: a mover, or several."""

logger = logging.getLogger(__name__)

_COPY_THREADS = 4
"""Default of `copy_threads` where there are as many processors."""


def make_cache(config: CacheConfig, session: Session, *, keeps_blocks: bool) -> KVCache:
    """The cache over the arena of `session`, with the lower tiers that the settings name.

    Args:
        config: of the engine.
        session: attached; the caller's.
        keeps_blocks: whether blocks below the arena mean the same to other processes.

    Raises:
        DiskError: a cache directory cannot be used.
        ConfigError: what a shared store needs is not installed.
        StoreSettingError: a shared store cannot be used as the settings name it.
    """
    return KVCache(
        session.arena,
        POLICIES[config.eviction_policy](session.arena.spec.num_slots),
        open_tiers(config, session) if keeps_blocks else [],
        pin_seconds=config.pin_seconds,
    )


def attach_cache(
    config: CacheConfig, engine_id: str, keeps_blocks: Callable[[SessionInfo], bool]
) -> tuple[Session, KVCache]:
    """The session that an engine's ranks have opened, and the cache over its arena.

    Args:
        config: of the engine.
        engine_id: its name for the session.
        keeps_blocks: whether blocks below the arena mean the same to other processes.

    Returns:
        Both are the caller's: the cache is closed before the session.

    Raises:
        ArenaError: the ranks have opened none.
        DiskError: a cache directory cannot be used.
    """
    session = attach(config.session_root, engine_id)
    with closed_on_error(session):
        return session, make_cache(config, session, keeps_blocks=keeps_blocks(session.info))


def open_rank(
    config: CacheConfig,
    engine_id: str | None,
    shard: Shard,
    ranks: int,
    start: Callable[[Arena, int], Movers],
) -> tuple[Session, Movers]:
    """Meet the other ranks, and start what copies between this rank's pages and the arena.

    Args:
        config: of the engine.
        engine_id: its name for the session; None if this process is all there is of it.
        shard: this rank's.
        ranks: of the engine.
        start: makes the movers, for an arena and a number of threads. May raise ValueError.

    Returns:
        The session, to be closed after the movers, and what `start` returned.

    Raises:
        ArenaError: the ranks do not come, disagree, or the memory is not there.
        LayoutError: `start` refuses the pages.
    """
    cpus = os.sched_getaffinity(0) if engine_id is None else copy_cpus()
    threads = config.copy_threads or min(_COPY_THREADS, len(cpus))
    with running_on(cpus):
        session = meet(config, engine_id, shard, ranks, threads)
        with closed_on_error(session):
            try:
                return session, start(session.arena, threads)
            except ValueError as error:
                raise LayoutError(f"the mover refuses this engine's pages: {error}") from None


def meet(
    config: CacheConfig, engine_id: str | None, shard: Shard, ranks: int, threads: int
) -> Session:
    """Meet the other ranks; rank 0 makes the arena. See `open_rank`."""
    if shard.rank > 0 and engine_id is not None:
        session = join(config.session_root, engine_id, shard)
        with closed_on_error(session):
            session.arena.populate(threads)
        return session

    def plan(block_format: BlockFormat) -> ArenaSpec:
        return plan_arena(block_format, config.cpu_cache_gb)

    if engine_id is None:
        return alone(shard, plan, threads=threads)
    return lead(config.session_root, engine_id, shard, ranks, plan, threads=threads)


def make_recorder(
    config: CacheConfig, engine: str, block_tokens: int, block_bytes: int, chooser: LoadChooser
) -> Recorder | None:
    """A recorder of an engine's requests; see `open_recorder`.

    Args:
        config: of the engine.
        engine: its name.
        block_tokens: tokens of a block.
        block_bytes: bytes of a block over all ranks.
        chooser: of the engine; it measures the cost of computing.
    """
    return open_recorder(
        config,
        engine=engine,
        block_tokens=block_tokens,
        block_bytes=block_bytes,
        prefill=lambda: chooser.prefill_cost,
    )


@contextlib.contextmanager
def closed_on_error(session: Session) -> Iterator[None]:
    """Close `session` if the block raises."""
    try:
        yield
    except BaseException:
        session.close()
        raise


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
