# SPDX-License-Identifier: Apache-2.0
"""Orders reach whoever copies, reads or writes, and are carried out as often as ordered."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.campaign.faults import Kind, OrderBook, Steering
from integration.campaign.steered_files import SteeredFiles

PAGE = 4096
CONTENT = bytes(range(256)) * (4 * PAGE // 256)


@pytest.fixture
def book(tmp_path: Path) -> OrderBook:
    return OrderBook(tmp_path / "orders")


@pytest.fixture
def steering(book: OrderBook, tmp_path: Path) -> Steering:
    return Steering(tmp_path / "orders")


@pytest.fixture
def files(steering: Steering) -> SteeredFiles:
    return SteeredFiles(steering)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "content"
    path.write_bytes(CONTENT)
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


def read(files: SteeredFiles, file: int, size: int = 4 * PAGE) -> tuple[int, bytes]:
    buffer = bytearray(size)
    count = files.preadv(file, [memoryview(buffer)], 0)
    return count, bytes(buffer)


def test_an_order_is_carried_out_as_often_as_it_says(book: OrderBook, steering: Steering) -> None:
    order = book.give(Kind.READ_ERROR, 2, 60)
    drawn = [steering.draw({Kind.READ_ERROR, Kind.READ_SHORT}, blocks) for blocks in (1, 3, 1)]
    assert drawn == [Kind.READ_ERROR, Kind.READ_ERROR, None]
    assert [(hit.number, hit.kind, hit.blocks) for hit in book.hits()] == [
        (order.number, Kind.READ_ERROR, 1),
        (order.number, Kind.READ_ERROR, 3),
    ]
    assert steering.draw({Kind.WRITE_ERROR}, 1) is None


def test_an_order_ends_by_time_and_when_it_is_withdrawn(
    book: OrderBook, steering: Steering
) -> None:
    book.give(Kind.DISK_HANGS, 1, 0.0)
    assert not steering.holds(Kind.DISK_HANGS)
    book.give(Kind.DISK_HANGS, 1, 60)
    assert steering.holds(Kind.DISK_HANGS)
    book.withdraw()
    assert not steering.holds(Kind.DISK_HANGS)
    assert steering.draw({Kind.DISK_HANGS}, 1) is None


def test_reads_go_wrong_as_ordered(book: OrderBook, files: SteeredFiles, file: int) -> None:
    assert read(files, file) == (len(CONTENT), CONTENT)
    for kind in (Kind.READ_ERROR, Kind.READ_DENIED):
        book.give(kind, 1, 60)
        with pytest.raises(OSError, match=r"error|denied"):
            read(files, file)
    book.give(Kind.READ_SHORT, 1, 60)
    assert read(files, file) == (PAGE, CONTENT[:PAGE] + bytes(3 * PAGE))
    book.give(Kind.READ_NOTHING, 1, 60)
    assert read(files, file)[0] == 0
    book.give(Kind.READ_FLIPPED, 1, 60)
    count, flipped = read(files, file)
    assert count == len(CONTENT)
    assert flipped != CONTENT
    assert read(files, file) == (len(CONTENT), CONTENT)


def test_a_read_of_a_table_concerns_no_block(
    book: OrderBook, files: SteeredFiles, file: int, tmp_path: Path
) -> None:
    (tmp_path / "content").rename(tmp_path / "table")
    (tmp_path / "table").unlink()  # as under a running engine
    book.give(Kind.READ_ERROR, 1, 60)
    with pytest.raises(OSError, match="error"):
        read(files, file)
    assert [hit.blocks for hit in book.hits()] == [0]


def test_writes_go_wrong_as_ordered(book: OrderBook, files: SteeredFiles, file: int) -> None:
    new = [memoryview(bytes(2 * PAGE)), memoryview(bytes(2 * PAGE))]
    for kind in (Kind.WRITE_ERROR, Kind.WRITE_FULL):
        book.give(kind, 1, 60)
        with pytest.raises(OSError, match=r"error|space"):
            files.pwritev(file, new, 0)
    book.give(Kind.WRITE_LOST, 1, 60)
    assert files.pwritev(file, new, 0) == 4 * PAGE
    assert os.pread(file, len(CONTENT), 0) == CONTENT
    book.give(Kind.WRITE_HALF, 1, 60)
    assert files.pwritev(file, new, 0) == 4 * PAGE
    assert os.pread(file, len(CONTENT), 0) == bytes(PAGE) + CONTENT[PAGE:]
    assert files.pwritev(file, new, 0) == 4 * PAGE
    assert os.pread(file, len(CONTENT), 0) == bytes(4 * PAGE)


@pytest.mark.parametrize(
    "call",
    [
        lambda files, file: files.preadv(file, [memoryview(bytearray(PAGE))], 0),
        lambda files, file: files.pwritev(file, [memoryview(bytes(PAGE))], 0),
    ],
)
def test_a_disk_that_hangs_goes_on_when_the_order_ends(
    book: OrderBook, files: SteeredFiles, file: int, call: Callable[[SteeredFiles, int], int]
) -> None:
    for seconds in (0.3, 3, 30):  # it may have ended before a slow machine makes the call
        order = book.give(Kind.DISK_HANGS, 1 << 30, seconds)
        assert call(files, file) == PAGE
        if book.hits():
            break
    assert time.monotonic() >= order.until
    assert [hit.kind for hit in book.hits()] == [Kind.DISK_HANGS]
