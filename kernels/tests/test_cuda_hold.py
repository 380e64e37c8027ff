# SPDX-License-Identifier: Apache-2.0
"""Streams of the engine that follow transfers: what runs when, and what the caller is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from flexkv_kernels import CudaMode, CudaMover, Direction, Status
from kernels.tests.fake_cuda.fake_driver import ILLEGAL_ADDRESS, INVALID_VALUE, FakeCuda, FakeStream
from kernels.tests.worlds import World, is_closing, simple_world, until

MODES = list(CudaMode)[1:]
LAYERS = 20
BLOCKS = range(8)
MANY = 6000
"""Copies of one block: more than a stream is given at a time."""

USED = 0xEE
"""What the engine writes over pages that it has used."""


MakeMover = Callable[[CudaMode], CudaMover]


@pytest.fixture
def before(fake: FakeCuda) -> Iterator[FakeStream]:
    """The engine's stream that loads come after."""
    stream = FakeStream(fake)
    yield stream
    stream.destroy()


@pytest.fixture
def engine(fake: FakeCuda) -> Iterator[FakeStream]:
    """The engine's stream that follows loads; nothing else holds it."""
    stream = FakeStream(fake)
    stream.release()
    yield stream
    stream.destroy()


@pytest.fixture
def world() -> World:
    return simple_world(num_blocks=8, page_bytes=1024, n_planes=LAYERS, slots=16)


@pytest.fixture
def make_mover(
    fake: FakeCuda, world: World, before: FakeStream, engine: FakeStream
) -> Iterator[MakeMover]:
    """Makes the mover, which a test that fails closes too: nothing may wait for a stream then."""
    movers: list[CudaMover] = []

    def make(mode: CudaMode) -> CudaMover:
        movers.append(world.cuda_mover(fake.options(mode=mode)))
        return movers[-1]

    yield make
    before.release()
    for mover in movers:
        mover.close()


def slots(world: World) -> range:
    return range(0, 8 * world.block_bytes, world.block_bytes)


def layer(world: World, number: int) -> slice:
    """Where the pages of a layer are."""
    plane = world.planes[number]
    return slice(plane.base, plane.base + world.num_blocks * plane.block_stride)


def use(engine: FakeStream, world: World, number: int) -> None:
    """Lets the engine overwrite a layer's pages: what is loaded there later shows."""
    pages = layer(world, number)
    engine.fill(world.pages.address + pages.start, USED, pages.stop - pages.start)


def used(world: World, number: int) -> bool:
    return set(world.pages[layer(world, number)]) == {USED}


@pytest.mark.parametrize("mode", MODES)
def test_each_layer_is_used_when_it_is_there(  # noqa: PLR0917
    make_mover: MakeMover,
    fake: FakeCuda,
    world: World,
    before: FakeStream,
    engine: FakeStream,
    mode: CudaMode,
) -> None:
    fake.delay(300)
    mover = make_mover(mode)
    before.fill(world.pages.address, 0xAB, world.pages.size)
    loaded = world.after(Direction.LOAD, BLOCKS, slots(world))[0]
    load = [
        mover.submit(
            Direction.LOAD,
            BLOCKS,
            slots(world),
            after=before.handle,
            planes=range(number, number + 1),
        )
        for number in range(LAYERS)
    ]
    # All layers are on the device, though nothing has been copied. Of each these are recorded: what
    # it follows, its begin and its end; and of two stages, that a segment is filled.
    events = 4 if mode is CudaMode.STAGED else 3
    until(lambda: fake.calls("cuEventRecord") == events * LAYERS)
    for number, ticket in enumerate(load):
        assert mover.hold(ticket, engine.handle) is Status.PENDING
        if number % 2 == 0:
            use(engine, world, number)
    time.sleep(0.05)
    assert not any(used(world, number) for number in range(LAYERS))
    before.release()
    until(lambda: used(world, LAYERS - 2))
    for number, ticket in enumerate(load):
        assert mover.wait(ticket, 60) is Status.DONE
        if number % 2 == 0:
            assert used(world, number)
        else:
            assert world.pages[layer(world, number)] == loaded[layer(world, number)]


@pytest.mark.parametrize("mode", MODES)
def test_a_hold_waits_until_all_copies_are_on_the_device(
    make_mover: MakeMover, world: World, before: FakeStream, engine: FakeStream, mode: CudaMode
) -> None:
    """The stream could not follow those that come later."""
    mover = make_mover(mode)
    before.fill(world.pages.address, 0xAB, 1)
    ticket = mover.submit(
        Direction.LOAD, [3] * MANY, [0] * MANY, after=before.handle, planes=range(1)
    )
    seen: list[Status] = []
    holder = threading.Thread(target=lambda: seen.append(mover.hold(ticket, engine.handle)))
    holder.start()
    holder.join(0.1)
    assert holder.is_alive()
    before.release()
    holder.join(60)
    use(engine, world, 0)
    assert seen in ([Status.PENDING], [Status.DONE])
    until(lambda: used(world, 0))
    assert mover.wait(ticket, 60) is Status.DONE
    assert used(world, 0)


