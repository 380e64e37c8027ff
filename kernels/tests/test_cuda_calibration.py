# SPDX-License-Identifier: Apache-2.0
"""Choosing the way of each class from measured speeds, and the file that keeps the choice."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import NoReturn

import pytest

from flexkv.engine.worker.layers import split_layers
from flexkv.layout import PlacedPlane
from flexkv_kernels import Calibration, CudaChoice, CudaMode, Direction, calibrated
from flexkv_kernels import cuda_calibration as calibration
from flexkv_kernels.cuda_calibration import choose, choose_ring, classes_of
from flexkv_kernels.cuda_measure import Sample, TransferClass, placed_at, run_lengths
from flexkv_kernels.native_mover import PlaneTuple
from kernels.tests.conftest import MakeFake
from kernels.tests.fake_cuda.fake_driver import OUT_OF_MEMORY, FakeCuda

DMA, KERNEL, TMA, STAGED = list(CudaMode)[1:]
KIB = 1024
HEADS, TOKENS, ROW = 2, 16, 256
PAGE = TOKENS * ROW
LAYERS = 4


def nhd_planes(base: int = 1 << 20) -> list[PlaneTuple]:
    """Rows of two heads side by side, in four layers; in the arena a head's layers are together."""
    return [
        (
            base + layer * (1 << 24) + head * ROW,
            HEADS * PAGE,
            TOKENS,
            HEADS * ROW,
            ROW,
            (head * LAYERS + layer) * PAGE,
        )
        for layer in range(LAYERS)
        for head in range(HEADS)
    ]


PLANES = nhd_planes()
ALL = range(len(PLANES))


