# SPDX-License-Identifier: Apache-2.0
"""What each copy of a rank follows: the engine's work when the copy was ordered."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.orders import EVERYTHING, CopyOrder, StepOrders
from flexkv.engine.worker.layers import LayerParts
from flexkv.engine.worker.pages import PlacedPages
from flexkv.engine.worker.rank_copies import BlockSizes, RankCopies
from flexkv.engine.worker.worker import WorkerSide
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat, KVLayout, TensorView
from flexkv.types.mover import MARKS, Direction, Status

PLANES = 4
VIEWS = [TensorView(f"l{i}", 4096 * (1 + i), (4, 1024), (1024, 1), 1) for i in range(PLANES)]
LAYOUT = KVLayout.from_tensors(VIEWS, 4)
PAGES = PlacedPages(LAYOUT, LAYOUT.place(1), range(PLANES), 0, range(PLANES))
PARTS = LayerParts((range(2), range(2, PLANES)), {"first": 0, "last": 1})


class Submitted(NamedTuple):
    direction: Direction
    blocks: list[int]
    after: int
    planes: range | None
    mark: int = 0


class RecordingMover:
    """Copies nothing; records what is asked of it."""

    def __init__(self) -> None:
        self.submitted: list[Submitted] = []
        self.held: list[tuple[int, int]] = []
        self.marked: list[int] = []
        self.waited: list[int] = []

    def submit(
        self,
        direction: Direction,
        blocks: Sequence[int],
        offsets: Sequence[int],
        after: int = 0,
        flag_address: int = 0,
        *,
        planes: range | None = None,
        mark: int = 0,
    ) -> int:
        self.submitted.append(Submitted(direction, list(blocks), after, planes, mark))
        return len(self.submitted)

    def mark(self, stream: int) -> int:
        if stream < 0:
            raise ValueError("refused by the test")
        self.marked.append(stream)
        return len(self.marked)

    def hold(self, ticket: int, stream: int) -> Status:
        self.held.append((ticket, stream))
        return Status.PENDING

    def poll(self, ticket: int) -> Status:
        return Status.DONE

    def wait(self, ticket: int, timeout: float) -> Status:
        self.waited.append(ticket)
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


def make_side(
    arena: Arena, mover: RecordingMover, work_so_far: Callable[[], int], *, alone: bool = True
) -> WorkerSide:
    session: Any = OnlyArena(arena)
    copies = RankCopies(
        arena,
        mover,
        0,
        block_step=1024,
        sizes=BlockSizes([PAGES]),
        work_so_far=work_so_far,
        boundary=ErrorBoundary(),
    )
    return WorkerSide(session, copies, PARTS, alone=alone)


def test_every_copy_follows_the_work_at_the_time_of_its_order(arena: Arena) -> None:
    """Were the order of a load asked for after the forward, it would wait for the forward; were a
    store's asked for before, it would copy what is not computed yet."""
    mover = RecordingMover()
    work = itertools.count(101)  # each question another handle
    side = make_side(arena, mover, lambda: next(work))
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


def run_steps(side: WorkerSide, steps: range) -> None:
    """Steps without copies."""
    for number in steps:
        orders = StepOrders(step=number, has_forward=True)
        side.start_loads(orders)
        side.start_stores(orders)
        side.finished(orders)


def marks_of_loads(side: WorkerSide, mover: RecordingMover, step: int, *follows: int) -> list[int]:
    """The marks that loads have in a step, each of which follows another one."""
    orders = StepOrders(step=step, has_forward=True)
    for number, followed in enumerate(follows):
        order = CopyOrder(10 * step + number, number, [number], [number], follows=followed)
        if number % 2:
            orders.layerwise.append(order)
        else:
            orders.loads[f"{step}-{number}"] = order
    before = len(mover.submitted)
    side.start_loads(orders)
    marks = {each.blocks[0]: each.mark for each in mover.submitted[before:]}
    side.finished(orders)
    return [marks[number] for number in range(len(follows))]


