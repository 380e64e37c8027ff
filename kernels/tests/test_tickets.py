# SPDX-License-Identifier: Apache-2.0
"""States of transfers: tickets, flags, order of loads and stores, closing."""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
import threading
import time
from pathlib import Path

import pytest

from flexkv_kernels import CpuOptions, Direction, Status
from flexkv_kernels._library import LIBRARY
from kernels.tests.worlds import ENDLESS, Flag, endless_world, simple_world, until


def test_tickets_answer_for_ever_and_unknown_numbers_are_errors() -> None:
    world = simple_world(4, 100, 2, 4)
    mover = world.mover()
    tickets = [mover.submit(Direction.STORE, [i], [0]) for i in range(4)]
    assert len(set(tickets)) == 4
    assert min(tickets) >= 1
    for ticket in tickets * 2:
        assert mover.wait(ticket, 60) is Status.DONE
        assert mover.poll(ticket) is Status.DONE
    for unknown in (0, -1, max(tickets) + 1):
        with pytest.raises(ValueError, match=f"ticket {unknown} was never given out"):
            mover.poll(unknown)
        with pytest.raises(ValueError, match=f"ticket {unknown} was never given out"):
            mover.wait(unknown, 1)
    mover.close()


def test_an_empty_transfer_is_done_at_once() -> None:
    world = endless_world()
    mover = world.mover()
    before = world.now()
    busy = mover.submit(Direction.STORE, [0] * ENDLESS, [0] * ENDLESS)
    flag = Flag()
    ticket = mover.submit(Direction.STORE, [], [], flag_address=flag.address)
    assert flag.value == Status.DONE
    assert mover.poll(ticket) is Status.DONE
    assert mover.poll(busy) is Status.PENDING
    mover.close()
    assert world.now()[0] == before[0]


def test_the_flag_rises_only_when_every_byte_is_there() -> None:
    world = simple_world(num_blocks=64, page_bytes=16384, n_planes=8, slots=64)
    blocks, offsets = range(64), range(0, world.arena.size, world.block_bytes)
    # With large chunks, the last bytes come long after the last chunk was taken.
    for chunk_bytes, stream_bytes in ((65536, 1), (65536, 1 << 40), (1 << 22, 1 << 40)):
        mover = world.mover(2, CpuOptions(chunk_bytes=chunk_bytes, stream_bytes=stream_bytes))
        expected = world.after(Direction.STORE, blocks, offsets)[1]
        for _ in range(20):
            world.arena.map[:] = bytes(world.arena.size)
            flag = Flag()
            ticket = mover.submit(Direction.STORE, blocks, offsets, flag_address=flag.address)
            while flag.value == Status.PENDING:
                pass
            assert world.arena[-64:] == expected[-64:]  # first, while it can still be wrong
            assert world.arena[:] == expected
            assert flag.value == Status.DONE
            assert mover.wait(ticket, 60) is Status.DONE
        mover.close()


def test_the_flag_is_up_when_the_ticket_is_done() -> None:
    world = simple_world(num_blocks=4, page_bytes=4096, n_planes=2, slots=4)
    mover = world.mover(2)
    for i in range(2000):
        flag = Flag()
        ticket = mover.submit(Direction.LOAD, [i % 4], [0], flag_address=flag.address)
        while mover.poll(ticket) is Status.PENDING:
            pass
        assert flag.value == Status.DONE
    mover.close()


def test_a_load_overtakes_a_running_and_a_queued_store() -> None:
    world = endless_world()
    mover = world.mover(threads=1)
    running = mover.submit(Direction.STORE, [0] * ENDLESS, [0] * ENDLESS)
    queued = mover.submit(Direction.STORE, [0], [0])
    load = mover.submit(Direction.LOAD, [1], [1 << 20])
    assert mover.wait(load, 60) is Status.DONE
    assert mover.poll(running) is Status.PENDING
    assert mover.poll(queued) is Status.PENDING
    assert world.pages[1 << 20 :] == world.arena[1 << 20 :]
    mover.close()


