# SPDX-License-Identifier: Apache-2.0
"""Choosing between DMA and kernels from measured speeds, and the file that keeps the choice."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from flexkv_kernels import (
    Crossover,
    Crossovers,
    CudaMode,
    calibrated_crossovers,
    cuda_calibration,
)
from flexkv_kernels.cuda_calibration import RUN_BYTES, choose
from kernels.tests.conftest import MakeFake
from kernels.tests.fake_cuda.fake_driver import OUT_OF_MEMORY, FakeCuda

DMA, KERNEL, TMA = CudaMode.DMA, CudaMode.KERNEL, CudaMode.TMA
FLAT = [50.0] * len(RUN_BYTES)


@pytest.fixture(autouse=True)
def _few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device is slow."""
    monkeypatch.setattr(cuda_calibration, "BLOCKS", 1)


def rising(to: float, at: int) -> list[float]:
    """Speeds that grow with the length until they reach ``to`` at number ``at``."""
    return [min(to, to * (i + 1) / (at + 1)) for i in range(len(RUN_BYTES))]


@pytest.mark.parametrize(
    ("dma", "kernel", "tma", "chosen"),
    [
        (rising(50, 3), FLAT, [40.0] * 8, Crossover(RUN_BYTES[3], KERNEL)),
        (rising(50, 3), FLAT, [51.0] * 8, Crossover(RUN_BYTES[3], TMA)),
        (rising(49, 3), FLAT, FLAT, Crossover(RUN_BYTES[3], KERNEL)),  # 0.98 is enough
        (rising(40, 3), FLAT, FLAT, Crossover(2 * RUN_BYTES[-1], KERNEL)),
        (FLAT, FLAT, FLAT, Crossover(0, KERNEL)),
        ([60.0, *rising(50, 5)[1:]], FLAT, FLAT, Crossover(RUN_BYTES[5], KERNEL)),  # an outlier
    ],
)
def test_dma_is_chosen_from_where_it_stays_about_as_fast(
    dma: list[float], kernel: list[float], tma: list[float], chosen: Crossover
) -> None:
    assert choose({DMA: dma, KERNEL: kernel, TMA: tma}) == chosen


def test_the_device_is_measured_once(fake: FakeCuda, tmp_path: Path) -> None:
    live = fake.live
    cache = tmp_path / "new" / "folder"
    crossovers = calibrated_crossovers(0, driver=fake.path, cache_dir=cache)
    copies = (
        fake.calls("cuMemcpyBatchAsync"),
        fake.calls("fkv_copy_16"),
        fake.calls("fkv_copy_bulk"),
    )
    assert min(copies) > len(RUN_BYTES)
    assert fake.live == live
    (path,) = cache.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert calibrated_crossovers(0, driver=fake.path, cache_dir=cache) == crossovers
    assert fake.calls("cuMemcpyBatchAsync") == copies[0]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        '{"load": 3, "store": 4}',
        '{"load": {"run_bytes": -1, "kernel": "TMA"}, "store": {"run_bytes": 1, "kernel": "TMA"}}',
        '{"load": {"run_bytes": 1, "kernel": "DMA"}, "store": {"run_bytes": 1, "kernel": "TMA"}}',
        '{"load": {"run_bytes": 1, "kernel": "X"}, "store": {"run_bytes": 1, "kernel": "TMA"}}',
    ],
)
def test_a_broken_file_is_measured_anew(fake: FakeCuda, tmp_path: Path, content: str) -> None:
    calibrated_crossovers(0, driver=fake.path, cache_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    before = fake.calls("cuMemcpyBatchAsync")
    calibrated_crossovers(0, driver=fake.path, cache_dir=tmp_path)
    assert fake.calls("cuMemcpyBatchAsync") > before
    assert set(json.loads(path.read_text())) == {"load", "store"}


def test_a_cache_that_cannot_be_written_is_no_error(fake: FakeCuda, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    calibrated_crossovers(0, driver=fake.path, cache_dir=tmp_path / "file")
    assert fake.calls("cuMemcpyBatchAsync") > 0


@pytest.mark.parametrize("name", ["cuMemAlloc", "cuMemHostRegister", "cuMemcpyBatchAsync", "run"])
def test_where_measuring_fails_dma_is_used_alone(fake: FakeCuda, tmp_path: Path, name: str) -> None:
    live = fake.live
    fake.fail(name, OUT_OF_MEMORY)
    found = calibrated_crossovers(0, driver=fake.path, cache_dir=tmp_path)
    assert found == Crossovers(Crossover(0, KERNEL), Crossover(0, KERNEL))
    assert list(tmp_path.iterdir()) == []
    assert fake.live == live


def test_a_kernel_that_moves_wrong_bytes_is_never_chosen(
    fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[CudaMode] = []
    monkeypatch.setattr(
        cuda_calibration, "choose", lambda speeds: tried.extend(speeds) or choose(speeds)
    )
    fake.idle_kernel("fkv_copy_bulk")
    calibrated_crossovers(0, driver=fake.path, cache_dir=tmp_path / "one")
    assert set(tried) == {DMA, KERNEL}
    fake.idle_kernel("fkv_copy_16")
    found = calibrated_crossovers(0, driver=fake.path, cache_dir=tmp_path / "two")
    assert found == Crossovers(Crossover(0, KERNEL), Crossover(0, KERNEL))


def test_other_drivers_and_devices_have_files_of_their_own(
    make_fake: MakeFake, tmp_path: Path
) -> None:
    for configuration in ({}, {"version": 12080}, {"major": 8}):
        fake = make_fake(**configuration)
        calibrated_crossovers(0, driver=fake.path, cache_dir=tmp_path)
        assert fake.calls("cuMemcpyBatchAsync") > 0
    assert len(list(tmp_path.iterdir())) == 3


def test_a_device_that_does_not_exist_is_an_error(fake: FakeCuda, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device is 5"):
        calibrated_crossovers(5, driver=fake.path, cache_dir=tmp_path)