def test_what_has_ended_holds_no_stream(
    make_mover: MakeMover, fake: FakeCuda, engine: FakeStream
) -> None:
    mover = make_mover(CudaMode.DMA)
    done = mover.submit(Direction.LOAD, [1], [0])
    assert mover.wait(done, 60) is Status.DONE
    fake.fail("cuMemcpyBatchAsync", INVALID_VALUE)
    failed = mover.submit(Direction.LOAD, [1], [0])
    assert mover.wait(failed, 60) is Status.FAILED
    nothing = mover.submit(Direction.LOAD, [1], [0], planes=range(2, 2))
    for ticket, status in ((done, Status.DONE), (failed, Status.FAILED), (nothing, Status.DONE)):
        assert mover.hold(ticket, engine.handle) is status
    assert fake.calls("cuStreamWaitEvent") == 0
    mover.close()
    assert mover.hold(done, engine.handle) is Status.DONE
    assert mover.hold(failed, engine.handle) is Status.FAILED


def test_a_copy_that_is_refused_late_is_never_taken_for_pending(
    make_mover: MakeMover, fake: FakeCuda, world: World, before: FakeStream, engine: FakeStream
) -> None:
    """A part of it is on its way, and a part is not: the hold waits for the end."""
    mover = make_mover(CudaMode.DMA)
    before.fill(world.pages.address, 0xAB, 1)
    fake.fail("cuMemcpyBatchAsync", INVALID_VALUE, skip=2)
    ticket = mover.submit(Direction.LOAD, [3] * 1000, [0] * 1000, after=before.handle)
    until(lambda: mover.error() is not None)
    assert mover.poll(ticket) is Status.PENDING
    seen: list[Status] = []
    holder = threading.Thread(target=lambda: seen.append(mover.hold(ticket, engine.handle)))
    holder.start()
    before.release()
    holder.join(60)
    assert seen == [Status.FAILED]


def test_closing_ends_a_hold(make_mover: MakeMover, world: World, before: FakeStream) -> None:
    mover = make_mover(CudaMode.DMA)
    before.fill(world.pages.address, 0xAB, 1)
    mover.submit(Direction.LOAD, [3] * MANY, [0] * MANY, after=before.handle)
    queued = mover.submit(Direction.LOAD, [3], [0])
    seen: list[Status] = []
    holder = threading.Thread(target=lambda: seen.append(mover.hold(queued, before.handle)))
    holder.start()
    closing = threading.Thread(target=mover.close)
    closing.start()
    until(lambda: is_closing(mover))
    before.release()
    closing.join(60)
    holder.join(60)
    assert seen == [Status.FAILED]


@pytest.mark.parametrize("code", [INVALID_VALUE, 905])  # 905: the stream is captured
def test_a_stream_that_cannot_follow_is_refused(  # noqa: PLR0917
    make_mover: MakeMover,
    fake: FakeCuda,
    world: World,
    before: FakeStream,
    engine: FakeStream,
    code: int,
) -> None:
    mover = make_mover(CudaMode.DMA)
    before.fill(world.pages.address, 0xAB, 1)
    ticket = mover.submit(Direction.LOAD, [1], [0], after=before.handle)
    assert mover.hold(ticket, engine.handle) is Status.PENDING
    with pytest.raises(ValueError, match=r"stream is 4919, no stream of this device: .*\(400\)"):
        mover.hold(ticket, 4919)
    with pytest.raises(ValueError, match="stream is -1"):
        mover.hold(ticket, -1)
    fake.fail("cuStreamWaitEvent", code)
    with pytest.raises(ValueError, match=rf"no stream of this device: .*\({code}\)"):
        mover.hold(ticket, engine.handle)
    with pytest.raises(ValueError, match=f"ticket {ticket + 1} was never given out"):
        mover.hold(ticket + 1, engine.handle)
    before.release()
    assert mover.wait(ticket, 60) is Status.DONE


def test_a_failed_device_holds_no_stream(
    make_mover: MakeMover, fake: FakeCuda, world: World, before: FakeStream, engine: FakeStream
) -> None:
    mover = make_mover(CudaMode.DMA)
    before.fill(world.pages.address, 0xAB, 1)
    ticket = mover.submit(Direction.LOAD, [1], [0], after=before.handle)
    assert mover.hold(ticket, engine.handle) is Status.PENDING
    fake.fail("cuStreamWaitEvent", ILLEGAL_ADDRESS, sticky=True)
    with pytest.raises(RuntimeError, match=rf"device no longer works.*\({ILLEGAL_ADDRESS}\)"):
        mover.hold(ticket, engine.handle)
    assert mover.wait(ticket, 60) is Status.FAILED
    assert mover.hold(ticket, engine.handle) is Status.FAILED


def test_without_a_stream_the_caller_waits(
    make_mover: MakeMover, world: World, before: FakeStream
) -> None:
    mover = make_mover(CudaMode.DMA)
    before.fill(world.pages.address, 0xAB, world.pages.size)
    expected = world.after(Direction.LOAD, BLOCKS, slots(world))[0]
    ticket = mover.submit(Direction.LOAD, BLOCKS, slots(world), after=before.handle)
    releasing = threading.Timer(0.1, before.release)
    releasing.start()
    assert mover.hold(ticket, 0) is Status.DONE
    assert world.pages[:] == expected
    releasing.join()
