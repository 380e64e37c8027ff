# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest

from flexkv.engine.worker.rank_copies import RankSlots
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat

BLOCK = 640
SLOTS = [5, 0, 3, 3, 6]


@pytest.fixture(params=[1, 4], ids=lambda count: f"{count} engine blocks")
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    shards = (request.param * BLOCK, request.param * 2 * BLOCK)
    arena = Arena.create(ArenaSpec(BlockFormat(request.param, shards), 7), threads=1)
    yield arena
    arena.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_engine_block_lies_in_its_slot_behind_those_before_it(arena: Arena, rank: int) -> None:
    step = BLOCK * (rank + 1)
    count = arena.spec.format.engine_blocks
    places = [arena.shard_offset(slot, rank) + i * step for slot in SLOTS for i in range(count)]
    offsets = RankSlots(arena, rank, step)
    assert offsets.offsets(SLOTS).tolist() == places
    assert offsets.offsets(range(3)).tolist() == [
        arena.shard_offset(slot, rank) + i * step for slot in range(3) for i in range(count)
    ]


def test_a_load_may_begin_and_end_inside_a_slot(arena: Arena) -> None:
    count = arena.spec.format.engine_blocks
    whole = RankSlots(arena, 0, BLOCK).offsets(SLOTS).tolist()
    skip, stop = count - 1, len(whole) - count // 2
    assert RankSlots(arena, 0, BLOCK).offsets(SLOTS, skip, stop - skip).tolist() == whole[skip:stop]


def test_nothing_has_no_places(arena: Arena) -> None:
    assert RankSlots(arena, 0, BLOCK).offsets([]).tolist() == []
