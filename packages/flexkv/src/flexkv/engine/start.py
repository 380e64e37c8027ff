# SPDX-License-Identifier: Apache-2.0
"""Start of an engine's cache: lets the ranks meet, places threads on processors, opens tiers."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from flexkv.cache import KVCache
from flexkv.client import CacheClient, FetchState
from flexkv.engine.choice.load_choice import LoadChooser, LoadMode
from flexkv.engine.open_tiers import open_tiers
from flexkv.engine.recorder import Recorder, open_recorder
from flexkv.eviction import POLICIES, AnyPolicy, choose_policy
from flexkv.host.arena import Arena, ArenaSpec, plan_arena
from flexkv.layout import BlockFormat
from flexkv.session import Session, Shard, alone, attach, join, lead
from flexkv.settings import CacheConfig
from flexkv.system.available import Promise
from flexkv.types.errors import LayoutError

Movers = TypeVar("Movers")
"""The mover or movers of one rank."""

logger = logging.getLogger(__name__)

_COPY_THREADS = 4
"""Default of `copy_threads`, or the number of processors if that is less. Not tuned."""


def attach_session(config: CacheConfig, engine_id: str) -> Session:
    """Attach to the session of an engine's ranks, as its scheduler.

    Args:
        config: FlexKV's settings.
        engine_id: the engine's id, which names the session.

    Returns:
        The session, which the caller closes.

    Raises:
        ArenaError: the ranks have opened no session.
    """
    return attach(config.session_root, engine_id)


def policy_maker(config: CacheConfig, follows_requests: bool) -> Callable[[int], AnyPolicy]:
    """What makes the eviction policy that the settings name, for a tier of a number of slots."""

    def make(slots: int) -> AnyPolicy:
        name = choose_policy(config.eviction_policy, slots, follows_requests=follows_requests)
        return POLICIES[name](slots)

    return make


def make_cache(
    config: CacheConfig, session: Session, *, keeps_blocks: bool, follows_requests: bool
) -> KVCache:
    """Make the cache over the arena of `session`, with the lower tiers that the settings name.

    Args:
        config: FlexKV's settings.
        session: the session; borrowed, and closed by the caller after the cache.
        keeps_blocks: whether blocks below the arena are valid for other processes. If not, the
            cache has no lower tiers.
        follows_requests: whether the caller reports to the cache each request with all blocks of
            its prompt, and its end. It decides what `eviction_policy=auto` selects.

    Returns:
        The cache, which the caller closes.

    Raises:
        DiskError: a cache directory cannot be used.
        ConfigError: what a shared store needs is not installed.
        StoreSettingError: a shared store cannot be used as the settings name it.
    """
    slots = session.arena.spec.num_slots
    name = choose_policy(config.eviction_policy, slots, follows_requests=follows_requests)
    policy = POLICIES[name](slots)
    logger.info("host memory evicts by %s (eviction_policy is %s)", name, config.eviction_policy)
    return KVCache(
        session.arena,
        policy,
        open_tiers(config, session, policy_maker(config, follows_requests)) if keeps_blocks else [],
        policy_name=name,
        pin_seconds=config.pin_seconds,
    )


def open_rank(
    config: CacheConfig,
    engine_id: str | None,
    shard: Shard,
    ranks: int,
    start: Callable[[Arena, int], Movers],
    *,
    pool_blocks: int = 0,
) -> tuple[Session, Movers]:
    """Meet the other ranks, and start the movers between this rank's pages and the arena.

    Args:
        config: FlexKV's settings.
        engine_id: the engine's id, which names the session; None if the engine is this process
            alone.
        shard: the shard of this rank.
        ranks: the number of ranks of the engine.
        start: makes the movers for an arena and a number of threads. May raise ValueError.
        pool_blocks: see `plan_arena`.

    Returns:
        The session and the movers. The caller closes the movers, then the session.

    Raises:
        ArenaError: a rank did not join or disagrees, or memory is missing.
        LayoutError: `start` refuses the pages.
    """
    cpus = os.sched_getaffinity(0) if engine_id is None else copy_cpus()
    threads = config.copy_threads or min(_COPY_THREADS, len(cpus))
    with running_on(cpus):
        session = meet(config, engine_id, shard, ranks, threads, pool_blocks=pool_blocks)
        with closed_on_error(session):
            try:
                return session, start(session.arena, threads)
            except ValueError as error:
                raise LayoutError(f"the mover refuses this engine's pages: {error}") from None


def meet(
    config: CacheConfig,
    engine_id: str | None,
    shard: Shard,
    ranks: int,
    threads: int,
    *,
    pool_blocks: int = 0,
) -> Session:
    """Meet the other ranks. Rank 0 creates the arena. See `open_rank`."""
    if shard.rank > 0 and engine_id is not None:
        session = join(config.session_root, engine_id, shard)
        with closed_on_error(session):
            session.arena.populate(threads)
        return session

    def plan(block_format: BlockFormat, promised: Sequence[Promise]) -> ArenaSpec:
        return plan_arena(block_format, config.cpu_cache_gb, promised, pool_blocks=pool_blocks)

    if engine_id is None:
        return alone(config.session_root, shard, plan, threads=threads)
    return lead(config.session_root, engine_id, shard, ranks, plan, threads=threads)


def make_chooser(
    config: CacheConfig,
    mode: LoadMode,
    spec: ArenaSpec,
    cache: CacheClient | None,
    *,
    on_cores: bool = False,
    steps_behind: int = 1,
) -> LoadChooser:
    """Make the object that decides which hits of an engine are loaded, and how.

    Args:
        config: FlexKV's settings.
        mode: the load mode in force.
        spec: sizes of the engine's arena.
        cache: the cache of the engine, borrowed; None on a rank that decides nothing.
        on_cores: see `LoadChooser`.
        steps_behind: see `LoadChooser`.
    """
    return LoadChooser(
        mode,
        config.min_load_tokens,
        config.always_load,
        sum(spec.format.shard_bytes),
        spec.ranks,
        on_cores=on_cores,
        loading=lambda: 0 if cache is None else cache.loading_blocks,
        state_of=lambda fetch: FetchState(0.0) if cache is None else cache.fetch_state(fetch),
        steps_behind=steps_behind,
    )


def make_recorder(
    config: CacheConfig, engine: str, block_tokens: int, block_bytes: int, chooser: LoadChooser
) -> Recorder | None:
    """Open a recorder of an engine's requests; see `open_recorder`.

    Args:
        config: FlexKV's settings.
        engine: name of the engine.
        block_tokens: tokens of a block.
        block_bytes: bytes of a block over all ranks.
        chooser: measures the cost of computing; borrowed by the recorder.
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
    """The processors that copies may run on: those of this process and of its parent.

    An engine may pin a worker and all of its threads to the processors that compute, as vLLM's CPU
    build does. There, copies would compete with the forward pass while other processors are idle.
    """
    return os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid())


@contextlib.contextmanager
def running_on(cpus: set[int]) -> Iterator[None]:
    """Let this thread run on `cpus` during the block. Threads that it starts there keep `cpus`."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
