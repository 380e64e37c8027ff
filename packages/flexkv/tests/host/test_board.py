# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv.host.board import CELLS, CompletionBoard, board_bytes
from flexkv.types.mover import Status


def board(ranks: int) -> CompletionBoard:
    return CompletionBoard(memoryview(bytearray(board_bytes(ranks))), ranks, 0)


@given(st.lists(st.sampled_from(Status), min_size=1, max_size=8))
def test_a_transfer_ends_with_its_last_rank_and_fails_with_any(words: list[Status]) -> None:
    table = board(len(words))
    cell = table.acquire()
    assert cell is not None
    for rank, word in enumerate(words):
        table.report(cell, rank, word)
    if Status.PENDING in words:
        expected = Status.PENDING
    elif Status.FAILED in words:
        expected = Status.FAILED
    else:
        expected = Status.DONE
    assert table.status(cell) is expected


def test_a_rank_that_has_stopped_is_told_beside_all_cells() -> None:
    table = board(3)
    cells = [table.acquire() for _ in range(CELLS)]
    assert table.stopped_ranks == []
    table.stop(2)
    assert table.stopped_ranks == [2]
    assert {table.status(cell) for cell in cells if cell is not None} == {Status.PENDING}


def test_cells_are_distinct_and_come_back_cleared() -> None:
    table = board(2)
    cells = [table.acquire() for _ in range(CELLS)]
    assert len(set(cells)) == CELLS
    assert table.acquire() is None
    cell = cells[7]
    assert cell is not None
    table.report(cell, 0, Status.DONE)
    table.report(cell, 1, Status.FAILED)
    table.give_back(cell)
    assert table.acquire() == cell
    assert table.status(cell) is Status.PENDING


def test_reserved_cells_stay_free_for_who_may_take_them() -> None:
    table = board(1)
    reserve = 3
    taken = [table.acquire(reserve) for _ in range(CELLS - reserve)]
    assert None not in taken
    assert table.acquire(reserve) is None
    assert len({table.acquire() for _ in range(reserve)} - {None, *taken}) == reserve
    assert table.acquire() is None


def test_a_rank_reports_to_its_own_word_from_python_and_from_its_mover() -> None:
    memory = bytearray(board_bytes(2))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    table = CompletionBoard(memoryview(memory), 2, address)
    cells = [table.acquire() for _ in range(3)]
    for cell in cells:
        assert cell is not None
        assert table.status(cell) is Status.PENDING
        ctypes.c_uint32.from_address(table.flag_address(cell, 0)).value = Status.DONE
        assert table.status(cell) is Status.PENDING
        table.report(cell, 1, Status.DONE)
        assert table.status(cell) is Status.DONE


def test_words_of_different_cells_and_ranks_do_not_overlap() -> None:
    table = board(3)
    addresses = [table.flag_address(c, r) for c, r in itertools.product(range(CELLS), range(3))]
    assert sorted(addresses) == list(range(0, CELLS * 3 * 4, 4))


def test_a_released_board_cannot_be_used() -> None:
    table = board(1)
    table.release()
    with pytest.raises(ValueError, match="released"):
        table.status(0)
