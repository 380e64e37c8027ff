# SPDX-License-Identifier: Apache-2.0
"""Choosing the way of each class from measured speeds, and the file that keeps the choice."""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import re
import stat
from pathlib import Path
from typing import NoReturn

import pytest

from flexkv.engine.worker.layers import split_layers
from flexkv.layout import PlacedPlane
from flexkv_kernels import Calibration, CudaMode, Direction, calibrated
from flexkv_kernels import cuda_calibration as calibration
from flexkv_kernels.cuda_choice import choice_for, classes_of
from flexkv_kernels.cuda_measure import TransferClass, placed_at, run_lengths, speed_of
from flexkv_kernels.cuda_scratch import HostKind
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


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


@pytest.fixture(autouse=True)
def _few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device is slow."""
    monkeypatch.setattr(calibration, "TRANSFER_BYTES", 128 * KIB)
    monkeypatch.setattr("flexkv_kernels.cuda_measure.REPEATS", 1)
    ways = {way.mode: way for way in calibration.CANDIDATES}
    monkeypatch.setattr(calibration, "CANDIDATES", tuple(ways.values()))
    monkeypatch.setattr(calibration, "RINGS", calibration.RINGS[:2])


def test_runs_are_counted_on_both_sides_and_in_the_arena() -> None:
    assert run_lengths(PLANES) == (ROW, HEADS * LAYERS * PAGE)
    assert run_lengths(PLANES[:HEADS]) == (ROW, PAGE)  # one layer: its heads lie apart
    whole: list[PlaneTuple] = [(4096, 9000, 4, 1024, 1024, 0), (8192, 9000, 1, 512, 512, 4096)]
    assert run_lengths(whole) == (4608, 4608)


def test_the_start_of_a_transfer_does_not_count_as_its_speed() -> None:
    link, start = 50e9, 100e-6
    sizes = (64 << 20, 192 << 20)
    times = [(size, start + size / link) for size in sizes]
    assert speed_of(times) == pytest.approx(link)
    assert speed_of(times[1:]) == pytest.approx(link, rel=0.03)
    assert speed_of(times[1:]) < link
    # Noise that makes the larger transfer the faster one does not count as speed without bound.
    assert speed_of([(1 << 20, 1.0), (3 << 20, 0.9)]) == (3 << 20) / 0.9
    assert speed_of([(1 << 20, 1.0), (3 << 20, 1.0 + 1e-9)]) < 1.2 * (3 << 20)


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
    assert {s.ring_bytes for s in found.samples if s.mode is STAGED} == set(calibration.RINGS)
    assert found.ring_bytes in calibration.RINGS
    assert fake.live == live
    assert len(files_of(cache)) == 1
    assert {stat.S_IMODE(each.stat().st_mode) for each in cache.iterdir()} == {0o600}
    launches = fake.calls("cuLaunchKernel")
    # Where the pages lie does not matter, and the samples are kept.
    again = calibrated(0, nhd_planes(5 << 20), ALL, driver=fake.path, cache_dir=cache)
    assert (again, again.samples) == (found, found.samples)
    assert fake.calls("cuLaunchKernel") == launches
    calibrated(0, PLANES[:4], range(4), driver=fake.path, cache_dir=cache)
    assert len(files_of(cache)) == 2


def test_what_a_calibration_depends_on_discards_it(
    fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_measured() -> bool:
        before = fake.calls("cuLaunchKernel")
        calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
        return fake.calls("cuLaunchKernel") > before

    assert is_measured()
    for owner, name, changed in (
        (calibration, "RINGS", calibration.RINGS[1:]),
        (calibration, "CANDIDATES", calibration.CANDIDATES[1:]),
        (platform, "machine", lambda: "aarch64"),
        (platform, "release", lambda: "7.0.0"),
        (calibration, "_read_line", lambda path: f"another {path}"),
        (calibration, "version", lambda _: "99.0"),
    ):
        monkeypatch.setattr(owner, name, changed)
        assert is_measured(), name
        assert not is_measured()
    assert len(files_of(tmp_path)) == 1


def test_memory_of_another_node_or_kind_discards_a_calibration(
    fake: FakeCuda, tmp_path: Path
) -> None:
    for kind in (HostKind(), HostKind((0,)), HostKind((0,), huge=True)):
        before = fake.calls("cuLaunchKernel")
        calibrated(0, PLANES, ALL, kind=kind, driver=fake.path, cache_dir=tmp_path)
        assert fake.calls("cuLaunchKernel") > before
    assert len(files_of(tmp_path)) == 1


def test_another_machine_that_shares_the_folder_measures_for_itself(
    fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
    monkeypatch.setattr("platform.node", lambda: "another")
    before = fake.calls("cuLaunchKernel")
    calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
    assert fake.calls("cuLaunchKernel") > before
    assert len(files_of(tmp_path)) == 2


def test_two_movers_measure_all(fake: FakeCuda, tmp_path: Path) -> None:
    """Each loads the kernels and pins the arena."""
    calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
    for call in ("cuModuleLoadData", "cuMemHostRegister"):
        assert 0 < fake.calls(call) <= 2


@pytest.mark.parametrize("cached", [False, True])
def test_the_log_says_which_way_copies_go(
    fake: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture, cached: bool
) -> None:
    if cached:
        calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
    caplog.clear()
    with caplog.at_level(logging.INFO, "flexkv"):
        calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
    (line,) = [each.getMessage() for each in caplog.records if "copies on" in each.getMessage()]
    way = r"by (staged|kernel|tma) on \d+ thread blocks at [\d.]+ GB/s"
    parts = "; ".join(f"{name} {way}" for name in ("loads", "layer-wise parts", "stores"))
    assert re.fullmatch(rf"copies on CUDA device 0: {parts}; ring \d+ MiB each way", line)


_BROKEN_FIELDS: tuple[dict[str, object], ...] = (
    {"mode": "X"},
    {"ring_bytes": -1},
    {"made_for": []},
    {"choices": [3]},
    {"choices": 4},
    {"samples": [{}]},
    {"choices": [{"direction": 0, "mode": 0, "run_bytes": 1, "slot_run_bytes": 1}]},
    {"choices": [{"direction": 0, "mode": 3, "run_bytes": -1, "slot_run_bytes": 1}]},
)


def test_a_broken_file_is_measured_again(fake: FakeCuda, tmp_path: Path) -> None:
    calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
    (path,) = files_of(tmp_path)
    good = json.loads(path.read_text())
    broken = [json.dumps(good | change) for change in _BROKEN_FIELDS]
    for content in (*broken, "", "[]", "null", "[" * 100_000):
        path.write_text(content)
        before = fake.calls("cuLaunchKernel")
        calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
        assert fake.calls("cuLaunchKernel") > before, content[:200]
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
    (path,) = files_of(cache)
    content = json.loads(path.read_text()) | {"choices": []}
    path.write_text(json.dumps(content))
    os.chown(cache, 65534, 65534)
    tmp_path.chmod(0o1777)
    assert calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=cache).choices
    assert files_of(cache) == [path]
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


@pytest.mark.parametrize("room", [0, 200 << 10])
def test_without_memory_to_check_ways_dma_is_used_alone(
    fake: FakeCuda, tmp_path: Path, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    live = fake.live
    fake.memory(room)
    found = calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
    assert found == Calibration(DMA)
    assert files_of(tmp_path) == []
    assert fake.live == live
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "cannot be checked" in record.getMessage()


def test_with_little_memory_ways_are_checked_and_measured_in_less(
    fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "TRANSFER_BYTES", 64 << 20)
    fake.memory(6 << 20)
    found = calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
    assert found.mode is CudaMode.AUTO
    assert KERNEL in {each.mode for each in found.samples}
    assert files_of(tmp_path) == []  # the next start may have more


@pytest.mark.parametrize("name", ["cuMemHostRegister", "cuMemcpyBatchAsync", "run"])
def test_where_copies_fail_dma_is_used_alone(fake: FakeCuda, tmp_path: Path, name: str) -> None:
    live = fake.live
    fake.fail(name, OUT_OF_MEMORY)
    found = calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
    assert found == Calibration(DMA)
    assert files_of(tmp_path) == []
    assert fake.live == live


def test_where_only_measuring_fails_correct_ways_stay(
    fake: FakeCuda,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError("a copy is PENDING after 10 s")

    monkeypatch.setattr("flexkv_kernels.cuda_measure.Bench.measure", fail)
    live = fake.live
    found = calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
    assert found == Calibration(CudaMode.AUTO, (), calibration.RINGS[0])
    assert "they go by default ways" in caplog.text
    assert files_of(tmp_path) == []
    assert fake.live == live


def test_a_way_that_moves_wrong_bytes_is_an_error_and_others_stay(
    fake: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bulk kernel copies for the staged way, too. No transfer may go by one of them, also none
    of a class that was not measured."""
    fake.idle_kernel("fkv_copy_bulk")
    for _ in range(2):
        caplog.clear()
        found = calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
        assert found.mode is CudaMode.AUTO
        assert {s.mode for s in found.samples} == {KERNEL}
        assert {each.mode for each in found.choices} <= {DMA, KERNEL}
        for direction in Direction:
            for run, slot_run in itertools.product(range(21), repeat=2):
                assert choice_for(found.choices, direction, 1 << run, 1 << slot_run)
        errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
        assert {each.split()[2] for each in errors} == {"TMA", "STAGED"}
    assert files_of(tmp_path) == []  # each start says it


def test_without_the_plain_kernel_dma_is_used_alone(
    fake: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What other ways cannot copy goes by that kernel."""
    fake.idle_kernel("fkv_copy_16")
    found = calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
    assert found == Calibration(DMA)
    assert "copies by KERNEL move wrong bytes" in caplog.text


def test_another_driver_or_device_is_measured_again(make_fake: MakeFake, tmp_path: Path) -> None:
    for configuration in ({}, {"version": 12080}, {"major": 8}):
        fake = make_fake(**configuration)
        calibrated(0, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
        assert fake.calls("cuLaunchKernel") > 0
    assert len(files_of(tmp_path)) == 1


def test_a_device_that_does_not_exist_is_an_error(fake: FakeCuda, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device is 5"):
        calibrated(5, PLANES, ALL, driver=fake.path, cache_dir=tmp_path)
