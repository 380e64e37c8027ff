# SPDX-License-Identifier: Apache-2.0
"""Transfers that follow the work that an engine's stream had when it was marked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from flexkv.types.mover import MARKS
from flexkv_kernels import CudaMode, CudaMover, Direction, Status
from kernels.tests.fake_cuda.fake_driver import INVALID_HANDLE, FakeCuda, FakeStream
from kernels.tests.worlds import World, simple_world, until

MODES = list(CudaMode)[1:]


@pytest.fixture
def world() -> World:
    return simple_world(num_blocks=8, page_bytes=4096, n_planes=2, slots=16)


@pytest.fixture
def mover(fake: FakeCuda, world: World) -> Iterator[CudaMover]:
    with closing(world.cuda_mover(fake.options(mode=CudaMode.DMA))) as mover:
        yield mover


@pytest.fixture
def streams(fake: FakeCuda) -> Iterator[tuple[FakeStream, FakeStream]]:
    made = FakeStream(fake), FakeStream(fake)
    yield made
    for stream in made:
        stream.drain()
        stream.destroy()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("direction", Direction)
def test_a_transfer_follows_the_marked_work_and_no_later_work(
    fake: FakeCuda,
    world: World,
    streams: tuple[FakeStream, FakeStream],
    mode: CudaMode,
    direction: Direction,
) -> None:
    """The engine's second step starts when its first one has ended, and never ends here."""
    first, second = streams
    with closing(world.cuda_mover(fake.options(mode=mode))) as mover:
        first.fill(world.pages.address, 0xAB, world.pages.size)
        mark = mover.mark(first.handle)
        second.fill(world.pages.address, 0xCD, world.pages.size)
        ticket = mover.submit(direction, [3], [0], second.handle, mark=mark)
        assert mover.wait(ticket, 0.1) is Status.PENDING
        first.release()
        assert mover.wait(ticket, 60) is Status.DONE
        if direction is Direction.STORE:
            assert world.arena[: world.block_bytes] == b"\xab" * world.block_bytes
        second.release()


def test_a_mark_holds_nothing_of_what_the_stream_gets_later(
    mover: CudaMover, world: World, streams: tuple[FakeStream, FakeStream]
) -> None:
    stream, _ = streams
    mark = mover.mark(stream.handle)
    stream.fill(world.pages.address, 0xAB, world.pages.size)
    assert mover.wait(mover.submit(Direction.LOAD, [3], [0], mark=mark), 60) is Status.DONE


def test_each_mark_holds_the_work_up_to_it(
    mover: CudaMover, world: World, streams: tuple[FakeStream, FakeStream]
) -> None:
    stream, _ = streams
    before = mover.mark(stream.handle)
    stream.fill(world.pages.address, 0xAB, world.pages.size)
    behind = mover.mark(stream.handle)
    later = mover.submit(Direction.LOAD, [4], [0], mark=before)
    assert mover.wait(later, 60) is Status.DONE
    held = mover.submit(Direction.LOAD, [3], [0], mark=behind)
    assert mover.wait(held, 0.1) is Status.PENDING
    stream.release()
    assert mover.wait(held, 60) is Status.DONE


def test_many_transfers_follow_one_mark(
    fake: FakeCuda, mover: CudaMover, world: World, streams: tuple[FakeStream, FakeStream]
) -> None:
    first, second = streams
    first.fill(world.pages.address, 0xAB, 1)
    mark = mover.mark(first.handle)
    second.fill(world.pages.address, 0xCD, 1)
    loads = [mover.submit(Direction.LOAD, [number], [0], mark=mark) for number in range(8)]
    until(lambda: fake.calls("cuStreamWaitEvent") == len(loads))
    # None of them has taken the event away: an order that comes now takes another one.
    store = mover.submit(Direction.STORE, [0], [0], second.handle)
    late = mover.submit(Direction.LOAD, [1], [0], mark=mark)
    second.release()
    assert mover.wait(store, 60) is Status.DONE
    assert {mover.poll(load) for load in [*loads, late]} == {Status.PENDING}
    first.release()
    assert mover.wait(late, 60) is Status.DONE


