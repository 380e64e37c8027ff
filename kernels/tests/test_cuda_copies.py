# SPDX-License-Identifier: Apache-2.0
"""The CUDA mover against a byte-wise reference, in every mode and with drivers of all kinds.

The driver is a fake one whose device is host memory; the kernels' address arithmetic is the real
one.
"""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv_kernels import CudaMode, Direction, Status
from kernels.tests.conftest import MakeFake
from kernels.tests.fake_cuda.fake_driver import FakeCuda
from kernels.tests.patient import PATIENT
from kernels.tests.test_copies import parts, ranges, worlds
from kernels.tests.worlds import Memory, Plane, World, in_order, simple_world

KIB = 1024
FORCED = [CudaMode.DMA, CudaMode.KERNEL, CudaMode.TMA, CudaMode.STAGED]
DRIVERS = {
    "13.0": {},
    "12.8": {"version": 12080},
    "12.4": {"version": 12040, "batches": False},
    "other addresses": {"alias": 1 << 40},
}


@pytest.fixture(scope="session")
def fakes(make_fake: MakeFake) -> dict[str, FakeCuda]:
    fakes = {name: make_fake(**configuration) for name, configuration in DRIVERS.items()}
    for fake in fakes.values():
        fake.delay(100)
    return fakes


def scaled(world: World, unit: int) -> World:
    """The world with everything ``unit`` times as large, and so aligned to it."""
    planes = [
        Plane(
            plane.base * unit,
            plane.block_stride * unit,
            plane.rows,
            plane.row_stride * unit,
            plane.row_bytes * unit,
            plane.slot_offset * unit,
        )
        for plane in world.planes
    ]
    pages = Memory(world.pages.size * unit, seed=3)
    arena = Memory(world.arena.size * unit, seed=4)
    return World(planes, world.num_blocks, pages, arena, world.store)


@settings(PATIENT, max_examples=200)
@given(
    data=st.data(),
    world_slots=worlds(),
    unit=st.sampled_from([1, 2, 4, 8, 16, 16]),
    driver=st.sampled_from(sorted(DRIVERS)),
    mode=st.sampled_from(FORCED),
    thread_blocks=st.integers(1, 3),
    ring_bytes=st.sampled_from([0, 64 * KIB]),  # with segments of 8 KiB
)
def test_transfers_move_exactly_the_named_bytes(  # noqa: PLR0917
    data: st.DataObject,
    fakes: dict[str, FakeCuda],
    world_slots: tuple[World, list[int]],
    unit: int,
    driver: str,
    mode: CudaMode,
    thread_blocks: int,
    ring_bytes: int,
) -> None:
    small, slots = world_slots
    world = scaled(small, unit)
    options = {"mode": mode, "thread_blocks": thread_blocks, "ring_bytes": ring_bytes}
    mover = world.cuda_mover(fakes[driver].options(**options))
    assert mover.block_bytes == world.block_bytes
    shift = data.draw(st.sampled_from([0, 0, 1]))  # of the slots, which has to narrow the accesses
    for direction in data.draw(st.lists(st.sampled_from(Direction), min_size=1, max_size=3)):
        blocks = data.draw(st.permutations(range(world.num_blocks)))
        offsets = [slot * unit + shift for slot in data.draw(st.permutations(slots))]
        n = data.draw(st.integers(0, min(len(blocks), len(offsets))))
        part = data.draw(st.one_of(st.none(), ranges(len(world.planes))))
        expected = world.after(direction, blocks[:n], offsets[:n], part)
        ticket = mover.submit(direction, blocks[:n], offsets[:n], planes=part)
        assert mover.wait(ticket, 60) is Status.DONE
        assert world.now() == expected
    mover.close()


@settings(PATIENT, max_examples=100)
@given(data=st.data(), world_slots=worlds(), mode=st.sampled_from(FORCED))
def test_parts_of_all_planes_make_a_whole_copy(
    data: st.DataObject,
    fakes: dict[str, FakeCuda],
    world_slots: tuple[World, list[int]],
    mode: CudaMode,
) -> None:
    small, slots = world_slots
    unit = data.draw(st.sampled_from([1, 16]))
    world = scaled(small, unit)
    mover = world.cuda_mover(fakes["13.0"].options(mode=mode))
    for direction in Direction:
        n = min(world.num_blocks, len(slots))
        blocks = data.draw(st.permutations(range(world.num_blocks)))[:n]
        offsets = [slot * unit for slot in slots[:n]]
        expected = world.after(direction, blocks, offsets)
        tickets = [
            mover.submit(direction, blocks, offsets, planes=part)
            for part in data.draw(parts(len(world.planes)))
        ]
        assert all(mover.wait(ticket, 60) is Status.DONE for ticket in tickets)
        assert world.now() == expected
    mover.close()


