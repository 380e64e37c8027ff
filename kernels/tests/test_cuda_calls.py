# SPDX-License-Identifier: Apache-2.0
"""What the CUDA mover asks of the driver: streams, events, launches and addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from flexkv_kernels import CudaMode, Direction, Status
from kernels.tests.conftest import MakeFake
from kernels.tests.fake_cuda.fake_driver import FakeCuda, FakeStream
from kernels.tests.worlds import World, simple_world, until

KERNELS = {CudaMode.KERNEL: "fkv_copy_16", CudaMode.TMA: "fkv_copy_bulk"}
HIGHEST, LOWEST = -5, 0
"""Priorities of the fake device's streams; an engine computes with LOWEST, CUDA's default."""


def small_world() -> World:
    return simple_world(num_blocks=8, page_bytes=4096, n_planes=2, slots=16)


@contextmanager
def held(fake: FakeCuda, world: World, *, legacy: bool = False) -> Iterator[FakeStream]:
    """A stream of the engine with work that waits until the stream is released."""
    stream = FakeStream(fake, legacy=legacy)
    stream.fill(world.pages.address, 0xAB, world.pages.size)
    try:
        yield stream
    finally:
        stream.drain()
        stream.destroy()


@pytest.mark.parametrize("mode", [CudaMode.DMA, CudaMode.KERNEL])
def test_loads_go_before_the_engines_work_and_stores_do_not(fake: FakeCuda, mode: CudaMode) -> None:
    what = "copies" if mode is CudaMode.DMA else "kernels"
    world = small_world()
    with closing(world.cuda_mover(fake.options(mode=mode))) as mover:
        for direction, priority, other in (
            (Direction.LOAD, HIGHEST, LOWEST),
            (Direction.STORE, LOWEST, HIGHEST),
        ):
            before = fake.calls(f"{what}@{priority}"), fake.calls(f"{what}@{other}")
            assert mover.wait(mover.submit(direction, [3], [0]), 60) is Status.DONE
            after = fake.calls(f"{what}@{priority}"), fake.calls(f"{what}@{other}")
            assert after == (before[0] + 1, before[1])


@pytest.mark.parametrize("direction", Direction)
def test_copies_follow_the_legacy_default_stream(fake: FakeCuda, direction: Direction) -> None:
    world = small_world()
    slots = range(0, 8 * world.block_bytes, world.block_bytes)
    with (
        closing(world.cuda_mover(fake.options(mode=CudaMode.DMA))) as mover,
        held(fake, world, legacy=True) as stream,
    ):
        assert stream.handle == 1
        ticket = mover.submit(direction, range(8), slots, after=stream.handle)
        assert mover.wait(ticket, 0.05) is Status.PENDING
        stream.release()
        assert mover.wait(ticket, 60) is Status.DONE


def test_an_event_is_not_used_again_before_its_transfer_follows_it(fake: FakeCuda) -> None:
    world = small_world()
    with (
        closing(world.cuda_mover(fake.options(mode=CudaMode.DMA))) as mover,
        held(fake, world) as first,
        held(fake, world) as second,
    ):
        with fake.paused("cuStreamWaitEvent"):
            store = mover.submit(Direction.STORE, [0], [0], after=first.handle)
            until(lambda: fake.calls("paused cuStreamWaitEvent") == 1)
            # If this one got the event of the store, the store would follow the wrong stream.
            load = mover.submit(Direction.LOAD, [1], [0], after=second.handle)
        first.release()
        assert mover.wait(store, 60) is Status.DONE
        assert mover.poll(load) is Status.PENDING


@pytest.mark.parametrize("mode", KERNELS)
@pytest.mark.parametrize("thread_blocks", [1, 3])
def test_a_launch_has_as_many_thread_blocks_as_were_chosen(
    make_fake: MakeFake, mode: CudaMode, thread_blocks: int
) -> None:
    fake = make_fake()
    world = simple_world(num_blocks=200, page_bytes=4096, n_planes=2, slots=200)
    options = fake.options(mode=mode, thread_blocks=thread_blocks)
    with closing(world.cuda_mover(options)) as mover:
        expected = world.after(Direction.LOAD, range(200), range(0, world.arena.size, 8192))
        ticket = mover.submit(Direction.LOAD, range(200), range(0, world.arena.size, 8192))
        assert mover.wait(ticket, 60) is Status.DONE
        assert world.now() == expected
    assert fake.grid(KERNELS[mode]) == thread_blocks


@pytest.mark.parametrize("mode", [CudaMode.DMA, *KERNELS])
@pytest.mark.parametrize("direction", Direction)
def test_the_device_is_given_addresses_that_it_knows(
    make_fake: MakeFake, mode: CudaMode, direction: Direction
) -> None:
    fake = make_fake(alias=1 << 40)
    world = small_world()
    with closing(world.cuda_mover(fake.options(mode=mode))) as mover:
        flag = world.arena.word(15 * world.block_bytes)
        flag.value = Status.PENDING
        flag_address = world.arena.address + 15 * world.block_bytes
        ticket = mover.submit(direction, [5], [world.block_bytes], flag_address=flag_address)
        assert mover.wait(ticket, 60) is Status.DONE, mover.error()
        assert flag.value == Status.DONE
    assert fake.calls("cuStreamWriteValue32") == 1
