# SPDX-License-Identifier: Apache-2.0
"""The pages of a rank, some of which the engine numbers apart."""

from __future__ import annotations

from flexkv import KVLayout, TensorView
from flexkv.engine.worker.pages import ApartPages, RankPages
from flexkv.layout import Sharding

HEADS, DIM = 4, 16


def layout_of(layers: int, blocks: int, heads: int) -> KVLayout:
    """Layers of heads with `DIM` bytes a page, which KV heads divide."""
    views = [
        TensorView(str(i), 4096 * (1 + i), (blocks, heads, DIM), (heads * DIM, DIM, 1), 1, 1, 0)
        for i in range(layers)
    ]
    return KVLayout.from_tensors(views, blocks)


def pages_of(ranks: int, number: int) -> RankPages:
    heads = HEADS // ranks
    apart = (ApartPages(layout_of(2, 5, heads)), ApartPages(layout_of(20, 5, heads)))
    return RankPages(layout_of(8, 9, heads), 1, Sharding(ranks, HEADS), number, apart=apart)


def test_pages_apart_have_the_blocks_behind_the_others() -> None:
    pages = pages_of(1, 0)
    assert pages.num_blocks == 9 + 5 + 5
    assert [placed.first for placed in pages.place()] == [0, 9, 14]


def test_a_slot_has_room_for_the_largest_page() -> None:
    pages = pages_of(1, 0)
    assert pages.shard([], None).shard_bytes == HEADS * 20 * DIM


def test_heads_are_at_the_same_places_however_many_ranks_there_are() -> None:
    """Those of the smaller pages, too: another number of ranks must find them."""
    (alone,) = ([placed.planes for placed in pages_of(1, 0).place()],)
    shard = pages_of(2, 0).shard([], None).shard_bytes
    for number in range(2):
        for whole, half in zip(alone, pages_of(2, number).place(), strict=True):
            places = {plane.slot_offset for plane in whole}
            own = {number * shard + plane.slot_offset for plane in half.planes}
            assert own <= places
            assert len(own) == len(places) // 2


def test_pages_that_differ_between_replicas_have_room_of_their_own() -> None:
    """Four ranks, of which two in a row hold the same bytes of a block."""
    ranks, own_bytes = 4, 4 * HEADS * DIM
    slots: dict[int, list[range]] = {}
    for number in range(ranks):
        apart = (ApartPages(layout_of(4, 5, HEADS), is_own=True),)
        sharding = Sharding(ranks, None, 2)
        pages = RankPages(layout_of(1, 9, HEADS), 1, sharding, number, apart=apart)
        shard = pages.shard([], None)
        assert (shard.shard_bytes, shard.replicas) == (2 * own_bytes, 2)
        block, own = pages.place()
        assert list(own.stored) == list(range(len(own.planes)))
        assert sum(plane.page_bytes for plane in own.planes) == own_bytes
        slots.setdefault(number // 2, []).append(
            range(
                min(plane.slot_offset for plane in own.planes),
                max(plane.slot_offset + plane.page_bytes for plane in own.planes),
            )
        )
        # A replica stores a half of what both hold.
        stored = [block.planes[i].page_bytes for i in block.stored]
        assert sum(stored) == HEADS * DIM // 2
    halves = [range(own_bytes), range(own_bytes, 2 * own_bytes)]
    assert slots == {0: halves, 1: halves}


def test_pages_apart_are_part_of_the_fingerprint() -> None:
    pages = pages_of(1, 0)
    other = RankPages(pages.layout, 1, pages.sharding, apart=pages.apart[:1])
    names = {each.shard([], None).fingerprint for each in (pages, other)}
    assert len(names) == 2
    assert pages_of(2, 1).shard([], None).fingerprint in names
