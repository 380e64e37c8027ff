# SPDX-License-Identifier: Apache-2.0
"""A rank of an engine meets the others, and starts what copies between its pages and the arena."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from flexkv.host.arena import Arena, ArenaSpec, plan_arena
from flexkv.layout import BlockFormat
from flexkv.service.attach import join_pool, open_pool
from flexkv.session import Session, Shard, alone, join, lead
from flexkv.settings import CacheConfig
from flexkv.system.available import Promise
from flexkv.types.errors import LayoutError

Movers = TypeVar("Movers")
"""The mover or movers of one rank."""

_COPY_THREADS = 4
"""Default of `copy_threads`, or the number of processors if that is less."""


def open_rank(
    config: CacheConfig,
    engine_id: str | None,
    shard: Shard,
    ranks: int,
    start: Callable[[Arena, int], Movers],
    *,
    model: str = "",
    pool_blocks: int = 0,
    engines: int = 1,
    pages: int = 0,
) -> tuple[Session, Movers]:
    """Meet the other ranks, of which rank 0 creates the arena, and start the movers between this
    rank's pages and the arena. The caller closes the movers, then the session.

    `engine_id` names the session; None if the engine is this process alone. `start` makes the
    movers for an arena and a number of threads. `pool_blocks`, `engines` and `pages` are those of
    `plan_arena`. Raises ArenaError if a rank did not join or disagrees, or memory is missing, and
    LayoutError if `start` refuses the pages by a ValueError.
    """
    root, service = config.session_root, config.service
    cpus = os.sched_getaffinity(0) if engine_id is None else copy_cpus()
    threads = config.copy_threads or min(_COPY_THREADS, len(cpus))
    share = None if service is None else functools.partial(open_pool, service, model)

    def plan(block_format: BlockFormat, promised: Sequence[Promise]) -> ArenaSpec:
        return plan_arena(
            block_format,
            config.cpu_cache_gb,
            promised,
            pool_blocks=pool_blocks,
            engines=engines,
            pages=pages,
            grows=config.memory_grows,
        )

    with running_on(cpus):
        if engine_id is None:
            session = alone(root, shard, plan, threads=threads, share=share)
        elif shard.rank > 0:
            session = join(root, engine_id, shard)
        else:
            session = lead(root, engine_id, shard, ranks, plan, threads=threads, share=share)
        with closed_on_error(session):
            if shard.rank > 0:
                if session.info.service is not None:
                    session.membership = join_pool(session.info.service, session.arena)
                session.arena.populate(threads)
            try:
                return session, start(session.arena, threads)
            except ValueError as error:
                raise LayoutError(f"the mover refuses this engine's pages: {error}") from None


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