def test_transfers_of_one_direction_start_in_order() -> None:
    world = endless_world()
    mover = world.mover(threads=1)
    first = mover.submit(Direction.STORE, [0] * 200, [0] * 200)
    second = mover.submit(Direction.STORE, [0] * ENDLESS, [0] * ENDLESS)
    assert mover.wait(first, 60) is Status.DONE
    assert mover.poll(second) is Status.PENDING
    mover.close()


def test_all_threads_copy_the_first_transfer_before_the_next_is_begun() -> None:
    world = simple_world(num_blocks=2, page_bytes=1 << 20, n_planes=2, slots=2)
    mover = world.mover(threads=3)
    pages = world.pages[:]
    first, second = (
        mover.submit(Direction.LOAD, [0] * ENDLESS, [0] * ENDLESS, planes=part)
        for part in (range(1), range(1, 2))
    )
    assert mover.wait(first, 0.1) is Status.PENDING
    mover.close()
    assert mover.poll(second) is Status.FAILED
    assert world.pages[: 1 << 20] == world.arena[: 1 << 20]
    assert world.pages[1 << 20 :] == pages[1 << 20 :]


def test_parts_end_in_the_order_of_their_submission() -> None:
    world = simple_world(num_blocks=64, page_bytes=65536, n_planes=8, slots=64)
    mover = world.mover(threads=1)
    offsets = range(0, world.arena.size, world.block_bytes)
    load = [
        mover.submit(Direction.LOAD, range(64), offsets, planes=range(number, number + 1))
        for number in [*range(8)] * 10
    ]
    while mover.poll(load[-1]) is Status.PENDING:
        states = [mover.poll(ticket) for ticket in reversed(load)]
        assert states == sorted(states)  # once one is DONE, all before it are
    assert {mover.poll(ticket) for ticket in load} == {Status.DONE}
    mover.close()


def test_a_hold_waits_for_the_bytes() -> None:
    world = simple_world(num_blocks=64, page_bytes=65536, n_planes=4, slots=64)
    mover = world.mover(threads=2)
    offsets = range(0, world.arena.size, world.block_bytes)
    for number in range(4):
        part = range(number, number + 1)
        expected = world.after(Direction.LOAD, range(64), offsets, part)[0]
        ticket = mover.submit(Direction.LOAD, range(64), offsets, planes=part)
        assert mover.hold(ticket, 0) is Status.DONE
        assert world.pages[:] == expected
    with pytest.raises(ValueError, match="stream is 7, the CPU mover has none"):
        mover.hold(ticket, 7)
    with pytest.raises(ValueError, match=f"ticket {ticket + 1} was never given out"):
        mover.hold(ticket + 1, 0)
    mover.close()


def test_waiting_gives_up_after_its_time() -> None:
    world = endless_world()
    mover = world.mover()
    ticket = mover.submit(Direction.STORE, [0] * ENDLESS, [0] * ENDLESS)
    start = time.monotonic()
    assert mover.wait(ticket, 0.7) is Status.PENDING
    assert time.monotonic() - start >= 0.7
    assert mover.wait(ticket, 0) is Status.PENDING
    assert mover.wait(ticket, -1) is Status.PENDING
    mover.close()


def test_closing_fails_what_is_queued_and_frees_the_memory() -> None:
    world = endless_world()
    # A chunk takes some tens of milliseconds: a thread that was not waited for still writes.
    mover = world.mover(2, CpuOptions(chunk_bytes=1 << 27))
    done = mover.submit(Direction.STORE, [1], [0])
    assert mover.wait(done, 60) is Status.DONE
    flags = [Flag() for _ in range(3)]
    tickets = [
        mover.submit(Direction.STORE, [0] * ENDLESS, [0] * ENDLESS, flag_address=flag.address)
        for flag in flags
    ]
    assert [flag.value for flag in flags] == [Status.PENDING] * 3
    mover.close()
    assert [flag.value for flag in flags] == [Status.FAILED] * 3
    for _ in range(2):
        assert [mover.poll(ticket) for ticket in tickets] == [Status.FAILED] * 3
    assert mover.wait(tickets[0], 60) is Status.FAILED
    assert mover.poll(done) is Status.DONE
    # No thread is left that could still write.
    world.arena.map[:] = bytes(world.arena.size)
    time.sleep(0.01)
    assert world.arena[:] == bytes(world.arena.size)
    with pytest.raises(RuntimeError, match="the mover is closed"):
        mover.submit(Direction.LOAD, [0], [0])
    mover.close()