def test_a_load_follows_the_first_mark_behind_its_step(arena: Arena) -> None:
    mover = RecordingMover()
    side = make_side(arena, mover, lambda: 7)
    run_steps(side, range(1, 4))
    assert mover.marked == [7, 7, 7]
    # The marks are behind steps 1 to 3. Step 4 has begun perhaps, and has none.
    follows = [0, 1, 2, 3, 4, EVERYTHING]
    assert marks_of_loads(side, mover, 4, *follows) == [1, 1, 2, 3, 0, 0]
    # Where steps got no mark, the next one is behind them, too.
    run_steps(side, range(8, 9))
    assert marks_of_loads(side, mover, 9, *range(3, 10)) == [3, 4, 5, 5, 5, 5, 0]


def test_an_old_step_is_behind_the_oldest_mark(arena: Arena) -> None:
    mover = RecordingMover()
    side = make_side(arena, mover, lambda: 7)
    run_steps(side, range(1, MARKS + 4))
    assert marks_of_loads(side, mover, MARKS + 4, 1, 4, 5) == [4, 4, 5]


@pytest.mark.parametrize(
    ("alone", "stream", "step"),
    [(False, 7, 1), (True, 0, 1), (True, 7, 0), (True, -1, 1)],
    ids=["another-connector", "on-cpus", "unknown-uses", "refused"],
)
def test_without_marks_loads_follow_everything(
    arena: Arena, alone: bool, stream: int, step: int
) -> None:
    mover = RecordingMover()
    side = make_side(arena, mover, lambda: stream, alone=alone)
    side.finished(StepOrders(step=step, has_forward=True))
    side.start_loads(StepOrders(loads={"one": CopyOrder(1, 0, [5], [0], follows=0)}))
    assert mover.marked == []
    assert mover.submitted == [Submitted(Direction.LOAD, [5], stream, None)]


def test_a_step_without_work_waits_for_the_last_part_of_a_load(arena: Arena) -> None:
    """The engine computes the request in the next step, if the load has ended in this one."""
    mover = RecordingMover()
    side = make_side(arena, mover, lambda: 0)
    side.start_loads(StepOrders(loads={"one": CopyOrder(1, 0, [5], [0], last=False)}))
    orders = StepOrders(loads={"one": CopyOrder(2, 1, [6], [1])})
    side.start_loads(orders)
    side.finished(orders)
    assert side.take_finished() == {"one"}
    assert mover.waited == [2]


def test_all_copies_end_before_the_engine_takes_its_pages_away(arena: Arena) -> None:
    mover = RecordingMover()
    side = make_side(arena, mover, lambda: 0)
    orders = StepOrders(
        loads={"one": CopyOrder(1, 0, [5], [0])},
        layerwise=[CopyOrder(2, 1, [6], [1])],
        stores=[CopyOrder(3, 2, [7], [2])],
        has_forward=True,
    )
    side.start_loads(orders)
    side.start_stores(orders)
    side.start_loads(StepOrders(layerwise=[CopyOrder(4, 3, [8], [3])]))
    tickets = set(range(1, len(mover.submitted) + 1))
    side.suspend()
    assert set(mover.waited) == tickets


def test_a_copy_that_is_ordered_without_pages_fails(arena: Arena) -> None:
    mover = RecordingMover()
    side = make_side(arena, mover, lambda: 0)
    side.suspend()
    orders = StepOrders(
        loads={"one": CopyOrder(1, 0, [5], [0])},
        layerwise=[CopyOrder(2, 1, [6], [1])],
        stores=[CopyOrder(3, 2, [7], [2])],
        has_forward=True,
    )
    side.start_loads(orders)
    side.start_stores(orders)
    side.finished(orders)
    assert mover.submitted == []
    assert side.take_finished() == {"one"}
    assert side.take_bad_blocks() == {5, 6}
    assert [arena.board.status(cell) for cell in range(3)] == [Status.FAILED] * 3
    side.resume()
    side.start_stores(StepOrders(stores=[CopyOrder(4, 0, [7], [2])]))
    assert len(mover.submitted) == 1
