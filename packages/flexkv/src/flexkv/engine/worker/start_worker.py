# SPDX-License-Identifier: Apache-2.0
"""Start of a rank's worker side, which makes the copies that the scheduler side orders."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.open_rank import open_rank
from flexkv.engine.worker.block_sizes import BlockSizes, SizedPart
from flexkv.engine.worker.layers import LayerParts, SplitLayout, merge_layers, split_layers
from flexkv.engine.worker.pages import Device, PlacedPages, RankPages
from flexkv.engine.worker.pool_mover import NumberedPages, PoolMover
from flexkv.engine.worker.worker import WorkerSide
from flexkv.host.arena import Arena
from flexkv.settings import CacheConfig
from flexkv.types.mover import LAYER_PARTS, Mover


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
    """Meet the other ranks, start the mover, and measure the time of a load.

    Args:
        config: FlexKV's settings.
        engine_id: the engine's id, which names the session.
        pages: the pages of this rank. The engine keeps them until the worker side is closed.
        device: the device of the pages.
        identity: all that the bytes of a block depend on, except its key; `model` of
            `block_identity`.
        model: the name by which the engine serves its model.
        boundary: ends, counts and logs run-time errors.
        fails_by_request, alone: see `WorkerSide`.
        engines: see `plan_arena`.

    Returns:
        The worker side, which the caller closes.

    Raises:
        ArenaError: a rank did not join or disagrees, or memory is missing.
        LayoutError: the mover refuses the pages.
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
    side = WorkerSide(
        session,
        mover,
        pages.rank,
        block_step=pages.layout.head_bytes,
        sizes=_sizes_of(placed),
        parts=_layers_of(pages, placed),
        work_so_far=device.work_so_far,
        boundary=boundary,
        fails_by_request=fails_by_request,
        alone=alone,
    )
    side.calibrate(pages.layout.num_blocks)
    return side


def _make_mover(device: Device, placed: Sequence[PlacedPages], arena: Arena, threads: int) -> Mover:
    with contextlib.ExitStack() as undo:
        movers = []
        for pages in placed:
            mover = device.make_mover(pages.planes, pages.stored, pages.num_blocks, arena, threads)
            undo.callback(mover.close)
            movers.append(mover)
        undo.pop_all()
    if len(movers) == 1:
        return movers[0]
    return PoolMover(
        [NumberedPages(m, *part) for m, part in zip(movers, _parts_of(placed), strict=True)]
    )


def _sizes_of(placed: Sequence[PlacedPages]) -> BlockSizes:
    planes = [plane.page_bytes for pages in placed for plane in pages.planes]
    parts = _parts_of(placed)
    stored = [
        part.planes[i] for part, pages in zip(parts, placed, strict=True) for i in pages.stored
    ]
    return BlockSizes(planes, stored, parts)


def _parts_of(placed: Sequence[PlacedPages]) -> list[SizedPart]:
    """The numbers of each layout's blocks and planes among those of all."""
    blocks = itertools.accumulate((pages.num_blocks for pages in placed), initial=0)
    planes = itertools.accumulate((len(pages.planes) for pages in placed), initial=0)
    ranges = itertools.starmap(range, itertools.pairwise(planes))
    return [SizedPart(*each) for each in zip(blocks, ranges, strict=False)]


def _layers_of(pages: RankPages, placed: Sequence[PlacedPages]) -> LayerParts:
    """The parts of all pages, in the order in which layers need them."""
    whole = split_layers(placed[0].planes, pages.layout.starts)
    if not pages.apart:
        return whole
    splits = [SplitLayout(0, 0.0, 1.0, whole)]
    count = max(1, LAYER_PARTS // 2 // len(pages.apart))
    its = zip(pages.apart, placed[1:], _parts_of(placed)[1:], strict=True)
    for apart, its_pages, part in its:
        split = split_layers(its_pages.planes, apart.layout.starts, count)
        splits.append(SplitLayout(part.planes.start, apart.begin, apart.share, split))
    return merge_layers(splits)