@pytest.mark.parametrize("call", ["wait", "hold"])
def test_closing_wakes_a_waiter(call: str) -> None:
    world = endless_world()
    mover = world.mover()
    ticket = mover.submit(Direction.STORE, [0] * ENDLESS, [0] * ENDLESS)
    seen: list[Status] = []
    waiting = {
        "wait": lambda: mover.wait(ticket, float("inf")),
        "hold": lambda: mover.hold(ticket, 0),
    }
    waiter = threading.Thread(target=lambda: seen.append(waiting[call]()))
    waiter.start()
    mover.close()
    waiter.join(60)
    assert seen == [Status.FAILED]


@pytest.mark.parametrize(("copies", "end"), [(2000, Status.DONE), (ENDLESS, Status.FAILED)])
def test_what_ends_wakes_who_waits_in_the_library(copies: int, end: Status) -> None:
    """Python waits in the library for short times one after the other; other callers need not."""
    world = endless_world()
    mover = world.mover()
    ticket = mover.submit(Direction.STORE, [0] * copies, [0] * copies)
    seen: list[Status] = []
    wait = LIBRARY.waiting.fkv_mover_wait
    waiter = threading.Thread(
        target=lambda: seen.append(Status(wait(mover._handle, ticket, 2**63 - 1))), daemon=True
    )
    waiter.start()
    if end is Status.FAILED:
        mover.close()
    waiter.join(60)
    assert seen == [end]
    mover.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
def test_dropping_the_last_reference_ends_the_threads() -> None:
    def mover_threads() -> set[Path]:
        threads = set()
        for path in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that just ended
                if path.read_text().strip() == "flexkv-mover":
                    threads.add(path)
        return threads

    world = endless_world()
    gc.collect()
    before = mover_threads()
    mover = world.mover(threads=3)
    mover.wait(mover.submit(Direction.STORE, [0] * 64, [0] * 64), 60)
    assert len(mover_threads() - before) == 3
    mover.submit(Direction.STORE, [0] * ENDLESS, [0] * ENDLESS)
    del mover
    gc.collect()
    # The system may still list a thread for a moment after it was joined.
    until(lambda: not mover_threads() - before)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_finished_tickets_take_no_memory() -> None:
    world = simple_world(4, 64, 1, 4)
    mover = world.mover()

    def many(count: int) -> int:
        for _ in range(count):
            last = mover.submit(Direction.STORE, [1], [64])
        assert mover.wait(last, 60) is Status.DONE
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for _ in range(20):
        before = many(1000)
    for _ in range(200):
        after = many(1000)
    assert after - before < 1024  # KiB, for 200,000 transfers
    mover.close()


def test_many_python_threads_submit_at_once() -> None:
    threads, rounds = 4, 150
    world = simple_world(num_blocks=threads * 4, page_bytes=2000, n_planes=3, slots=threads * 4)
    expected = world.after(
        Direction.STORE, range(threads * 4), range(0, world.arena.size, world.block_bytes)
    )[1]
    mover = world.mover(2, CpuOptions(chunk_bytes=4096))
    errors: list[str] = []

    def run(number: int) -> None:
        blocks = list(range(number * 4, number * 4 + 4))
        offsets = [block * world.block_bytes for block in blocks]
        mine = slice(offsets[0], offsets[0] + 4 * world.block_bytes)
        for _ in range(rounds):
            world.arena.map[mine] = bytes(mine.stop - mine.start)
            stored = mover.submit(Direction.STORE, blocks, offsets)
            if mover.wait(stored, 60) is not Status.DONE or world.arena[mine] != expected[mine]:
                errors.append(f"thread {number}: store")
            loaded = mover.submit(Direction.LOAD, blocks, offsets)
            if mover.wait(loaded, 60) is not Status.DONE:
                errors.append(f"thread {number}: load")

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    pages = world.pages[:]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    assert world.now() == (pages, expected)
    mover.close()
