# SPDX-License-Identifier: Apache-2.0
"""What movers tell of the time that copies took: waiting is no part of it."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from flexkv_kernels import CpuOptions, CudaMode, Direction, Status
from kernels.tests.fake_cuda.fake_driver import INVALID_VALUE, FakeCuda, FakeStream
from kernels.tests.worlds import endless_world, simple_world, until

HELD_SECONDS = 0.2
MODES = [CudaMode.DMA, CudaMode.KERNEL, CudaMode.TMA]


@pytest.mark.parametrize("chunk_bytes", [0, 1 << 16], ids=["whole", "in chunks"])
def test_copies_that_follow_one_another_share_the_time(chunk_bytes: int) -> None:
    """One thread copies one transfer after the other: if any of them counted its place in the
    queue, the sum would exceed the time of all."""
    world = endless_world()
    mover = world.mover(threads=1, options=CpuOptions(chunk_bytes=chunk_bytes))
    began = time.monotonic()
    tickets = [mover.submit(Direction.STORE, [0] * 40, [0] * 40) for _ in range(5)]
    assert [mover.wait(ticket, 60) for ticket in tickets] == [Status.DONE] * 5
    passed = time.monotonic() - began
    seconds = [mover.copy_seconds(ticket) for ticket in tickets]
    assert None not in seconds
    assert all(0 < each <= passed for each in seconds if each is not None)
    assert sum(each for each in seconds if each is not None) <= passed
    # A transfer counts from its first chunk: no thread copies 200 GB/s.
    assert all(40 * world.block_bytes / each < 2e11 for each in seconds if each is not None)
    mover.close()


def test_the_time_does_not_depend_on_who_looks_when() -> None:
    world = simple_world(4, 4096, 2, 4)
    mover = world.mover()
    began = time.monotonic()
    ticket = mover.submit(Direction.LOAD, [1], [0])
    assert mover.wait(ticket, 60) is Status.DONE
    passed = time.monotonic() - began
    time.sleep(2 * passed)
    first = mover.copy_seconds(ticket)
    assert mover.poll(ticket) is Status.DONE
    assert first is not None
    assert 0 < first <= passed
    assert mover.copy_seconds(ticket) == first
    mover.close()
    assert mover.copy_seconds(ticket) == first


def test_what_was_not_copied_has_no_time() -> None:
    world = endless_world()
    mover = world.mover()
    nothing = mover.submit(Direction.STORE, [], [])
    running = mover.submit(Direction.STORE, [0] * 200_000, [0] * 200_000)
    queued = mover.submit(Direction.STORE, [0], [0])
    assert [mover.copy_seconds(ticket) for ticket in (nothing, running, queued)] == [None] * 3
    mover.close()
    assert mover.poll(running) is Status.FAILED
    assert [mover.copy_seconds(ticket) for ticket in (nothing, running, queued)] == [None] * 3
    for unknown in (0, -1, queued + 1):
        with pytest.raises(ValueError, match=f"ticket {unknown} was never given out"):
            mover.copy_seconds(unknown)


def test_the_last_transfers_are_remembered() -> None:
    world = simple_world(2, 64, 1, 2)
    mover = world.mover()
    tickets = [mover.submit(Direction.LOAD, [0], [0]) for _ in range(4097)]
    assert all(mover.wait(ticket, 60) is Status.DONE for ticket in tickets)
    assert all(b == a + 1 for a, b in pairwise(tickets))
    assert mover.copy_seconds(tickets[0]) is None
    assert all(mover.copy_seconds(ticket) is not None for ticket in tickets[1:])
    mover.close()


@pytest.mark.parametrize("mode", MODES)
def test_on_a_device_the_stream_that_copies_follow_is_not_their_time(
    fake: FakeCuda, mode: CudaMode
) -> None:
    world = simple_world(4, 4096, 2, 4)
    mover = world.cuda_mover(fake.options(mode=mode))
    for direction in Direction:
        held = FakeStream(fake)
        held.fill(world.pages.address, 0xAB, world.pages.size)
        ticket = mover.submit(direction, [1, 2], [0, world.block_bytes], after=held.handle)
        time.sleep(HELD_SECONDS)
        assert mover.copy_seconds(ticket) is None
        released = time.monotonic()
        held.release()
        assert mover.wait(ticket, 60) is Status.DONE
        seconds = mover.copy_seconds(ticket)
        assert seconds is not None
        assert 0 < seconds <= time.monotonic() - released
        held.destroy()
    mover.close()


def test_on_a_device_a_transfer_of_many_slices_counts_from_its_first(fake: FakeCuda) -> None:
    world = simple_world(2, 64, 1, 2)
    mover = world.cuda_mover(fake.options(mode=CudaMode.DMA))
    fake.delay(2000)
    began = time.monotonic()
    ticket = mover.submit(Direction.LOAD, [0] * 6000, [0] * 6000)
    assert mover.wait(ticket, 60) is Status.DONE
    passed = time.monotonic() - began
    seconds = mover.copy_seconds(ticket)
    assert seconds is not None
    # At least 24 slices, each delayed by 1 ms on average and 2 ms at most.
    assert 0.005 < seconds <= passed
    mover.close()


def test_a_driver_that_does_not_tell_the_time_still_copies(fake: FakeCuda) -> None:
    world = simple_world(4, 4096, 2, 4)
    mover = world.cuda_mover(fake.options(mode=CudaMode.DMA))
    fake.fail("cuEventElapsedTime", INVALID_VALUE)
    expected = world.after(Direction.LOAD, [1], [0])
    ticket = mover.submit(Direction.LOAD, [1], [0])
    assert mover.wait(ticket, 60) is Status.DONE
    assert world.now() == expected
    assert mover.copy_seconds(ticket) is None
    again = mover.submit(Direction.LOAD, [1], [0])
    until(lambda: mover.poll(again) is Status.DONE)
    assert mover.copy_seconds(again) is not None
    mover.close()