def test_a_mark_that_is_forgotten_holds_for_the_transfers_that_have_it(
    fake: FakeCuda, mover: CudaMover, world: World, streams: tuple[FakeStream, FakeStream]
) -> None:
    first, second = streams
    first.fill(world.pages.address, 0xAB, 1)
    mark = mover.mark(first.handle)
    with fake.paused("cuStreamWaitEvent"):
        load = mover.submit(Direction.LOAD, [3], [0], mark=mark)
        until(lambda: fake.calls("paused cuStreamWaitEvent") == 1)
        for _ in range(2 * MARKS):
            mover.mark(second.handle)
    assert mover.wait(load, 0.1) is Status.PENDING
    first.release()
    assert mover.wait(load, 60) is Status.DONE


def test_the_last_marks_are_kept(
    fake: FakeCuda, mover: CudaMover, world: World, streams: tuple[FakeStream, FakeStream]
) -> None:
    stream, _ = streams
    with pytest.raises(ValueError, match="mark is 1, kept are none"):
        mover.submit(Direction.LOAD, [3], [0], mark=1)
    assert [mover.mark(stream.handle) for _ in range(MARKS + 5)] == [*range(1, MARKS + 6)]
    before = world.now()
    for wrong in (1, 5, MARKS + 6, 2**63 - 1):
        with pytest.raises(ValueError, match=f"mark is {wrong}, kept are 6 to {MARKS + 5}"):
            mover.submit(Direction.LOAD, [3], [0], mark=wrong)
    with pytest.raises(ValueError, match="mark is -1"):
        mover.submit(Direction.LOAD, [3], [0], mark=-1)
    assert world.now() == before
    for right in (6, MARKS + 5):
        assert mover.wait(mover.submit(Direction.LOAD, [3], [0], mark=right), 60) is Status.DONE
    made = fake.calls("cuEventCreate")
    for _ in range(100):
        mover.mark(stream.handle)
    assert fake.calls("cuEventCreate") == made


def test_what_is_no_stream_is_not_marked(
    fake: FakeCuda, mover: CudaMover, world: World, streams: tuple[FakeStream, FakeStream]
) -> None:
    with pytest.raises(ValueError, match="stream is 0, which is no stream"):
        mover.mark(0)
    with pytest.raises(ValueError, match="stream is 4711, no stream of this device"):
        mover.mark(4711)
    assert fake.thread_is_clean
    assert mover.mark(streams[0].handle) == 1
    fake.fail("cuEventRecord", INVALID_HANDLE)
    with pytest.raises(ValueError, match="no stream of this device"):
        mover.mark(streams[0].handle)
    made = fake.calls("cuEventCreate")
    assert mover.mark(streams[0].handle) == 2
    assert fake.calls("cuEventCreate") == made
    cpu = world.mover()
    with pytest.raises(ValueError, match="stream is 1, the CPU mover has none to mark"):
        cpu.mark(1)
    with pytest.raises(ValueError, match="mark is 1, the CPU mover makes none"):
        cpu.submit(Direction.LOAD, [3], [0], mark=1)
    cpu.close()


def test_closing_gives_the_marks_back(fake: FakeCuda, world: World) -> None:
    stream = FakeStream(fake)
    live = fake.live
    mover = world.cuda_mover(fake.options(mode=CudaMode.DMA))
    mark = mover.mark(stream.handle)
    fake.fail("cuStreamWaitEvent", INVALID_HANDLE)
    assert mover.wait(mover.submit(Direction.LOAD, [3], [0], mark=mark), 60) is Status.FAILED
    mover.mark(stream.handle)
    mover.close()
    with pytest.raises(RuntimeError, match="the mover is closed"):
        mover.mark(stream.handle)
    assert fake.live == live
    stream.destroy()
