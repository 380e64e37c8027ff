# SPDX-License-Identifier: Apache-2.0
"""Copies between the pages of two pools and slots: the right bytes, one status, one flag."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexkv.engine.worker.pool_mover import NumberedPages, PoolMover
from flexkv.layout import PlacedPlane
from flexkv.types.mover import MARKS, Direction, Status
from flexkv_kernels import CpuMover

LOAD, STORE = Direction.LOAD, Direction.STORE
SLOT, SLOTS, PLANE = 256, 12, 64
PAGES, PLANES = (7, 5), (3, 2)
"""Pages and planes of each pool. Those of the second pool have blocks from 7 on."""
PATIENCE_SECONDS = 60.0


class World:
    """Two pools with their movers, and an arena."""

    def __init__(self) -> None:
        self.arena = np.zeros(SLOTS * SLOT, dtype=np.uint8)
        shapes = zip(PLANES, PAGES, strict=True)
        self.pools = [np.zeros((planes, pages, PLANE), dtype=np.uint8) for planes, pages in shapes]
        self.movers = [self._mover(pool) for pool in self.pools]
        self.mover = PoolMover(
            [
                NumberedPages(self.movers[0], 0, range(3)),
                NumberedPages(self.movers[1], PAGES[0], range(3, 5)),
            ]
        )

    def page(self, block: int) -> np.ndarray[Any, Any]:
        """All planes of a block."""
        if block < PAGES[0]:
            return self.pools[0][:, block]
        return self.pools[1][:, block - PAGES[0]]

    def slot(self, number: int, planes: int) -> np.ndarray[Any, Any]:
        start = number * SLOT
        return self.arena[start : start + planes * PLANE].reshape(planes, PLANE)

    def copy(
        self, direction: Direction, blocks: Sequence[int], slots: Sequence[int], **options: Any
    ) -> Status:
        offsets = array("Q", [slot * SLOT for slot in slots])
        ticket = self.mover.submit(direction, array("Q", blocks), offsets, **options)
        return self.mover.wait(ticket, PATIENCE_SECONDS)

    def _mover(self, pool: np.ndarray[Any, Any]) -> CpuMover:
        planes = [
            PlacedPlane(plane.ctypes.data, PLANE, 1, PLANE, PLANE, number * PLANE)
            for number, plane in enumerate(pool)
        ]
        return CpuMover(planes, pool.shape[1], self.arena.ctypes.data, self.arena.nbytes, 1)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.mover.close()


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.permutations(range(SLOTS)), st.permutations(range(SLOTS)), st.integers(0, SLOTS))
def test_each_block_comes_back_from_its_slot(
    world: World, blocks: list[int], slots: list[int], count: int
) -> None:
    chosen, places = blocks[:count], slots[:count]
    rng = np.random.default_rng(1)
    for pool in world.pools:
        pool[:] = rng.integers(1, 256, pool.shape, dtype=np.uint8)
    world.arena[:] = 0
    kept = [world.page(block).copy() for block in range(SLOTS)]
    assert world.copy(STORE, chosen, places) is Status.DONE
    for block, slot in zip(chosen, places, strict=True):
        assert np.array_equal(world.slot(slot, len(kept[block])), kept[block])
    for slot in slots[count:]:
        assert not world.slot(slot, 4).any()
    for pool in world.pools:
        pool[:] = 0
    assert world.copy(LOAD, chosen, places) is Status.DONE
    for block in range(SLOTS):
        wanted = kept[block] if block in chosen else np.zeros_like(kept[block])
        assert np.array_equal(world.page(block), wanted)


def test_a_part_has_its_planes_of_its_pool(world: World) -> None:
    world.arena[:] = 9
    assert world.copy(LOAD, [2, 8], [0, 1], planes=range(2, 4)) is Status.DONE
    assert [bool(plane.any()) for plane in world.page(2)] == [False, False, True]
    assert [bool(plane.any()) for plane in world.page(8)] == [True, False]
    # Planes that none of the blocks has.
    assert world.copy(LOAD, [3], [0], planes=range(3, 5)) is Status.DONE
    assert not world.page(3).any()


@pytest.mark.parametrize("blocks", [[1], [8], [1, 8], []], ids=str)
def test_the_flag_gets_the_final_status(world: World, blocks: list[int]) -> None:
    flag = ctypes.c_uint32(Status.PENDING)
    slots = range(len(blocks))
    assert world.copy(STORE, blocks, slots, flag_address=ctypes.addressof(flag)) is Status.DONE
    assert flag.value == Status.DONE


def test_a_refused_share_fails_the_transfer_once_the_others_have_ended(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    flag = ctypes.c_uint32(Status.PENDING)
    world.movers[1].close()
    address = ctypes.addressof(flag)
    assert world.copy(STORE, [1, 8], [0, 1], flag_address=address) is Status.FAILED
    assert flag.value == Status.FAILED
    assert world.copy(STORE, [1, 8], [0, 1], flag_address=address) is Status.FAILED
    (line,) = (each.getMessage() for each in caplog.records)
    assert "closed" in line
    with pytest.raises(RuntimeError):
        world.copy(STORE, [8], [1])
    with pytest.raises(ValueError, match="block 92 is out of range"):
        world.copy(STORE, [99], [1])
    assert world.copy(STORE, [1], [0]) is Status.DONE


def test_close_tells_how_each_transfer_ended(world: World) -> None:
    flags = [ctypes.c_uint32(Status.PENDING) for _ in range(50)]
    for flag in flags:
        world.mover.submit(STORE, [1, 8], [0, SLOT], flag_address=ctypes.addressof(flag))
    world.mover.close()
    assert Status.PENDING not in {flag.value for flag in flags}


class Recorder:
    """A mover that records what it is asked, and ends when it is told to."""

    def __init__(self) -> None:
        self.marks: list[int] = []
        self.asked: list[int] = []
        self.status = Status.PENDING

    def mark(self, stream: int) -> int:
        self.marks.append(stream)
        return len(self.marks) + 100

    def submit(self, *_: Any, mark: int = 0, **__: Any) -> int:
        self.asked.append(mark)
        return len(self.asked)

    def poll(self, ticket: int) -> Status:
        return self.status

    def hold(self, ticket: int, stream: int) -> Status:
        return self.status

    def wait(self, ticket: int, timeout: float) -> Status:
        return self.status

    def copy_seconds(self, ticket: int) -> float | None:
        return 0.5 if self.status is Status.DONE else None


def test_a_transfer_ends_with_its_last_share() -> None:
    movers: list[Any] = [Recorder(), Recorder()]
    mover = PoolMover(
        [NumberedPages(movers[0], 0, range(1)), NumberedPages(movers[1], 7, range(1, 2))]
    )
    ticket = mover.submit(LOAD, [1, 8], [0, SLOT])
    movers[0].status = Status.DONE
    assert mover.poll(ticket) is mover.hold(ticket, 0) is mover.wait(ticket, 0) is Status.PENDING
    assert mover.copy_seconds(ticket) is None
    movers[1].status = Status.DONE
    assert mover.hold(ticket, 0) is Status.DONE
    assert mover.copy_seconds(ticket) == 0.5
    movers[1].status = Status.FAILED
    assert mover.poll(ticket) is Status.DONE  # as it was
    assert mover.poll(mover.submit(LOAD, [1, 8], [0, SLOT])) is Status.FAILED


def test_all_movers_follow_a_mark() -> None:
    movers: list[Any] = [Recorder(), Recorder()]
    mover = PoolMover(
        [NumberedPages(movers[0], 0, range(1)), NumberedPages(movers[1], 7, range(1, 2))]
    )
    movers[1].mark(5)  # so that their numbers differ
    marks = [mover.mark(9) for _ in range(MARKS)]
    assert marks == list(range(1, MARKS + 1))
    mover.submit(LOAD, [1, 8], [0, SLOT], mark=marks[0])
    assert (movers[0].asked, movers[1].asked) == ([101], [102])
    mover.mark(9)
    with pytest.raises(ValueError, match="mark 1"):
        mover.submit(LOAD, [1, 8], [0, SLOT], mark=marks[0])
