# SPDX-License-Identifier: Apache-2.0
"""Which way a transfer goes, and what the staged way asks of the driver."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pytest

from flexkv.types.mover import FALLBACK, WAYS
from flexkv_kernels import CudaChoice, CudaMode, CudaMover, Direction, Status
from kernels.tests.conftest import MakeFake
from kernels.tests.fake_cuda.fake_driver import FakeCuda
from kernels.tests.worlds import Memory, Plane, World, simple_world

KIB = 1024
HIGHEST, LOWEST = -5, 0


def copy(mover: CudaMover, world: World, direction: Direction, blocks: Sequence[int]) -> None:
    """Copies blocks from or to slots in another order, and compares every byte."""
    slots = [(block * 3 + 1) % len(blocks) for block in range(len(blocks))]
    offsets = [slot * world.span for slot in slots]
    assert len(set(offsets)) == len(offsets)
    expected = world.after(direction, blocks, offsets)
    assert mover.wait(mover.submit(direction, blocks, offsets), 60) is Status.DONE, mover.error()
    assert world.now() == expected


def way(world: World, fake: FakeCuda, direction: Direction, **options: object) -> CudaMode:
    """The one way that a transfer of all blocks goes."""
    with closing(world.cuda_mover(fake.options(**options))) as mover:
        copy(mover, world, direction, range(world.num_blocks))
        counted = {mode: size for mode, size in mover.bytes_by_mode().items() if size}
    (mode,) = counted
    assert counted[mode] == world.num_blocks * world.block_bytes
    return mode


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("page_bytes", "n_planes", "mode"),
    [
        (64 * KIB, 2, CudaMode.DMA),
        (4 * KIB, 8, CudaMode.STAGED),
        (4 * KIB, 7, CudaMode.KERNEL),
    ],
)
def test_a_device_that_was_not_measured_goes_by_the_lengths_of_runs(
    fake: FakeCuda, direction: Direction, page_bytes: int, n_planes: int, mode: CudaMode
) -> None:
    world = simple_world(num_blocks=4, page_bytes=page_bytes, n_planes=n_planes, slots=4)
    assert way(world, fake, direction) is mode


@pytest.mark.parametrize("chosen", list(CudaMode)[1:])
def test_a_measured_class_goes_the_way_that_was_chosen(fake: FakeCuda, chosen: CudaMode) -> None:
    world = simple_world(num_blocks=4, page_bytes=4 * KIB, n_planes=2, slots=4)
    other = CudaMode.DMA if chosen is CudaMode.KERNEL else CudaMode.KERNEL
    choices = (
        CudaChoice(Direction.LOAD, 5000, 9000, chosen),
        CudaChoice(Direction.STORE, 5000, 9000, other),
        CudaChoice(Direction.LOAD, 2 * 5000, 9000, other),
        CudaChoice(Direction.LOAD, 5000, 2 * 9000, other),
    )
    assert way(world, fake, Direction.LOAD, choices=choices) is chosen
    assert way(world, fake, Direction.STORE, choices=choices) is other


@pytest.mark.parametrize(
    ("run_bytes", "slot_run_bytes", "near"),
    [
        (4096, 64 * KIB, True),  # neighbours in the arena make runs of 256 KiB of these
        (2048, 1024 * KIB, True),
        (8192, 128 * KIB, True),
        (4096, 32 * KIB, True),
        (4096, 16 * KIB, False),
        (1024, 128 * KIB, False),
        (16384, 128 * KIB, False),
    ],
)
def test_a_class_that_was_not_measured_goes_the_way_of_one_like_it(
    fake: FakeCuda, run_bytes: int, slot_run_bytes: int, near: bool
) -> None:
    world = simple_world(num_blocks=4, page_bytes=4 * KIB, n_planes=16, slots=4)
    blocks, offsets = [2, 0, 3, 1], range(0, 4 * world.span, world.span)
    choices = (CudaChoice(Direction.LOAD, run_bytes, slot_run_bytes, CudaMode.TMA),)
    with closing(world.cuda_mover(fake.options(choices=choices))) as mover:
        assert mover.wait(mover.submit(Direction.LOAD, blocks, offsets), 60) is Status.DONE
        counted = {mode: size for mode, size in mover.bytes_by_mode().items() if size}
    assert counted == {CudaMode.TMA if near else CudaMode.STAGED: 4 * world.block_bytes}


def test_of_classes_like_it_the_nearest_counts(fake: FakeCuda) -> None:
    world = simple_world(num_blocks=4, page_bytes=4 * KIB, n_planes=16, slots=4)
    choices = tuple(
        CudaChoice(Direction.LOAD, 4096, size * KIB, mode)
        for size, mode in ((64, CudaMode.KERNEL), (128, CudaMode.TMA), (1024, CudaMode.DMA))
    )
    blocks, offsets = [2, 0, 3, 1], range(0, 4 * world.span, world.span)
    with closing(world.cuda_mover(fake.options(choices=choices))) as mover:
        assert mover.wait(mover.submit(Direction.LOAD, blocks, offsets), 60) is Status.DONE
        assert mover.bytes_by_mode()[CudaMode.TMA] == 4 * world.block_bytes


def test_a_choice_has_thread_blocks_of_its_own(make_fake: MakeFake) -> None:
    fake = make_fake()
    world = simple_world(num_blocks=200, page_bytes=4 * KIB, n_planes=2, slots=200)
    choices = (CudaChoice(Direction.LOAD, 4096, 8192, CudaMode.KERNEL, thread_blocks=3),)
    assert way(world, fake, Direction.LOAD, choices=choices) is CudaMode.KERNEL
    assert fake.grid("fkv_copy_16") == 3


def test_a_way_that_is_impossible_is_counted(make_fake: MakeFake) -> None:
    """No memory for any ring, and a device or kernels without bulk copies."""
    world = simple_world(num_blocks=4, page_bytes=4 * KIB, n_planes=2, slots=4)
    short, old, of_ptx = make_fake(), make_fake(major=8), make_fake(major=11)
    bulk = (CudaChoice(Direction.LOAD, 4096, 8192, CudaMode.TMA),)
    staged = (CudaChoice(Direction.LOAD, 4096, 8192, CudaMode.STAGED),)
    short.memory(64 * KIB)
    of_ptx.compiled_for(80)
    for fake, options in (
        (short, {"choices": staged}),
        (old, {"choices": bulk}),
        (of_ptx, {"choices": bulk}),
    ):
        with closing(world.cuda_mover(fake.options(**options))) as mover:
            copy(mover, world, Direction.LOAD, range(4))
            size = 4 * world.block_bytes
            counted = {mode: size for mode, size in mover.bytes_by_mode().items() if size}
            assert counted == {CudaMode.AUTO: size, CudaMode.KERNEL: size}
            assert mover.bytes_by_way() == dict.fromkeys(WAYS, 0) | {"kernel": size, FALLBACK: size}


@pytest.mark.parametrize(("row_bytes", "shift"), [(4000, 8), (4096, 8), (4096, 0)])
def test_bulk_copies_take_addresses_that_are_multiples_of_16(
    fake: FakeCuda, row_bytes: int, shift: int
) -> None:
    """Where pages, slots or lengths are not, a plain kernel copies, and that is counted."""
    offset = 0 if shift else 4  # of the block in the arena
    planes = [Plane(shift, 8192, 1, row_bytes, row_bytes, 0)]
    world = World(planes, 4, Memory(5 * 8192, seed=1), Memory(5 * 8192, seed=2))
    with closing(world.cuda_mover(fake.options(mode=CudaMode.TMA))) as mover:
        for place in (0, offset):
            expected = world.after(Direction.LOAD, [2], [place])
            assert mover.wait(mover.submit(Direction.LOAD, [2], [place]), 60) is Status.DONE
            assert world.now() == expected
        counted = {mode: size for mode, size in mover.bytes_by_mode().items() if size}
    plain = {CudaMode.AUTO: 2 * row_bytes, CudaMode.KERNEL: 2 * row_bytes}
    one = dict.fromkeys((CudaMode.AUTO, CudaMode.KERNEL, CudaMode.TMA), row_bytes)
    assert counted == (plain if shift else one)
    assert fake.calls("fkv_copy_bulk") == (1 if shift else 2)  # an empty launch at the start
