# SPDX-License-Identifier: Apache-2.0
"""What each copy of a rank follows: the engine's work when the copy was ordered."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from flexkv.adapter.guard import Edge
from flexkv.adapter.layers import LayerParts
from flexkv.adapter.orders import CopyOrder, StepOrders
from flexkv.adapter.worker import WorkerSide
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.mover import Direction, Status

PLANES = 4
PARTS = LayerParts((range(2), range(2, PLANES)), {"first": 0, "last": 1})


class Submitted(NamedTuple):
    direction: Direction
    blocks: list[int]
    after: int
    planes: range | None


class RecordingMover:
    """Copies nothing; records what is asked of it."""

    def __init__(self) -> None:
        self.submitted: list[Submitted] = []
        self.held: list[tuple[int, int]] = []

    def submit(
        self,
        direction: Direction,
        blocks: Sequence[int],
        offsets: Sequence[int],
        after: int = 0,
        flag_address: int = 0,
        *,
        planes: range | None = None,
    ) -> int:
        self.submitted.append(Submitted(direction, list(blocks), after, planes))
        return len(self.submitted)

    def hold(self, ticket: int, stream: int) -> Status:
        self.held.append((ticket, stream))
        return Status.PENDING

    def poll(self, ticket: int) -> Status:
        return Status.DONE

    def wait(self, ticket: int, timeout: float) -> Status:
        return Status.DONE

    def copy_seconds(self, ticket: int) -> float | None:
        return None

    def bytes_by_way(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


class OnlyArena(NamedTuple):
    """What `WorkerSide` uses of a session meanwhile."""

    arena: Arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(ArenaSpec(BlockFormat(1, (4096,)), 8))
    yield arena
    arena.close()


def test_every_copy_follows_the_work_at_the_time_of_its_order(arena: Arena) -> None:
    """Were the order of a load asked for after the forward, it would wait for the forward; were a
    store's asked for before, it would copy what is not computed yet."""
    mover = RecordingMover()
    work = itertools.count(101)  # each question another handle
    session: Any = OnlyArena(arena)
    side = WorkerSide(
        session,
        mover,
        0,
        block_step=1024,
        plane_bytes=[1024] * PLANES,
        stored=range(PLANES),
        parts=PARTS,
        work_so_far=lambda: next(work),
        edge=Edge(),
    )
    orders = StepOrders(
        loads={"one": CopyOrder(1, 0, [5], [0]), "two": CopyOrder(2, 1, [6], [1])},
        layerwise=[CopyOrder(3, 2, [7], [2])],
        stores=[CopyOrder(4, 3, [1], [3]), CopyOrder(5, 4, [2], [4])],
        has_forward=True,
    )
    side.start_loads(orders)
    load = Direction.LOAD
    loads = [
        Submitted(load, [7], 101, PARTS.planes[0]),
        Submitted(load, [7], 101, PARTS.planes[1]),
        Submitted(load, [5], 101, None),
        Submitted(load, [6], 101, None),
    ]
    assert mover.submitted == loads
    side.wait_for_layer("first")
    assert mover.held == [(1, 102)]
    side.wait_for_layer("last")
    assert mover.held == [(1, 102), (2, 103)]
    assert mover.submitted == loads
    side.start_stores(orders)
    store = Direction.STORE
    assert mover.submitted[len(loads) :] == [
        Submitted(store, [1], 104, None),
        Submitted(store, [2], 104, None),
    ]
