# SPDX-License-Identifier: Apache-2.0
"""Every section that copies, on the emulated device: it says nothing of speed, but all must run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from flexkv.types.mover import Direction
from flexkv_kernels import Calibration, CudaChoice, CudaMode, cuda_calibration
from integration.bench.rows import Goal, Row
from integration.gpu import (
    beside,
    both_ways,
    contenders,
    goals,
    journal,
    one_way,
    smoke,
    sweep,
    works,
)
from integration.gpu.journal import Journal
from integration.gpu.results import Log
from integration.gpu.section import ON_DEVICE, SECTIONS, copy_rows, log_for, write_rows
from integration.gpu.shapes import LAYOUTS, SHAPES, Shape
from integration.gpu.sizes import Sizes
from integration.gpu.tests.emulated import TINY, EmulatedGpu
from kernels.tests.conftest import MakeFake, make_fake  # noqa: F401  (a fixture)
from kernels.tests.fake_cuda.fake_driver import FakeCuda


@pytest.fixture
def fake(make_fake: MakeFake) -> FakeCuda:  # noqa: F811
    return make_fake()


@pytest.fixture
def gpu(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[EmulatedGpu]:
    monkeypatch.setattr(cuda_calibration, "TRANSFER_BYTES", 2 << 20)
    monkeypatch.setattr("flexkv_kernels.cuda_measure.REPEATS", 1)
    ways = {way.mode: way for way in cuda_calibration.CANDIDATES}
    monkeypatch.setattr(cuda_calibration, "CANDIDATES", tuple(ways.values()))
    monkeypatch.setattr(cuda_calibration, "RINGS", cuda_calibration.RINGS[-1:])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    device = EmulatedGpu(fake)
    yield device
    device.stop()


def measured(name: str, gpu: EmulatedGpu, log: Log | None = None, sizes: Sizes = TINY) -> list[Row]:
    return list(copy_rows(name, gpu, sizes, log or Log()))


def with_goal(rows: list[Row], *wanted: Goal) -> int:
    return sum(row.goal in wanted for row in rows)


def test_the_sweep_has_a_row_for_each_way_and_direction(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "SHAPES", (SHAPES[0], SHAPES[3]))
    monkeypatch.setattr(sweep, "LAYOUTS", LAYOUTS[1:2])
    rows = measured("sweep", gpu)
    found = [row.what for row in rows]
    assert len(set(found)) == len(found)
    assert "sweep, store, 256 B rows, STAGED on 8" in found
    assert "sweep, load, 64 KiB pages, DMA" in found
    assert "sweep, load, one large copy" in found
    assert "sweep, load, Llama 8B, slots of 64 tokens, STAGED on 16" in found
    assert not any("256 B rows, DMA" in what for what in found)
    assert {row.unit for row in rows} == {"GB/s"}
    assert all(row.value > 0 for row in rows)


def test_every_byte_is_right_by_every_way(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke, "SHAPES", SHAPES[::3])
    monkeypatch.setattr(smoke, "LAYOUTS", ())
    log = Log()
    rows = measured("smoke", gpu, log)
    assert [row.value for row in rows] == [0, 0, 0]
    assert with_goal(rows, goals.NO_WRONG_BYTES) == 3
    assert "AUTO, STAGED, KERNEL, TMA, DMA" in rows[-1].detail
    assert sum("calibrated to load" in note for note in log.notes) == 3


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_byte_of_layouts_is_right(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch, layout: Shape
) -> None:
    monkeypatch.setattr(smoke, "SHAPES", ())
    monkeypatch.setattr(smoke, "LAYOUTS", (layout,))
    (row,) = measured("smoke", gpu)
    assert (row.value, row.goal) == (0, goals.NO_WRONG_BYTES)
    assert row.what == f"{layout.name}: wrong bytes of all ways"


def test_a_kernel_that_copies_nothing_is_a_missed_goal(
    gpu: EmulatedGpu, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke, "SHAPES", SHAPES[:1])
    monkeypatch.setattr(smoke, "LAYOUTS", ())
    fake.idle_kernel("fkv_copy_bulk")
    rows = measured("smoke", gpu)
    missed = [row.what for row in rows if not row.passed]
    assert "256 B rows, TMA: wrong bytes" in missed
    assert "256 B rows: wrong bytes of all ways" in missed


def test_one_way_compares_with_a_large_copy_and_a_loop(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_way, "CONTENDER_RUNS", dict.fromkeys(one_way.CONTENDER_RUNS, 1))
    monkeypatch.setattr(one_way, "CHECKED_BYTES", 1)
    monkeypatch.setattr(one_way, "SHAPES", (SHAPES[0], SHAPES[1], SHAPES[-1]))
    monkeypatch.setattr(one_way, "LAYOUTS", LAYOUTS[2:3])
    log = Log()
    rows = measured("one-way", gpu, log)
    assert with_goal(rows, goals.ONE_WAY_LAYOUTS) == 2
    assert with_goal(rows, goals.ONE_WAY_LONG) == with_goal(rows, goals.ONE_WAY_SHORT) == 2
    what = {row.what for row in rows}
    assert f"load, 4 KiB pages: FlexKV ÷ {contenders.PAGEWISE}" in what
    assert "store, 2 MiB pages: FlexKV, STAGED only ÷ one large copy" in what
    assert not any("wrong bytes" in each for each in what)
    # Triton needs a GPU: that it is missing is said, and hides nothing else.
    assert any(note.startswith(f"no {contenders.TRITON}, 256 B rows") for note in log.notes)


def test_both_ways_have_a_row_for_each_shape(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(both_ways, "SHAPES", SHAPES[::3])
    monkeypatch.setattr(both_ways, "LAYOUTS", LAYOUTS[::3])
    sizes = replace(TINY, blocks=8)  # of the largest, a slot each way
    rows = measured("both-ways", gpu, sizes=sizes)
    assert with_goal(rows, goals.BOTH_WAYS) == len((*SHAPES[::3], *LAYOUTS[::3]))


def test_submits_have_their_rows(gpu: EmulatedGpu) -> None:
    rows = measured("submit", gpu)
    assert with_goal(rows, goals.SUBMIT) == 6
    assert "4,096 pages" in rows[0].what


def test_computations_run_beside_copies(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "BESIDE", beside.BESIDE[2:4])
    log = Log()
    rows = measured("beside", gpu, log)
    counted = 2 * len(works.WORKS) * len(beside.WAYS)
    assert with_goal(rows, goals.COPIES_BESIDE) == with_goal(rows, goals.COMPUTE_BESIDE) == counted
    assert with_goal(rows, goals.MULTIPROCESSORS) == 2
    assert all(row.value > 0 for row in rows if row.goal == goals.COMPUTE_BESIDE)
    assert len({row.what for row in rows}) == len(rows)
    # The row says which kernel it was; here there is only torch's.
    (first, *_) = [row for row in rows if row.what.startswith("attention beside")]
    assert first.detail.startswith(f"{works.TORCH}, causal, bf16, 16 tokens, 32 heads; ")
    missing = [note.partition(":")[0] for note in log.notes]
    assert {"no FlashAttention 3 of vLLM", "no FlashAttention 3"} <= set(missing)
    assert any(note.startswith(f"no {contenders.TRITON}") for note in log.notes)


def test_multiprocessors_are_counted_for_both_directions() -> None:
    def choice(direction: Direction, mode: CudaMode, blocks: int) -> CudaChoice:
        return CudaChoice(direction, 256, 4096, mode, blocks)

    load, store = Direction.LOAD, Direction.STORE
    both = (
        choice(load, CudaMode.KERNEL, 1),
        choice(load, CudaMode.TMA, 4),
        choice(load, CudaMode.STAGED, 16),
        choice(store, CudaMode.STAGED, 57),
    )
    assert beside.multiprocessors(Calibration(choices=both)) == pytest.approx(4 + 57 * 16 / 228)
    assert beside.multiprocessors(Calibration(CudaMode.DMA)) == 0


def test_a_section_goes_on_behind_the_units_that_are_finished(
    gpu: EmulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(both_ways, "SHAPES", SHAPES[:3])
    monkeypatch.setattr(both_ways, "LAYOUTS", LAYOUTS[:1])
    shapes = (*SHAPES[:3], *LAYOUTS[:1])
    path = tmp_path / "rows.jsonl"
    for rows_before_the_end in (3, None):
        with closing(Journal(path)) as file:
            file.machine({"device": "Fake H0"})
            rows = copy_rows("both-ways", gpu, TINY, log_for("both-ways", file))
            if rows_before_the_end is None:
                found = write_rows("both-ways", rows, file)
                continue
            for _, row in zip(range(rows_before_the_end), rows, strict=False):
                file.row("both-ways", row)
            rows.close()  # as a process that is killed: the third unit is not finished
    assert len(found) == len(shapes) - 2
    known = journal.read([path], SECTIONS).sections["both-ways"]
    assert [row.what for row in known.outcome.rows] == [
        f"both ways at once, {shape.name}: FlexKV ÷ two large copies" for shape in shapes
    ]
    assert known.units == {shape.name for shape in shapes}


def test_all_sections_on_the_device_are_tried_here() -> None:
    assert set(ON_DEVICE) == {"sweep", "smoke", "one-way", "both-ways", "beside", "submit"}
