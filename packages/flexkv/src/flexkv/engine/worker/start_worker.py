# SPDX-License-Identifier: Apache-2.0
"""Start of a rank's worker side, which makes the copies that the scheduler side orders."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.open_rank import open_rank
from flexkv.engine.worker.layers import layers_of
from flexkv.engine.worker.pages import Device, PlacedPages, RankPages
from flexkv.engine.worker.pool_mover import NumberedPages, PoolMover
from flexkv.engine.worker.rank_copies import BlockSizes, RankCopies
from flexkv.engine.worker.worker import WorkerSide
from flexkv.host.arena import Arena
from flexkv.settings import CacheConfig
from flexkv.types.mover import Mover


def start_worker(
    config: CacheConfig,
    engine_id: str,
    pages: RankPages,
    device: Device,
    *,
    identity: Sequence[str],
    model: str,
    boundary: ErrorBoundary,
    fails_by_request: bool = False,
    alone: bool = True,
    engines: int = 1,
) -> WorkerSide:
    """Meet the other ranks, start the mover, and measure the time of a load. The engine keeps the
    pages until the worker side is closed. Raises as `open_rank` does.

    Args:
        identity: all that the bytes of a block depend on, except its key; `model` of
            `block_identity`.
        model: the name by which the engine serves its model.
        fails_by_request, alone: see `WorkerSide`.
        engines: see `plan_arena`.
    """
    placed = pages.place()

    def start(arena: Arena, threads: int) -> Mover:
        return _make_mover(device, placed, arena, threads)

    shard = pages.shard(identity, device.numa_node)
    session, mover = open_rank(
        config,
        engine_id,
        shard,
        pages.ranks,
        start,
        model=model,
        pool_blocks=pages.num_blocks,
        engines=engines,
    )
    copies = RankCopies(
        session.arena,
        mover,
        pages.rank,
        block_step=pages.layout.head_bytes,
        sizes=BlockSizes(placed),
        work_so_far=device.work_so_far,
        boundary=boundary,
    )
    copies.calibrate(pages.layout.num_blocks)
    return WorkerSide(
        session, copies, layers_of(placed), fails_by_request=fails_by_request, alone=alone
    )


def _make_mover(device: Device, placed: Sequence[PlacedPages], arena: Arena, threads: int) -> Mover:
    pools: list[NumberedPages] = []
    with contextlib.ExitStack() as undo:
        for pages in placed:
            count = pages.layout.num_blocks
            mover = device.make_mover(pages.planes, pages.stored, count, arena, threads)
            undo.callback(mover.close)
            pools.append(NumberedPages(mover, pages.first, pages.numbers))
        undo.pop_all()
    return pools[0].mover if len(pools) == 1 else PoolMover(pools)
