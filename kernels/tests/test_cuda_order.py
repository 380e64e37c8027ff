# SPDX-License-Identifier: Apache-2.0
"""What a CUDA mover waits for, what overtakes what, when flags rise, and what it leaves behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv_kernels import CudaMode, CudaMover, Direction, Status
from kernels.tests.conftest import MakeFake
from kernels.tests.fake_cuda.fake_driver import FakeCuda, FakeStream
from kernels.tests.test_processes import start
from kernels.tests.worlds import Flag, World, is_closing, simple_world, until

MODES = list(CudaMode)[1:]
BLOCKS = range(8)
MANY = 6000
"""Copies of one block: more slices than a stream is given at a time."""


@pytest.fixture
def stream(fake: FakeCuda) -> Iterator[FakeStream]:
    stream = FakeStream(fake)
    yield stream
    stream.destroy()


def small_world() -> World:
    return simple_world(num_blocks=8, page_bytes=4096, n_planes=2, slots=16)


def slots(world: World) -> range:
    return range(0, 8 * world.block_bytes, world.block_bytes)


@pytest.mark.parametrize("mode", MODES)
def test_a_store_follows_the_work_that_writes_the_pages(
    fake: FakeCuda, stream: FakeStream, mode: CudaMode
) -> None:
    world = small_world()
    mover = world.cuda_mover(fake.options(mode=mode))
    stream.fill(world.pages.address, 0xAB, world.pages.size)
    ticket = mover.submit(Direction.STORE, BLOCKS, slots(world), after=stream.handle)
    assert mover.wait(ticket, 0.1) is Status.PENDING
    stream.release()
    assert mover.wait(ticket, 60) is Status.DONE
    assert world.arena[: 8 * world.block_bytes] == b"\xab" * (8 * world.block_bytes)
    mover.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_load_follows_the_work_that_still_uses_the_pages(
    fake: FakeCuda, stream: FakeStream, mode: CudaMode
) -> None:
    world = small_world()
    mover = world.cuda_mover(fake.options(mode=mode))
    stream.fill(world.pages.address, 0xAB, world.pages.size)
    expected = world.after(Direction.LOAD, BLOCKS, slots(world))
    ticket = mover.submit(Direction.LOAD, BLOCKS, slots(world), after=stream.handle)
    assert mover.wait(ticket, 0.1) is Status.PENDING
    stream.release()
    assert mover.wait(ticket, 60) is Status.DONE
    assert world.now() == expected
    mover.close()


def test_queued_transfers_follow_each_its_own_stream(fake: FakeCuda, stream: FakeStream) -> None:
    world = small_world()
    mover = world.cuda_mover(fake.options(mode=CudaMode.DMA))
    first, second = FakeStream(fake), FakeStream(fake)
    first.fill(world.arena.address, 0, 1)
    running = mover.submit(Direction.STORE, [0] * MANY, [0] * MANY, after=first.handle)
    until(lambda: fake.calls("cuStreamWaitEvent") == 1)
    # The stream of the mover is full: these two are queued, and their events recorded.
    stream.fill(world.pages.address, 0xAB, world.pages.size)
    slot = world.block_bytes
    follows = mover.submit(Direction.STORE, [0], [slot], after=stream.handle)
    last = mover.submit(Direction.STORE, [1], [2 * slot], after=second.handle)
    first.release()
    assert mover.wait(running, 60) is Status.DONE
    assert mover.wait(follows, 0.1) is Status.PENDING
    stream.release()
    assert mover.wait(last, 60) is Status.DONE
    assert mover.poll(follows) is Status.DONE
    assert world.arena[slot : 2 * slot] == b"\xab" * slot
    mover.close()
    first.destroy()
    second.destroy()


def test_calls_leave_the_engines_thread_as_it_was(fake: FakeCuda, stream: FakeStream) -> None:
    world = small_world()
    mover = world.cuda_mover(fake.options(mode=CudaMode.KERNEL))
    assert fake.thread_is_clean
    stream.fill(world.pages.address, 0xAB, 1)
    ticket = mover.submit(Direction.STORE, [0], [0], after=stream.handle)
    mover.hold(ticket, stream.handle)
    stream.release()
    assert mover.wait(ticket, 60) is Status.DONE
    assert fake.thread_is_clean
    mover.close()
    assert fake.thread_is_clean


def test_a_mover_works_while_the_engine_captures_a_graph(
    fake: FakeCuda, stream: FakeStream
) -> None:
    fake.capture(True)
    world = small_world()
    mover = world.cuda_mover(fake.options(mode=CudaMode.DMA))
    expected = world.after(Direction.LOAD, BLOCKS, slots(world))
    ticket = mover.submit(Direction.LOAD, BLOCKS, slots(world), after=stream.handle)
    assert mover.wait(ticket, 60) is Status.DONE
    assert world.now() == expected
    mover.close()


@pytest.mark.parametrize("legacy", [False, True])
def test_a_stream_that_is_captured_is_refused(
    fake: FakeCuda, stream: FakeStream, legacy: bool
) -> None:
    """What is put into it runs when the graph does, if ever. The legacy stream waits for others."""
    world = small_world()
    handle = FakeStream(fake, legacy=True).handle if legacy else stream.handle
    mover = world.cuda_mover(fake.options(mode=CudaMode.DMA))
    held = FakeStream(fake)
    held.fill(world.pages.address, 0, 0)
    ticket = mover.submit(Direction.LOAD, BLOCKS, slots(world), after=held.handle)
    stream.capture(True)
    for call in (
        lambda: mover.submit(Direction.STORE, [0], [0], after=handle),
        lambda: mover.mark(handle),
        lambda: mover.hold(ticket, handle),
    ):
        with pytest.raises(
            ValueError, match=f"is {handle}, a stream that is captured into a graph"
        ):
            call()
    stream.capture(False)
    held.release()
    assert mover.wait(ticket, 60) is Status.DONE
    assert mover.wait(mover.submit(Direction.STORE, [0], [0], after=handle), 60) is Status.DONE
    mover.close()
    held.destroy()


def test_work_that_comes_later_is_not_waited_for(fake: FakeCuda, stream: FakeStream) -> None:
    world = small_world()
    mover = world.cuda_mover(fake.options(mode=CudaMode.DMA))
    before = world.pages[:]
    ticket = mover.submit(Direction.STORE, BLOCKS, slots(world), after=stream.handle)
    assert mover.wait(ticket, 60) is Status.DONE
    stream.fill(world.pages.address, 0xAB, world.pages.size)
    again = mover.submit(Direction.STORE, [0], [0])
    assert mover.wait(again, 60) is Status.DONE
    assert world.pages[:] == before
    mover.close()


def test_a_load_overtakes_stores_that_run_and_that_are_queued(
    fake: FakeCuda, stream: FakeStream
) -> None:
    fake.delay(100)
    world = small_world()
    mover = world.cuda_mover(fake.options(mode=CudaMode.KERNEL))
    stream.fill(world.pages.address, 0xAB, 1)
    running = mover.submit(Direction.STORE, [0] * MANY, [0] * MANY, after=stream.handle)
    queued = mover.submit(Direction.STORE, [1], [0])
    last_slot = 15 * world.block_bytes
    expected = world.after(Direction.LOAD, [7], [last_slot])
    load = mover.submit(Direction.LOAD, [7], [last_slot])
    assert mover.wait(load, 60) is Status.DONE
    assert world.now() == expected
    assert mover.poll(running) is Status.PENDING
    assert mover.poll(queued) is Status.PENDING
    stream.release()
    assert mover.wait(queued, 60) is Status.DONE
    assert mover.poll(running) is Status.DONE
    mover.close()


@pytest.mark.parametrize("mode", MODES)
def test_parts_end_in_the_order_of_their_submission(fake: FakeCuda, mode: CudaMode) -> None:
    fake.delay(300)
    world = simple_world(num_blocks=8, page_bytes=1024, n_planes=20, slots=8)
    mover = world.cuda_mover(fake.options(mode=mode))
    load = [
        mover.submit(Direction.LOAD, BLOCKS, slots(world), planes=range(number, number + 1))
        for number in [*range(20)] * 4
    ]
    while mover.poll(load[-1]) is Status.PENDING:
        states = [mover.poll(ticket) for ticket in reversed(load)]
        assert states == sorted(states)  # once one is DONE, all before it are
    assert {mover.poll(ticket) for ticket in load} == {Status.DONE}
    mover.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("direction", Direction)
def test_a_flag_rises_only_when_every_byte_is_there(
    fake: FakeCuda, mode: CudaMode, direction: Direction
) -> None:
    """The flag is a word of the arena, as another process would watch it."""
    fake.delay(2000)
    world = simple_world(num_blocks=700, page_bytes=64, n_planes=2, slots=701)  # several slices
    place = 700 * world.block_bytes
    flag = world.arena.word(place)
    mover = world.cuda_mover(fake.options(mode=mode))
    blocks, offsets = range(699, -1, -1), range(0, place, world.block_bytes)
    flag.value = Status.PENDING
    expected = world.after(direction, blocks, offsets)
    ticket = mover.submit(direction, blocks, offsets, flag_address=world.arena.address + place)
    while flag.value == Status.PENDING:
        pass
    pages, arena = world.now()
    assert flag.value == Status.DONE
    assert (pages, arena[:place]) == (expected[0], expected[1][:place])
    assert mover.wait(ticket, 60) is Status.DONE
    assert fake.calls("cuStreamWriteValue32") == 1
    mover.close()


def test_a_flag_elsewhere_rises_too_and_before_the_ticket_is_done(fake: FakeCuda) -> None:
    world = small_world()
    mover = world.cuda_mover(fake.options(mode=CudaMode.DMA))
    for _ in range(50):
        flag = Flag()
        ticket = mover.submit(Direction.LOAD, [3], [0], flag_address=flag.address)
        while mover.poll(ticket) is Status.PENDING:
            pass
        assert flag.value == Status.DONE
    assert fake.calls("cuStreamWriteValue32") == 0
    mover.close()


def test_a_flag_rises_where_the_driver_does_not_write_it(fake: FakeCuda) -> None:
    world = small_world()
    place = 15 * world.block_bytes
    flag = world.arena.word(place)
    mover = world.cuda_mover(fake.options(mode=CudaMode.DMA))
    fake.fail("cuStreamWriteValue32", 801)  # not supported
    flag.value = Status.PENDING
    address = world.arena.address + place
    ticket = mover.submit(Direction.LOAD, [3], [0], flag_address=address)
    assert mover.wait(ticket, 60) is Status.DONE
    assert flag.value == Status.DONE
    mover.close()


def test_transfers_of_nothing_are_done_at_once(fake: FakeCuda, stream: FakeStream) -> None:
    world = small_world()
    world.store = range(1, 1)
    mover = world.cuda_mover(fake.options(mode=CudaMode.KERNEL))
    before = world.now()
    stream.fill(world.pages.address, 0xAB, 1)
    for direction, blocks in ((Direction.LOAD, []), (Direction.STORE, [1])):
        flag = Flag()
        ticket = mover.submit(
            direction, blocks, [0] * len(blocks), after=stream.handle, flag_address=flag.address
        )
        assert flag.value == Status.DONE
        assert mover.poll(ticket) is Status.DONE
    mover.close()
    assert world.now() == before


def test_nothing_is_made_anew_for_a_transfer(fake: FakeCuda, stream: FakeStream) -> None:
    world = small_world()
    mover = world.cuda_mover(fake.options(mode=CudaMode.DMA))
    stream.release()
    apart = {Direction.LOAD: (2, 8 * world.block_bytes), Direction.STORE: (1, 0)}

    def burst() -> None:
        tickets = [
            mover.submit(direction, [block] * 300, [offset] * 300, after=stream.handle)
            for direction, (block, offset) in [*apart.items()] * 10
        ]
        assert all(mover.wait(ticket, 60) is Status.DONE for ticket in tickets)

    for _ in range(3):
        burst()
    makers = ("cuEventCreate", "cuStreamCreateWithPriority", "cuMemAlloc", "cuMemHostRegister")
    live, made = fake.live, [fake.calls(name) for name in makers]
    recorded = fake.calls("cuEventRecord")
    for _ in range(20):
        # With nothing else on its way the pool holds all its events.
        ticket = mover.submit(Direction.STORE, [1], [0], after=stream.handle)
        assert mover.wait(ticket, 60) is Status.DONE
    assert fake.live == live
    assert [fake.calls(name) for name in makers] == made
    # The caller's stream, before the first byte and after the last.
    assert fake.calls("cuEventRecord") == recorded + 60
    mover.close()


def test_closing_finishes_what_runs_fails_what_is_queued_and_gives_all_back(
    fake: FakeCuda, stream: FakeStream
) -> None:
    live = fake.live
    world = small_world()
    mover = world.cuda_mover(fake.options(mode=CudaMode.DMA))
    done = mover.submit(Direction.STORE, [1], [0])
    assert mover.wait(done, 60) is Status.DONE
    stream.fill(world.pages.address, 0xAB, world.pages.size)
    flags = [Flag() for _ in range(3)]
    tickets = [
        mover.submit(
            Direction.STORE,
            [0] * MANY,
            [0] * MANY,
            after=stream.handle,
            flag_address=flag.address,
        )
        for flag in flags
    ]
    assert [mover.poll(ticket) for ticket in tickets] == [Status.PENDING] * 3
    # The first store goes into the stream from then on.
    until(lambda: fake.calls("cuMemcpyBatchAsync") > 1)
    closing = threading.Thread(target=mover.close)
    closing.start()
    until(lambda: is_closing(mover))
    time.sleep(0.05)
    assert closing.is_alive()  # the device still has copies that wait for the stream
    stream.release()
    closing.join(60)
    assert [mover.poll(ticket) for ticket in tickets] == [Status.FAILED] * 3
    assert [flag.value for flag in flags] == [Status.FAILED] * 3
    assert mover.poll(done) is Status.DONE
    assert mover.error() is None
    with pytest.raises(RuntimeError, match="the mover is closed"):
        mover.submit(Direction.LOAD, [0], [0])
    mover.close()
    assert fake.live == live


def test_dropping_the_last_reference_gives_all_back(fake: FakeCuda, stream: FakeStream) -> None:
    live = fake.live
    world = small_world()
    mover = world.cuda_mover(fake.options(mode=CudaMode.TMA))
    stream.release()
    mover.submit(Direction.STORE, [0] * MANY, [0] * MANY, after=stream.handle)
    assert fake.live > live
    del mover
    gc.collect()
    assert fake.live == live


def test_movers_over_one_arena_share_its_registration(fake: FakeCuda) -> None:
    first, second = small_world(), small_world()
    second.arena = first.arena
    movers = [world.cuda_mover(fake.options(mode=CudaMode.DMA)) for world in (first, second)]
    assert fake.calls("cuMemHostRegister") == 1
    assert fake.calls("cuModuleLoadData") == 1
    movers[0].close()
    assert fake.calls("cuMemHostUnregister") == 0
    expected = second.after(Direction.LOAD, [2], [0])
    assert movers[1].wait(movers[1].submit(Direction.LOAD, [2], [0]), 60) is Status.DONE
    assert second.now() == expected
    movers[1].close()
    assert fake.calls("cuMemHostUnregister") == 1
    # What is no longer registered is registered again.
    third = first.cuda_mover(fake.options(mode=CudaMode.DMA))
    assert fake.calls("cuMemHostRegister") == 2
    third.close()
    assert fake.calls("cuMemHostUnregister") == 2


def test_many_threads_submit_while_others_wait(make_fake: MakeFake) -> None:
    fake = make_fake()
    fake.delay(50)
    world = simple_world(num_blocks=16, page_bytes=512, n_planes=3, slots=16)
    expected = world.after(Direction.STORE, range(16), range(0, world.arena.size, 1536))[1]
    mover = world.cuda_mover(fake.options(mode=CudaMode.KERNEL))
    errors: list[str] = []

    def run(number: int) -> None:
        blocks = list(range(number * 4, number * 4 + 4))
        offsets = [block * world.block_bytes for block in blocks]
        mine = slice(offsets[0], offsets[0] + 4 * world.block_bytes)
        for _ in range(40):
            world.arena.map[mine] = bytes(mine.stop - mine.start)
            stored = mover.submit(Direction.STORE, blocks, offsets)
            if mover.wait(stored, 60) is not Status.DONE or world.arena[mine] != expected[mine]:
                errors.append(f"thread {number}")

    workers = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    mover.close()


def test_in_a_fork_the_mover_is_closed(fake: FakeCuda) -> None:
    # pytest's own process may have become too large to be forked.
    script = "import sys; from kernels.tests.test_cuda_order import fork; fork(sys.argv[1])"
    process = start(script, fake.path)
    process.communicate(timeout=60)
    assert process.returncode == 0


def fork(driver: str) -> None:
    """Use a mover in a forked process, and then in this one."""
    fake = FakeCuda(Path(driver))
    world = small_world()
    mover = world.cuda_mover(fake.options(mode=CudaMode.DMA))
    ticket = mover.submit(Direction.STORE, [0], [0])
    assert mover.wait(ticket, 60) is Status.DONE
    child = os.fork()
    if child == 0:
        os._exit(_use_forked(mover, ticket))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mover.wait(mover.submit(Direction.STORE, [0], [0]), 60) is Status.DONE
    mover.close()


def _use_forked(mover: CudaMover, ticket: int) -> int:
    """The number of things in a forked child that did not go as documented."""
    wrong = 0
    for call in (
        lambda: mover.submit(Direction.STORE, [0], [0]),
        lambda: mover.poll(ticket),
        lambda: mover.hold(ticket, 1),
    ):
        try:
            call()
        except RuntimeError as error:
            wrong += "fork" not in str(error)
        else:
            wrong += 1
    mover.close()
    return wrong
