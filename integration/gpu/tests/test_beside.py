# SPDX-License-Identifier: Apache-2.0
"""Copies beside a computation: what is pumped, how its speed is taken, and which rows count."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexkv.types.mover import Direction, Status
from flexkv_kernels import CpuMover
from integration.bench.rows import Row
from integration.gpu import goals, pump, works
from integration.gpu.beside import BESIDE, Meanwhile, rows_of
from integration.gpu.pump import Pump, by_mover, groups_of, running
from integration.gpu.results import Log
from integration.gpu.rig import Rig
from integration.gpu.shapes import BLOCK_BYTES, KIB, MIB, Shape, random_order
from integration.gpu.works import Once, Work

SHAPE = Shape(64 * KIB)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with closing(Rig(8, "cpu")) as made:
        yield made


def test_groups_of_the_pump_share_nothing() -> None:
    order = random_order(SHAPE, 64, 0, seed=1)
    groups = groups_of(order)
    blocks = [block for parts in groups.values() for part in parts for block in part.blocks]
    assert sorted(blocks) == list(range(64))
    assert {len(parts) for parts in groups.values()} == {pump.IN_FLIGHT}
    few = groups_of(random_order(SHAPE, 3, 0, seed=1))
    assert [len(part) for parts in few.values() for part in parts] == [1, 1]


def test_pumps_copy_until_they_are_stopped(rig: Rig) -> None:
    arena = rig.arena
    mover = CpuMover(rig.planes(SHAPE), rig.blocks(SHAPE), arena.address, arena.spec.total_bytes, 1)
    groups = groups_of(rig.order(SHAPE))
    copies = {d: by_mover(mover, d, orders) for d, orders in groups.items()}
    with closing(mover), running(copies) as pumps:
        while min(of_direction.copied for of_direction in pumps) < 20 * BLOCK_BYTES:
            assert not any(of_direction.error for of_direction in pumps)
    for of_direction in pumps:
        counts = [copied for _, copied in of_direction.ends]
        assert counts == sorted(set(counts))


def test_an_error_of_a_pump_is_raised_at_the_end() -> None:
    def fail(state: Pump) -> None:
        state.stop.wait(10)
        raise RuntimeError("no copies")

    copies = {Direction.LOAD: fail, Direction.STORE: lambda state: None}
    with pytest.raises(RuntimeError, match="no copies"), running(copies):
        pass


class Stuck:
    """A mover whose transfers fail."""

    def submit(self, *_: object, **__: object) -> int:
        return 1

    def wait(self, ticket: int, timeout: float) -> Status:
        return Status.FAILED


def test_copies_that_fail_are_an_error(rig: Rig) -> None:
    copy = by_mover(Stuck(), Direction.LOAD, groups_of(rig.order(SHAPE))[Direction.LOAD])
    with pytest.raises(RuntimeError, match="a transfer is FAILED"):
        copy(Pump())


def test_the_speed_is_taken_between_ends_of_transfers() -> None:
    ends = [(1.0, 10**9), (2.0, 2 * 10**9), (2.5, 4 * 10**9), (9.0, 5 * 10**9)]
    of_direction = Pump(ends)
    assert of_direction.rate(1.5, 3.0) == pytest.approx(4.0)  # 2 GB in half a second
    assert of_direction.rate(0.0, 9.0) == pytest.approx(0.5)
    # One end alone: what was copied since the last one before, over all the time.
    assert of_direction.rate(5.0, 10.0) == pytest.approx(0.2)
    assert of_direction.rate(3.0, 8.0) == 0.0


def rows(beside: float, slowed: float, way: str = "loads", ours: bool = True) -> Sequence[Row]:
    figures = Meanwhile([50.0], [49.0], [beside], [1e-3], [slowed * 1e-3])
    gpu: Any = None
    work = Work("matrix product", "bf16", 1e12, lambda: None, 1, gpu, gpu)
    return list(rows_of(figures, work, "copies of pages", way, ours=ours))


def test_copies_and_the_computation_have_a_goal_each() -> None:
    speed, slowdown = rows(beside=41.0, slowed=1.01)
    assert (speed.goal, speed.value, speed.passed) == (goals.COPIES_BESIDE, 0.82, True)
    assert (slowdown.goal, slowdown.passed) == (goals.COMPUTE_BESIDE, True)
    assert slowdown.value == pytest.approx(1.01)
    assert "÷ one large copy alone" in speed.what
    assert "÷ two large copies alone" in rows(1.0, 1.0, "both ways")[0].what
    assert speed.detail == "41.00 GB/s ÷ 50.00 GB/s; 49.00 GB/s without it; medians of 1"


def test_a_computation_beside_copies_that_crawl_reaches_no_goal() -> None:
    speed, slowdown = rows(beside=3.0, slowed=1.0)
    assert not speed.passed
    assert slowdown.value == 1.0
    assert not slowdown.passed
    assert slowdown.remark.endswith("does not count: the copies miss >= 0.8 of one large copy")
    both = {verdict.goal: verdict.text for verdict in goals.verdicts([speed, slowdown])}
    assert both[goals.COPIES_BESIDE] == both[goals.COMPUTE_BESIDE] == "missed"
    assert all(row.passed and not row.void for row in rows(3.0, 1.0, ours=False))


def test_shapes_beside_a_computation_are_those_that_matter() -> None:
    assert [shape.name for shape in BESIDE] == [
        "256 B rows",
        "16 KiB pages",
        "Llama 8B",
        "Llama 8B, eighths of the layers",
        "DeepSeek V3, pages of 64 tokens",
    ]
    assert BESIDE[-1].block_bytes > 4 * MIB


def test_the_first_kernel_that_runs_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: torch.Tensor) -> Once:
        raise ImportError("no such module")

    def broken(*_: torch.Tensor) -> Once:
        return lambda: 1 / 0

    def works_here(*_: torch.Tensor) -> Once:
        return lambda: None

    kernels = {"a": missing, "b": broken, "c": works_here, works.TORCH: missing}
    monkeypatch.setattr(works, "KERNELS", kernels)
    query = key = value = torch.zeros(1)
    gpu: Any = SimpleNamespace(synchronize=lambda: None)
    log = Log()
    name, _ = works.first_that_runs(gpu, query, key, value, log)
    assert name == "c"
    assert [note.partition(":")[0] for note in log.notes] == ["no a", "no b"]
    del kernels["c"]
    with pytest.raises(ImportError):
        works.first_that_runs(gpu, query, key, value, log)


def test_torchs_attention_is_causal_and_by_groups_of_heads() -> None:
    query = torch.randn(5, works.HEADS, 8)
    key, value = (torch.randn(5, works.KV_HEADS, 8) for _ in range(2))
    found = works._torch(query, key, value)()
    assert isinstance(found, torch.Tensor)
    head = 9  # of the third group
    scores = query[:, head] @ key[:, 2].T / math.sqrt(8)
    allowed = torch.ones(5, 5).tril().bool()
    expected = scores.masked_fill(~allowed, -math.inf).softmax(-1) @ value[:, 2]
    assert torch.allclose(found[0, head], expected, atol=1e-5)
