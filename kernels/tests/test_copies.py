# SPDX-License-Identifier: Apache-2.0
"""Transfers against a byte-wise reference in Python: right bytes moved, all others untouched."""

from __future__ import annotations

from array import array
from itertools import pairwise, starmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv_kernels import CpuOptions, Direction, Status, available_kernels
from kernels.tests.patient import PATIENT
from kernels.tests.worlds import Memory, Plane, World, in_order, simple_world

PAGE_SIZES = st.one_of(
    st.sampled_from([1, 3, 63, 64, 65, 100, 255, 256, 1024, 4096, 4097]), st.integers(1, 2000)
)


PADS = st.sampled_from([0, 0, 1, 64, 100])


@st.composite
def page_layouts(draw: st.DrawFn, num_blocks: int) -> tuple[list[Plane], int]:
    """Planes that do not overlap among the pages, and the bytes they need there."""
    place = draw(st.integers(0, 70))
    shape = draw(st.sampled_from(["plane by plane", "block by block", "row by row"]))
    planes: list[Plane] = []
    if shape == "row by row":  # as pages in which a token's heads are neighbours
        rows, row_bytes, heads = (draw(st.integers(1, top)) for top in (9, 300, 4))
        row_stride = row_bytes * heads + draw(PADS)
        block_stride = row_stride * rows + draw(PADS)
        for head in range(heads):
            start = place + head * row_bytes
            planes.append(Plane(start, block_stride, rows, row_stride, row_bytes, 0))
        return planes, place + block_stride * num_blocks
    sizes = draw(st.lists(PAGE_SIZES, min_size=1, max_size=6))
    if shape == "plane by plane":
        for size in sizes:
            stride = size + draw(PADS)
            planes.append(Plane(place, stride, 1, size, size, 0))
            place += stride * num_blocks + draw(PADS)
        return planes, place
    starts = []
    end = 0
    for size in sizes:
        starts.append(end)
        end += size + draw(PADS)
    for start, size in zip(starts, sizes, strict=True):
        planes.append(Plane(place + start, end, 1, size, size, 0))
    return planes, place + end * num_blocks


@st.composite
def slot_layouts(draw: st.DrawFn, planes: list[Plane]) -> list[Plane]:
    """The planes at places in the slot that do not overlap: in their order or another."""
    placed = list(planes)
    place = 0
    for i in draw(st.one_of(st.just(range(len(planes))), st.permutations(range(len(planes))))):
        place += draw(PADS)
        placed[i] = planes[i]._replace(slot_offset=place)
        place = placed[i].slot_end
    return placed


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, list[int]]:
    """A world and the offsets of slots in its arena that do not overlap."""
    num_blocks = draw(st.integers(1, 8))
    planes, pages_bytes = draw(page_layouts(num_blocks))
    planes = draw(slot_layouts(planes))
    span = max(plane.slot_end for plane in planes)
    slots = draw(st.integers(1, 8))
    first = draw(st.integers(0, 70))
    stride = span + draw(st.sampled_from([0, 1, 64]))
    pages = Memory(pages_bytes + 64, seed=draw(st.integers(0, 9)))
    arena = Memory(first + stride * slots + 64, seed=10 + draw(st.integers(0, 9)))
    store = None
    if draw(st.booleans()):
        store = draw(ranges(len(planes)))
    world = World(planes, num_blocks, pages, arena, store)
    return world, [first + i * stride for i in range(slots)]


def ranges(n: int) -> st.SearchStrategy[range]:
    """Ranges of up to ``n`` numbers, also empty ones."""
    return st.tuples(*[st.integers(0, n)] * 2).map(lambda ends: range(*sorted(ends)))


def parts(n: int) -> st.SearchStrategy[list[range]]:
    """Ranges that together are ``range(n)``, in any order."""
    cuts = st.sets(st.integers(0, n)).map(lambda cuts: sorted(cuts | {0, n}))
    return cuts.map(lambda cuts: list(starmap(range, pairwise(cuts)))).flatmap(st.permutations)


OPTIONS = st.builds(
    CpuOptions,
    kernel=st.sampled_from(["", *available_kernels()]),
    chunk_bytes=st.sampled_from([0, 17, 64, 100, 4096]),
    stream_bytes=st.sampled_from([0, 1]),
)


