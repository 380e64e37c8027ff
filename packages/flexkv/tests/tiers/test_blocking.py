# SPDX-License-Identifier: Apache-2.0
"""Calls that wait, over a tier whose every read and write ends as the test says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from disk_blocks import FINGERPRINT, SLOT, bytes_of, capacity_of, names
from memory_tier import MemoryTier

from flexkv.tiers import blocking
from flexkv.tiers.blocking import BlockingTier
from flexkv.tiers.disk import open_disk_tier
from flexkv.tiers.job import Outcome

PATIENCE = 60.0
BUFFERS = 4


class Pages:
    """A caller's memory: a page for each position of a call."""

    def __init__(self, pages: Sequence[bytes]) -> None:
        self.pages = list(pages)

    def take(self, position: int, block: memoryview) -> None:
        self.pages[position] = bytes(block)

    def fill(self, position: int, block: memoryview) -> None:
        block[:] = self.pages[position]


def full(keys: Sequence[bytes]) -> Pages:
    return Pages([bytes_of(key) for key in keys])


def empty(keys: Sequence[bytes]) -> Pages:
    return Pages([b""] * len(keys))


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> MemoryTier:
    monkeypatch.setattr(blocking, "BUFFER_BYTES", BUFFERS * SLOT)
    return MemoryTier()


@pytest.fixture
def caller() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def patient(tier: MemoryTier) -> BlockingTier:
    return BlockingTier(tier, SLOT, PATIENCE, PATIENCE)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.0002)


def keep(tier: MemoryTier, keys: Sequence[bytes]) -> None:
    tier.blocks |= {key: bytes_of(key) for key in keys}


def under_way(tier: MemoryTier) -> list[bytes]:
    return sorted(task.key for task in tier.tasks)


def end_all(blocks: BlockingTier, tier: MemoryTier, call: Future[int]) -> int:
    """Let all reads and writes end as they come; returns what the call does."""

    def step() -> bool:
        with blocks._lock:
            tier.end_all()
        return call.done()

    until(step)
    return call.result()


def test_a_real_disk_gives_back_more_blocks_than_there_are_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "BUFFER_BYTES", BUFFERS * SLOT)
    keys = names(5 * BUFFERS)
    disk = open_disk_tier([str(tmp_path)], FINGERPRINT, SLOT, capacity_of(64))
    blocks = BlockingTier(disk, SLOT, PATIENCE, PATIENCE)
    assert blocks.write(keys, full(keys).fill) == len(keys)
    pages = empty(keys)
    assert blocks.read(keys, pages.take) == len(keys)
    assert pages.pages == full(keys).pages
    assert blocks.close()


def test_only_blocks_that_are_missing_are_written(
    tier: MemoryTier, caller: ThreadPoolExecutor
) -> None:
    keys = names(3)
    keep(tier, [keys[1]])
    blocks = patient(tier)
    call = caller.submit(blocks.write, keys, full(keys).fill)
    until(lambda: len(tier.tasks) == 2)
    assert under_way(tier) == [keys[0], keys[2]]
    assert end_all(blocks, tier, call) == 3
    assert tier.blocks == {key: bytes_of(key) for key in keys}


def test_a_read_ends_at_the_first_block_that_fails(
    tier: MemoryTier, caller: ThreadPoolExecutor
) -> None:
    keys = names(8)
    keep(tier, keys)
    blocks, pages = patient(tier), empty(keys)
    asked: list[bytes] = []
    read = tier.read

    def noted(wanted: Sequence[bytes], *rest: Any) -> int:
        asked.extend(wanted)
        return read(wanted, *rest)

    tier.read = noted  # type: ignore[method-assign]
    call = caller.submit(blocks.read, keys, pages.take)
    until(lambda: len(tier.tasks) == BUFFERS)
    with blocks._lock:
        tier.end(tier.of(keys[2]), Outcome.DAMAGED)
        tier.end(tier.of(keys[3]))
    until(lambda: pages.pages[3] != b"")
    assert not call.done()  # what lies before it may still come
    with blocks._lock:
        tier.end(tier.of(keys[1]))
        tier.end(tier.of(keys[0]))
    assert call.result(PATIENCE) == 2
    assert pages.pages[:2] == [bytes_of(key) for key in keys[:2]]
    assert asked == keys[:BUFFERS]


def test_a_write_ends_at_the_first_block_that_is_dropped(
    tier: MemoryTier, caller: ThreadPoolExecutor
) -> None:
    keys = names(6)
    blocks = patient(tier)
    call = caller.submit(blocks.write, keys, full(keys).fill)
    until(lambda: len(tier.tasks) == BUFFERS)
    tier.full = True
    assert end_all(blocks, tier, call) == BUFFERS