def engine_world(kind: str) -> World:
    """Pages as engines have them: 40 blocks of 16 tokens, two layers, 4 heads of 256 bytes."""
    blocks, layers, heads, tokens, row = 40, 2, 4, 16, 256
    page = tokens * row
    if kind == "HND":
        planes = [
            Plane((layer * blocks * heads + head) * page, heads * page, 1, page, page, 0)
            for layer in range(layers)
            for head in range(heads)
        ]
    elif kind == "NHD":
        planes = [
            Plane(
                layer * blocks * heads * page + head * row,
                heads * page,
                tokens,
                heads * row,
                row,
                0,
            )
            for layer in range(layers)
            for head in range(heads)
        ]
    else:
        size = 33 * KIB
        planes = in_order((layer * blocks * size, size, size) for layer in range(layers))
    place = 0
    for i, plane in enumerate(planes):
        planes[i] = plane._replace(slot_offset=place)
        place = planes[i].slot_end
    end = max(plane.base + blocks * plane.block_stride for plane in planes)
    return World(planes, blocks, Memory(end + KIB, seed=1), Memory(place * blocks, seed=2))


@pytest.mark.parametrize("mode", FORCED)
@pytest.mark.parametrize("kind", ["HND", "NHD", "opaque"])
def test_pages_of_engines(fake: FakeCuda, kind: str, mode: CudaMode) -> None:
    fake.delay(200)
    world = engine_world(kind)
    mover = world.cuda_mover(fake.options(mode=mode))
    blocks = array("Q", reversed(range(world.num_blocks)))
    offsets = array("Q", range(0, world.arena.size, world.block_bytes))
    for direction in (Direction.STORE, Direction.LOAD, Direction.STORE):
        expected = world.after(direction, blocks, offsets)
        assert mover.wait(mover.submit(direction, blocks, offsets), 60) is Status.DONE
        assert world.now() == expected
        blocks.reverse()
    mover.close()


@pytest.mark.parametrize("mode", FORCED)
@pytest.mark.parametrize("kind", ["HND", "NHD", "opaque"])
@pytest.mark.parametrize("direction", Direction)
def test_pages_of_engines_layer_by_layer(
    fake: FakeCuda, kind: str, mode: CudaMode, direction: Direction
) -> None:
    world = engine_world(kind)
    mover = world.cuda_mover(fake.options(mode=mode))
    blocks = list(reversed(range(world.num_blocks)))
    offsets = range(0, world.arena.size, world.block_bytes)
    first = len(world.planes) // 2  # of the second layer
    for layer in (range(first, len(world.planes)), range(first)):
        expected = world.after(direction, blocks, offsets, layer)
        ticket = mover.submit(direction, blocks, offsets, planes=layer)
        assert mover.wait(ticket, 60) is Status.DONE
        assert world.now() == expected
    mover.close()


@pytest.mark.parametrize("mode", FORCED)
def test_transfers_of_many_slices(fake: FakeCuda, mode: CudaMode) -> None:
    world = simple_world(num_blocks=3000, page_bytes=48, n_planes=2, slots=3000)
    mover = world.cuda_mover(fake.options(mode=mode))
    blocks = array("Q", reversed(range(3000)))
    offsets = array("Q", range(0, world.arena.size, world.block_bytes))
    for direction in Direction:
        expected = world.after(direction, blocks, offsets)
        assert mover.wait(mover.submit(direction, blocks, offsets), 60) is Status.DONE
        assert world.now() == expected
        blocks = array("Q", sorted(blocks, key=lambda block: block * 7 % 3000))
    mover.close()


