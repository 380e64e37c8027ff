# SPDX-License-Identifier: Apache-2.0
"""Transfers against a byte-wise reference in Python: right bytes moved, all others untouched."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv_kernels import CpuOptions, Direction, Status, available_kernels
from kernels.tests.worlds import Memory, Plane, World, simple_world

PAGE_SIZES = st.one_of(
    st.sampled_from([1, 3, 63, 64, 65, 100, 255, 256, 1024, 4096, 4097]), st.integers(1, 2000)
)


@st.composite
def plane_layouts(draw: st.DrawFn, num_blocks: int) -> tuple[list[Plane], int]:
    """Planes that do not overlap, and the bytes they need: one after the other or interleaved."""
    sizes = draw(st.lists(PAGE_SIZES, min_size=1, max_size=6))
    pads = st.sampled_from([0, 0, 1, 64, 100])
    planes: list[Plane] = []
    place = draw(st.integers(0, 70))
    if draw(st.booleans()):  # plane by plane
        for size in sizes:
            stride = size + draw(pads)
            planes.append((place, stride, size))
            place += stride * num_blocks + draw(pads)
        return planes, place
    starts = []
    end = 0
    for size in sizes:  # block by block
        starts.append(end)
        end += size + draw(pads)
    planes = [(place + start, end, size) for start, size in zip(starts, sizes, strict=True)]
    return planes, place + end * num_blocks


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, list[int]]:
    """A world and the offsets of slots in its arena that do not overlap."""
    num_blocks = draw(st.integers(1, 8))
    planes, pages_bytes = draw(plane_layouts(num_blocks))
    block_bytes = sum(size for _, _, size in planes)
    slots = draw(st.integers(1, 8))
    first = draw(st.integers(0, 70))
    stride = block_bytes + draw(st.sampled_from([0, 1, 64]))
    pages = Memory(pages_bytes + 64, seed=draw(st.integers(0, 9)))
    arena = Memory(first + stride * slots + 64, seed=10 + draw(st.integers(0, 9)))
    return World(planes, num_blocks, pages, arena), [first + i * stride for i in range(slots)]


OPTIONS = st.builds(
    CpuOptions,
    kernel=st.sampled_from(["", *available_kernels()]),
    chunk_bytes=st.sampled_from([0, 17, 64, 100, 4096]),
    stream_bytes=st.sampled_from([0, 1]),
)


@settings(max_examples=300, deadline=None)
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
        expected = world.after(direction, blocks[:n], offsets[:n])
        ticket = mover.submit(direction, blocks[:n], offsets[:n])
        assert mover.wait(ticket, 60) is Status.DONE
        assert world.now() == expected
    mover.close()


@pytest.mark.parametrize("kernel", available_kernels())
@pytest.mark.parametrize("page_bytes", [1, 100, 4097, 65536 + 1])
def test_every_kernel_at_every_alignment(kernel: str, page_bytes: int) -> None:
    for shift in (0, 1, 31, 63):
        pages = Memory(shift + 3 * page_bytes + 64, seed=3)
        arena = Memory(2 * page_bytes + 200, seed=4)
        world = World([(shift, page_bytes, page_bytes)], 3, pages, arena)
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
