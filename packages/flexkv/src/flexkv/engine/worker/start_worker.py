# SPDX-License-Identifier: Apache-2.0
"""Start of a rank's worker side, which makes the copies that the scheduler side orders."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.open_rank import open_rank
from flexkv.engine.worker.layers import split_layers
from flexkv.engine.worker.pages import Device, RankPages
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
    boundary: ErrorBoundary,
    fails_by_request: bool = False,
    alone: bool = True,
    engines: int = 1,
) -> WorkerSide:
    """Meet the other ranks, start the mover, and measure the time of a load.

    Args:
        config: FlexKV's settings.
        engine_id: the engine's id, which names the session.
        pages: the pages of this rank. The engine keeps them until the worker side is closed.
        device: the device of the pages.
        identity: all that the bytes of a block depend on, except its key; `model` of
            `block_identity`.
        boundary: ends, counts and logs run-time errors.
        fails_by_request, alone: see `WorkerSide`.
        engines: see `plan_arena`.

    Returns:
        The worker side, which the caller closes.

    Raises:
        ArenaError: a rank did not join or disagrees, or memory is missing.
        LayoutError: the mover refuses the pages.
    """
    layout = pages.layout
    planes, stored = pages.place()

    def start(arena: Arena, threads: int) -> Mover:
        return device.make_mover(planes, stored, layout.num_blocks, arena, threads)

    shard = pages.shard(identity, device.numa_node)
    session, mover = open_rank(
        config,
        engine_id,
        shard,
        pages.ranks,
        start,
        pool_blocks=layout.num_blocks,
        engines=engines,
    )
    side = WorkerSide(
        session,
        mover,
        pages.rank,
        block_step=layout.head_bytes,
        plane_bytes=[plane.page_bytes for plane in planes],
        stored=stored,
        parts=split_layers(planes, layout.starts),
        work_so_far=device.work_so_far,
        boundary=boundary,
        fails_by_request=fails_by_request,
        alone=alone,
    )
    side.calibrate(layout.num_blocks)
    return side