@pytest.mark.parametrize(
    ("plane", "width"),
    [
        (Plane(0, 4096, 4, 32, 16, 0), 16),
        (Plane(0, 4096, 4, 24, 16, 0), 8),
        (Plane(0, 4096, 1, 24, 24, 0), 8),
        (Plane(4, 4096, 4, 32, 16, 0), 4),
        (Plane(0, 4098, 4, 32, 16, 0), 2),
        (Plane(0, 4096, 4, 32, 16, 1), 1),
        (Plane(0, 4096, 1, 12, 10, 0), 2),
    ],
)
def test_accesses_are_as_wide_as_all_addresses_allow(
    fake: FakeCuda, plane: Plane, width: int
) -> None:
    world = World([plane], 2, Memory(3 * 4096, seed=1), Memory(4096, seed=2))
    for mode in (CudaMode.KERNEL, CudaMode.TMA):
        mover = world.cuda_mover(fake.options(mode=mode))
        kernel = "fkv_copy_bulk" if (mode, width) == (CudaMode.TMA, 16) else f"fkv_copy_{width}"
        for direction in Direction:
            before = fake.calls(kernel)
            expected = world.after(direction, [1], [64])
            assert mover.wait(mover.submit(direction, [1], [64]), 60) is Status.DONE
            assert world.now() == expected
            assert fake.calls(kernel) == before + 1
            # The place in the arena is an address too.
            narrow = f"fkv_copy_{min(width, 2)}"
            before = fake.calls(narrow)
            expected = world.after(direction, [1], [66])
            assert mover.wait(mover.submit(direction, [1], [66]), 60) is Status.DONE
            assert world.now() == expected
            assert fake.calls(narrow) == before + 1
        mover.close()


def test_a_part_is_copied_as_wide_as_its_own_addresses_allow(fake: FakeCuda) -> None:
    planes = [Plane(0, 64, 1, 64, 64, 0), Plane(1024, 20, 1, 20, 20, 64)]
    world = World(planes, 8, Memory(2048, seed=1), Memory(1024, seed=2))
    mover = world.cuda_mover(fake.options(mode=CudaMode.KERNEL))
    for part, kernel in (
        (range(1), "fkv_copy_16"),
        (range(1, 2), "fkv_copy_4"),
        (None, "fkv_copy_4"),
    ):
        before = fake.calls(kernel)
        expected = world.after(Direction.LOAD, [3], [128], part)
        ticket = mover.submit(Direction.LOAD, [3], [128], planes=part)
        assert mover.wait(ticket, 60) is Status.DONE
        assert world.now() == expected
        assert fake.calls(kernel) == before + 1
    mover.close()


def test_neighbours_on_both_sides_are_one_copy(make_fake: MakeFake) -> None:
    fake = make_fake(version=12040, batches=False)
    world = simple_world(num_blocks=40, page_bytes=1000, n_planes=1, slots=40)
    mover = world.cuda_mover(fake.options(mode=CudaMode.DMA))
    before = fake.calls("cuMemcpyAsync")
    blocks, offsets = [*range(10, 30), 3, 4], [*range(0, 20_000, 1000), 31_000, 32_000]
    expected = world.after(Direction.STORE, blocks, offsets)
    assert mover.wait(mover.submit(Direction.STORE, blocks, offsets), 60) is Status.DONE
    assert world.now() == expected
    assert fake.calls("cuMemcpyAsync") - before == 2
    mover.close()


@pytest.mark.parametrize("mode", FORCED)
def test_a_copy_across_the_pieces_in_which_the_arena_is_registered(
    fake: FakeCuda, mode: CudaMode
) -> None:
    gib = 1 << 30  # of which only a few pages are touched
    world = simple_world(num_blocks=4, page_bytes=3 * KIB, n_planes=1, slots=4)
    arena = world.arena = Memory(gib + 64 * KIB, seed=None)
    mover = world.cuda_mover(fake.options(mode=mode))
    assert fake.calls("cuMemHostRegister") == 2
    offset = gib - 4 * KIB
    store = mover.submit(Direction.STORE, [1, 2], [offset, offset + 3 * KIB])
    assert mover.wait(store, 60) is Status.DONE
    assert arena[offset : offset + 6 * KIB] == world.pages[3 * KIB : 9 * KIB]
    load = mover.submit(Direction.LOAD, [0], [offset + 3 * KIB])
    assert mover.wait(load, 60) is Status.DONE
    assert world.pages[: 3 * KIB] == world.pages[6 * KIB : 9 * KIB]
    mover.close()