@pytest.mark.parametrize("call_seconds", [0.0, PATIENCE], ids=["in all", "quiet"])
def test_a_read_that_hangs_is_given_up_and_touches_nothing_later(
    tier: MemoryTier, call_seconds: float
) -> None:
    keys = names(2)
    keep(tier, keys)
    quiet = 0.0 if call_seconds else PATIENCE
    blocks, pages = BlockingTier(tier, SLOT, quiet, call_seconds), empty(keys)

    def hang(*_: object) -> None:
        for task in tier.tasks:
            task.begun = True

    tier.cancel = hang  # type: ignore[assignment]
    assert blocks.read(keys, pages.take) == 0
    assert under_way(tier) == keys
    assert len(blocks._reading.free) == BUFFERS - 2
    tier.end_all()
    assert blocks.contains(keys) == [True, True]
    assert pages.pages == [b"", b""]
    assert len(blocks._reading.free) == BUFFERS


def test_a_write_that_hangs_keeps_its_own_bytes(tier: MemoryTier) -> None:
    keys, pages = names(1), full(names(1))
    blocks = BlockingTier(tier, SLOT, 0.0, 0.0)
    tier.cancel = lambda ticket: None  # type: ignore[method-assign]
    assert blocks.write(keys, pages.fill) == 0
    pages.pages[0] = b"another page is here now".ljust(SLOT)
    tier.end_all()
    assert tier.blocks == {keys[0]: bytes_of(keys[0])}


def test_what_has_not_begun_of_a_given_up_call_does_not_begin(tier: MemoryTier) -> None:
    keys = names(3)
    keep(tier, keys)
    blocks = BlockingTier(tier, SLOT, 0.0, PATIENCE)
    assert blocks.read(keys, empty(keys).take) == 0
    assert tier.tasks == []


def test_two_callers_get_each_what_is_theirs(tier: MemoryTier, caller: ThreadPoolExecutor) -> None:
    theirs, ours = names(6), names(6, first=6)
    keep(tier, theirs)
    blocks, pages = patient(tier), empty(theirs)
    read = caller.submit(blocks.read, theirs, pages.take)
    write = caller.submit(blocks.write, ours, full(ours).fill)
    assert end_all(blocks, tier, read) == 6
    assert end_all(blocks, tier, write) == 6
    assert pages.pages == full(theirs).pages
    assert tier.blocks == {key: bytes_of(key) for key in theirs + ours}
    assert len(blocks._reading.free) == len(blocks._writing.free) == BUFFERS


def test_buffers_come_back_from_a_caller_that_fails(tier: MemoryTier) -> None:
    blocks = patient(tier)

    def fail(position: int, block: memoryview) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        blocks.write(names(2), fail)
    assert len(blocks._writing.free) == BUFFERS


def test_buffers_come_back_from_a_caller_that_fails_to_take_a_block(
    tier: MemoryTier, caller: ThreadPoolExecutor
) -> None:
    """Otherwise, later reads would wait in vain for a free one."""
    keys = names(3)
    keep(tier, keys)
    blocks = patient(tier)

    def fail(position: int, block: memoryview) -> None:
        raise MemoryError

    call = caller.submit(blocks.read, keys, fail)
    with pytest.raises(MemoryError):
        end_all(blocks, tier, call)
    assert blocks.contains(keys) == [True] * 3
    assert len(blocks._reading.free) == BUFFERS


def test_a_closed_tier_has_nothing(tier: MemoryTier) -> None:
    keys = names(1)
    keep(tier, keys)
    blocks = patient(tier)
    assert blocks.close()
    assert blocks.close()
    assert blocks.contains(keys) == [False]
    assert blocks.read(keys, empty(keys).take) == 0
    assert blocks.write(names(2), full(names(2)).fill) == 0
    blocks.clear()
    assert list(tier.blocks) == keys


def test_closing_ends_a_call_that_waits(tier: MemoryTier, caller: ThreadPoolExecutor) -> None:
    keys = names(1)
    keep(tier, keys)
    blocks = patient(tier)
    call = caller.submit(blocks.read, keys, empty(keys).take)
    until(lambda: bool(tier.tasks))
    assert blocks.close()
    assert call.result(PATIENCE) == 0


def test_clearing_forgets_all(tier: MemoryTier) -> None:
    keys = names(1)
    keep(tier, keys)
    blocks = patient(tier)
    blocks.clear()
    assert blocks.contains(keys) == [False]