@settings(PATIENT, max_examples=300)
@given(data=st.data(), world_slots=worlds(), options=OPTIONS, threads=st.integers(1, 3))
def test_transfers_move_exactly_the_named_bytes(
    data: st.DataObject, world_slots: tuple[World, list[int]], options: CpuOptions, threads: int
) -> None:
    world, slots = world_slots
    mover = world.mover(threads, options)
    assert mover.block_bytes == world.block_bytes
    for direction in data.draw(st.lists(st.sampled_from(Direction), min_size=1, max_size=4)):
        blocks = data.draw(st.permutations(range(world.num_blocks)))
        offsets = data.draw(st.permutations(slots))
        n = data.draw(st.integers(0, min(len(blocks), len(offsets))))
        part = data.draw(st.one_of(st.none(), ranges(len(world.planes))))
        expected = world.after(direction, blocks[:n], offsets[:n], part)
        ticket = mover.submit(direction, blocks[:n], offsets[:n], planes=part)
        assert mover.wait(ticket, 60) is Status.DONE
        assert world.now() == expected
    mover.close()


@settings(PATIENT, max_examples=100)
@given(data=st.data(), world_slots=worlds(), options=OPTIONS, threads=st.integers(1, 3))
def test_parts_of_all_planes_make_a_whole_copy(
    data: st.DataObject, world_slots: tuple[World, list[int]], options: CpuOptions, threads: int
) -> None:
    world, slots = world_slots
    mover = world.mover(threads, options)
    for direction in Direction:
        n = min(world.num_blocks, len(slots))
        blocks = data.draw(st.permutations(range(world.num_blocks)))[:n]
        expected = world.after(direction, blocks, slots[:n])
        tickets = [
            mover.submit(direction, blocks, slots[:n], planes=part)
            for part in data.draw(parts(len(world.planes)))
        ]
        assert all(mover.wait(ticket, 60) is Status.DONE for ticket in tickets)
        assert world.now() == expected
    mover.close()


@pytest.mark.parametrize("kernel", available_kernels())
@pytest.mark.parametrize("page_bytes", [1, 100, 4097, 65536 + 1])
def test_every_kernel_at_every_alignment(kernel: str, page_bytes: int) -> None:
    for shift in (0, 1, 31, 63):
        pages = Memory(shift + 3 * page_bytes + 64, seed=3)
        arena = Memory(2 * page_bytes + 200, seed=4)
        world = World(in_order([(shift, page_bytes, page_bytes)]), 3, pages, arena)
        mover = world.mover(options=CpuOptions(kernel=kernel, stream_bytes=1))
        for direction in Direction:
            blocks, offsets = [2, 0], [page_bytes + 64 + shift, 63 - shift]
            expected = world.after(direction, blocks, offsets)
            assert mover.wait(mover.submit(direction, blocks, offsets), 60) is Status.DONE
            assert world.now() == expected
        mover.close()


def test_neighbours_on_both_sides_are_copied_across_block_and_chunk_borders() -> None:
    world = simple_world(num_blocks=40, page_bytes=1000, n_planes=1, slots=40)
    mover = world.mover(2, CpuOptions(chunk_bytes=4096))
    blocks = [*range(10, 30), 3, 4, 5, 9]
    offsets = [*range(0, 20_000, 1000), 31_000, 32_000, 33_000, 34_000]
    expected = world.after(Direction.STORE, blocks, offsets)
    assert mover.wait(mover.submit(Direction.STORE, blocks, offsets), 60) is Status.DONE
    assert world.now() == expected
    mover.close()


def test_one_block_may_be_stored_twice_and_one_slot_loaded_into_many() -> None:
    world = simple_world(num_blocks=4, page_bytes=300, n_planes=3, slots=4)
    mover = world.mover(2)
    for direction, blocks, offsets in (
        (Direction.STORE, [1, 1, 1], [0, 900, 2700]),
        (Direction.LOAD, [0, 3, 2], [900, 900, 900]),
    ):
        expected = world.after(direction, blocks, offsets)
        assert mover.wait(mover.submit(direction, blocks, offsets), 60) is Status.DONE
        assert world.now() == expected
    mover.close()


def test_large_transfer_takes_the_streaming_path_by_itself() -> None:
    world = simple_world(num_blocks=512, page_bytes=65536, n_planes=2, slots=512)
    mover = world.mover(2)
    blocks = array("Q", reversed(range(512)))
    offsets = array("Q", range(0, world.arena.size, world.block_bytes))
    for direction in (Direction.STORE, Direction.LOAD):
        expected = world.after(direction, blocks, offsets)
        assert mover.wait(mover.submit(direction, blocks, offsets), 60) is Status.DONE
        assert world.now() == expected
        blocks.reverse()
    mover.close()
