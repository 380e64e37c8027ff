# SPDX-License-Identifier: Apache-2.0
"""The mover of the campaign, over the real one: what fails leaves wrong bytes behind."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from flexkv.layout import PlacedPlane
from flexkv.types.mover import Direction, Status
from flexkv_kernels import CpuMover
from integration.campaign.faults import Kind, OrderBook, Steering
from integration.campaign.steered_mover import LATE_SECONDS, SteeredMover

BLOCKS, ROW = 4, 256
Memory = npt.NDArray[np.uint8]


class Rig:
    """Pages of two planes, an arena, and a mover between them."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(1)
        self.book = OrderBook(folder)
        self.pages: Memory = rng.integers(0, 256, (2, BLOCKS, ROW), dtype=np.uint8)
        self.arena: Memory = rng.integers(0, 256, (BLOCKS, 2, ROW), dtype=np.uint8)
        self.flag = ctypes.c_uint32(Status.PENDING)
        planes = [
            PlacedPlane(self.pages[i].ctypes.data, ROW, 1, ROW, ROW, i * ROW) for i in range(2)
        ]
        address, size = self.arena.ctypes.data, self.arena.nbytes
        inner = CpuMover(planes, BLOCKS, address, size, 1)
        self.mover = SteeredMover(inner, planes, range(2), address, Steering(folder))

    def copy(self, direction: Direction, block: int) -> int:
        """Block `block` to or from the slot of the same number."""
        self.flag.value = Status.PENDING
        return self.mover.submit(
            direction, [block], [block * 2 * ROW], 0, ctypes.addressof(self.flag)
        )

    def copy_late(self, direction: Direction, block: int, source: Memory | None = None) -> int:
        """As `copy`, for one that must not end at once; `source` changes before it does."""
        begun = time.monotonic()
        ticket = self.copy(direction, block)
        if source is not None:
            source ^= 0xFF
        status = self.mover.poll(ticket)
        late = time.monotonic() - begun >= LATE_SECONDS  # this machine, not the mover
        assert status is Status.PENDING or late
        return ticket

    def finish(self, ticket: int) -> Status:
        while (status := self.mover.wait(ticket, 1.0)) is Status.PENDING:
            pass
        assert self.mover.poll(ticket) is status
        assert self.flag.value == status
        return status

    def same(self, block: int) -> bool:
        """Whether block and slot hold the same bytes."""
        return bool((self.pages[:, block] == self.arena[block]).all())


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.mover.close()


@pytest.mark.parametrize("direction", Direction)
def test_without_orders_it_copies(rig: Rig, direction: Direction) -> None:
    assert rig.finish(rig.copy(direction, 1)) is Status.DONE
    assert rig.same(1)


@pytest.mark.parametrize(
    ("direction", "kind"),
    [(Direction.LOAD, Kind.LOAD_REFUSED), (Direction.STORE, Kind.STORE_REFUSED)],
)
def test_it_refuses(rig: Rig, direction: Direction, kind: Kind) -> None:
    rig.book.give(kind, 1, 60)
    with pytest.raises(ValueError, match="refused"):
        rig.copy(direction, 1)
    assert rig.finish(rig.copy(direction, 1)) is Status.DONE


@pytest.mark.parametrize(
    ("direction", "kind"),
    [(Direction.LOAD, Kind.LOAD_FAILED), (Direction.STORE, Kind.STORE_FAILED)],
)
def test_a_failed_copy_poisons_its_destination_only(
    rig: Rig, direction: Direction, kind: Kind
) -> None:
    pages, arena = rig.pages.copy(), rig.arena.copy()
    rig.book.give(kind, 1, 60)
    ticket = rig.copy_late(direction, 1)
    assert rig.finish(ticket) is Status.FAILED
    loads = direction is Direction.LOAD
    written = rig.pages[:, 1] if loads else rig.arena[1]
    assert (written == 0x41).all()
    others = [0, 2, 3]
    assert (rig.pages[:, others] == pages[:, others]).all()
    assert (rig.arena[others] == arena[others]).all()
    kept, before = (rig.arena, arena) if loads else (rig.pages, pages)
    assert (kept == before).all()


@pytest.mark.parametrize(
    ("direction", "kind"),
    [(Direction.LOAD, Kind.LOAD_LATE), (Direction.STORE, Kind.STORE_LATE)],
)
def test_a_late_copy_copies_what_is_there_then(rig: Rig, direction: Direction, kind: Kind) -> None:
    rig.book.give(kind, 1, 60)
    source = rig.arena[1] if direction is Direction.LOAD else rig.pages[:, 1]
    ticket = rig.copy_late(direction, 1, source)
    assert rig.finish(ticket) is Status.DONE
    assert rig.same(1)


def test_a_lying_copy_says_that_it_is_done(rig: Rig) -> None:
    rig.book.give(Kind.LOAD_WRONG, 1, 60)
    assert rig.finish(rig.copy(Direction.LOAD, 1)) is Status.DONE
    assert not rig.same(1)


def test_close_fails_what_it_holds(rig: Rig) -> None:
    rig.book.give(Kind.STORE_LATE, 1, 60)
    ticket = rig.copy(Direction.STORE, 1)
    rig.mover.close()
    assert rig.mover.poll(ticket) is Status.FAILED
    assert rig.flag.value == Status.FAILED