@pytest.fixture(autouse=True)
def _few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device is slow."""
    monkeypatch.setattr(calibration, "TRANSFER_BYTES", 128 * KIB)
    monkeypatch.setattr("flexkv_kernels.cuda_measure.REPEATS", 1)


def sample(mode: CudaMode, blocks: int, speed: float, run_bytes: int = 256) -> Sample:
    return Sample(Direction.LOAD, run_bytes, 4096, mode, blocks, speed)


@pytest.mark.parametrize(
    ("samples", "mode", "blocks"),
    [
        ([sample(DMA, 0, 7), sample(STAGED, 1, 40), sample(KERNEL, 8, 35)], STAGED, 1),
        ([sample(STAGED, 1, 40), sample(STAGED, 2, 50), sample(STAGED, 4, 51)], STAGED, 2),
        ([sample(DMA, 0, 49), sample(STAGED, 1, 50)], DMA, 0),
        ([sample(DMA, 0, 48), sample(STAGED, 1, 50)], STAGED, 1),
        ([sample(TMA, 4, 50), sample(KERNEL, 4, 49)], TMA, 4),
    ],
)
def test_the_fastest_is_chosen_and_of_about_equal_ones_the_smallest(
    samples: list[Sample], mode: CudaMode, blocks: int
) -> None:
    for found in (samples, samples[::-1]):
        assert choose(found) == [CudaChoice(Direction.LOAD, 256, 4096, mode, blocks)]


def test_each_class_has_a_choice_of_its_own() -> None:
    samples = [sample(DMA, 0, 7), sample(STAGED, 1, 40), sample(DMA, 0, 50, 65536)]
    assert [choice.mode for choice in choose(samples)] == [STAGED, DMA]


def test_the_smallest_ring_that_is_fast_enough_is_chosen() -> None:
    assert choose_ring({16: 40.0, 32: 50.0, 64: 51.0}) == 32
    assert choose_ring({}) == 0


def test_runs_are_counted_on_both_sides_and_in_the_arena() -> None:
    assert run_lengths(PLANES) == (ROW, HEADS * LAYERS * PAGE)
    assert run_lengths(PLANES[:HEADS]) == (ROW, PAGE)  # one layer: its heads lie apart
    whole: list[PlaneTuple] = [(4096, 9000, 4, 1024, 1024, 0), (8192, 9000, 1, 512, 512, 4096)]
    assert run_lengths(whole) == (4608, 4608)


def test_pages_are_measured_in_the_shape_that_they_have() -> None:
    placed, taken = placed_at(1 << 30, PLANES, 3)
    assert taken == 3 * LAYERS * HEADS * PAGE
    assert [plane[0] - (1 << 30) for plane in placed] == [
        layer * 3 * HEADS * PAGE + head * ROW for layer in range(LAYERS) for head in range(HEADS)
    ]
    assert [plane[1:] for plane in placed] == [plane[1:] for plane in PLANES]


def test_whole_blocks_shares_and_layers_are_classes() -> None:
    load, store = Direction.LOAD, Direction.STORE
    planes = [plane for base in range(4) for plane in nhd_planes((1 + base) << 30)]
    assert classes_of(planes, range(4, 8)) == [
        TransferClass(load, 0, 32),
        TransferClass(load, 0, 4),
        TransferClass(store, 4, 8),
    ]
    assert classes_of(PLANES[:1], range(0)) == [TransferClass(load, 0, 1)]
    layers = {str(i): {planes[i][0], planes[i + 1][0]} for i in range(0, 32, HEADS)}
    parts = split_layers([PlacedPlane(*plane) for plane in planes], layers)
    assert parts.planes[0] == range(4)


def test_a_device_is_measured_once_for_a_layout(fake: FakeCuda, tmp_path: Path) -> None:
    live = fake.live
    cache = tmp_path / "new" / "folder"
    found = calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=cache)
    assert found.mode is CudaMode.AUTO
    assert {(c.direction, c.run_bytes, c.slot_run_bytes) for c in found.choices} == {
        (Direction.LOAD, 256, HEADS * LAYERS * PAGE),
        (Direction.LOAD, 256, PAGE),
        (Direction.STORE, 256, HEADS * LAYERS * PAGE),
    }
    assert {s.mode for s in found.samples} == {KERNEL, TMA, STAGED}  # too short for DMA
    assert fake.live == live
    (path,) = cache.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    launches = fake.calls("cuLaunchKernel")
    # Where the pages lie does not matter, and the samples are kept.
    again = calibrated(0, nhd_planes(5 << 20), ALL, driver=fake.path, cache_dir=cache)
    assert (again, again.samples) == (found, found.samples)
    assert fake.calls("cuLaunchKernel") == launches
    calibrated(0, PLANES[:4], range(4), driver=fake.path, cache_dir=cache)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "X"},
        {"ring_bytes": -1},
        {"choices": [3]},
        {"choices": 4},
        {"samples": [{}]},
        {"choices": [{"direction": "LOAD", "mode": "AUTO", "run_bytes": 1, "slot_run_bytes": 1}]},
        {"choices": [{"direction": "LOAD", "mode": "TMA", "run_bytes": -1, "slot_run_bytes": 1}]},
    ],
)
def test_a_broken_file_is_measured_again(
    fake: FakeCuda, tmp_path: Path, change: dict[str, object]
) -> None:
    calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    good = json.loads(path.read_text())
    for content in (json.dumps(good | change), "", "[]", "null", "[" * 100_000):
        path.write_text(content)
        before = fake.calls("cuLaunchKernel")
        calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
        assert fake.calls("cuLaunchKernel") > before
        assert set(json.loads(path.read_text())) == set(good)


def test_a_cache_that_cannot_be_written_is_no_error(fake: FakeCuda, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path / "file")
    assert found.choices


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_cache_that_another_user_planted_is_neither_read_nor_written(
    fake: FakeCuda, tmp_path: Path
) -> None:
    cache = tmp_path / "flexkv"
    calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=cache)
    (path,) = cache.iterdir()
    content = json.loads(path.read_text()) | {"choices": []}
    path.write_text(json.dumps(content))
    os.chown(cache, 65534, 65534)
    tmp_path.chmod(0o1777)
    assert calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=cache).choices
    assert [each.name for each in cache.iterdir()] == [path.name]
    assert json.loads(path.read_text()) == content


def test_a_user_without_a_home_measures_at_each_start(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may run as a user that its list of users does not have."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for _ in range(2):
        before = fake.calls("cuLaunchKernel")
        assert calibrated(0, PLANES, ALL, driver=fake.path).choices
        assert fake.calls("cuLaunchKernel") > before


@pytest.mark.parametrize("name", ["cuMemAlloc", "cuMemHostRegister", "cuMemcpyBatchAsync", "run"])
def test_where_measuring_fails_dma_is_used_alone(fake: FakeCuda, tmp_path: Path, name: str) -> None:
    live = fake.live
    fake.fail(name, OUT_OF_MEMORY)
    found = calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
    assert found == Calibration(DMA)
    assert list(tmp_path.iterdir()) == []
    assert fake.live == live


def test_a_kernel_that_moves_wrong_bytes_is_never_chosen(fake: FakeCuda, tmp_path: Path) -> None:
    fake.idle_kernel("fkv_copy_bulk")  # which the staged way uses, too
    found = calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path / "one")
    assert found == Calibration(DMA)
    fake.idle_kernel("fkv_copy_16")
    found = calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path / "two")
    assert found == Calibration(DMA)


def test_other_drivers_and_devices_have_files_of_their_own(
    make_fake: MakeFake, tmp_path: Path
) -> None:
    for configuration in ({}, {"version": 12080}, {"major": 8}):
        fake = make_fake(**configuration)
        calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
        assert fake.calls("cuLaunchKernel") > 0
    assert len(list(tmp_path.iterdir())) == 3


def test_a_device_that_does_not_exist_is_an_error(fake: FakeCuda, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device is 5"):
        calibrated(5, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
