# SPDX-License-Identifier: Apache-2.0
"""The device that pages are on, with a tensor that says it is on a GPU and a fake driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from flexkv.host.arena import Arena, ArenaSpec  # noqa: E402
from flexkv.layout import BlockFormat, PlacedPlane  # noqa: E402
from flexkv.types.errors import LayoutError  # noqa: E402
from flexkv_kernels import CudaChoice, CudaMode, Direction, torch_device  # noqa: E402
from flexkv_kernels.torch_device import CudaMemory, device_of  # noqa: E402
from kernels.tests.fake_cuda.fake_driver import FakeCuda  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
GPU = torch.device("cuda:0")


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU


@pytest.mark.parametrize(("handle", "after"), [(0, 1), (4711, 4711)])
def test_copies_follow_the_current_stream(
    monkeypatch: pytest.MonkeyPatch, handle: int, after: int
) -> None:
    """torch calls the default stream 0, which to a mover means nothing to follow."""
    asked = []

    def current_stream(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(cuda_stream=handle)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    assert CudaMemory(GPU).work_so_far() == after
    assert asked == [GPU]
    assert device_of({"layer.0": torch.empty(1)}).work_so_far() == 0


def test_a_gpu_without_a_cuda_mover_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "flexkv-kernels was built without CUDA; reinstall it"
    monkeypatch.setattr(torch_device, "cuda_unavailable", lambda: said)
    caches = {"layer.0": torch.empty(1).as_subclass(OnGpu)}
    with pytest.raises(LayoutError, match=f"'layer.0' is on device cuda:0; allowed: cpu .{said}"):
        device_of(caches)
    monkeypatch.setattr(torch_device, "cuda_unavailable", lambda: None)
    assert isinstance(device_of(caches), CudaMemory)


@pytest.mark.parametrize(
    ("way", "memory", "ring"),
    [
        (CudaMode.STAGED, 1 << 30, None),
        (CudaMode.STAGED, 20 << 20, 8192),
        (CudaMode.STAGED, 100 << 10, 0),
        (CudaMode.DMA, 20 << 20, None),  # no copy uses the ring
    ],
)
def test_a_device_without_memory_for_the_measured_ring_is_an_error(  # noqa: PLR0917
    fake: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: CudaMode,
    memory: int,
    ring: int | None,
) -> None:
    """The engine has taken memory since copies were measured."""
    choices = (CudaChoice(Direction.LOAD, 4096, 4096, way),)
    options = fake.options(choices=choices, ring_bytes=32 << 20)
    measured = SimpleNamespace(options=lambda: options)
    monkeypatch.setattr(torch_device, "calibrated", lambda *_, **__: measured)
    pages = torch.zeros(8 * 4096, dtype=torch.uint8)
    arena = Arena.create(ArenaSpec(BlockFormat(1, (4096,)), 16))
    fake.memory(memory)
    planes = [PlacedPlane(pages.data_ptr(), 4096, 1, 4096, 4096, 0)]
    CudaMemory(GPU).make_mover(planes, range(1), 8, arena, 1).close()
    arena.close()
    said = f"memory for a copy ring of {ring} KiB each way, and not for the 32768 KiB"
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [said in error for error in errors] == ([] if ring is None else [True])


USE = """
import torch
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat, PlacedPlane
from flexkv.types.mover import Direction, Status
from flexkv_kernels import CudaMover, cuda_calibration, cuda_scratch
from flexkv_kernels.torch_device import CudaMemory

cuda_calibration.TRANSFER_BYTES = 1 << 17  # the fake device is slow
cuda_calibration.CANDIDATES = cuda_calibration.CANDIDATES[1:2]
cuda_calibration.RINGS = cuda_calibration.RINGS[:1]
cuda_scratch.bytes_by_node = lambda address: {7: 1} if address == arena.address else {}

pages = torch.arange(8 * 4096, dtype=torch.int32).view(torch.uint8)  # a GPU's memory is the host's
arena = Arena.create(ArenaSpec(BlockFormat(1, (2 * 4096,)), 16))
planes = [PlacedPlane(pages.data_ptr() + i * 8 * 8192 + 0, 8192, 1, 8192, 8192, i * 8192)
          for i in range(2)]
mover = CudaMemory(torch.device("cuda:0")).make_mover(planes, range(1), 8, arena, 1)
assert type(mover) is CudaMover
first = arena.spec.slots_offset
assert mover.wait(mover.submit(Direction.STORE, [3], [first], 1), 60) is Status.DONE
import ctypes
stored = ctypes.string_at(arena.address + first, 16384)
assert stored[:8192] == pages[3 * 8192 : 4 * 8192].numpy().tobytes()
assert stored[8192:] == bytes(8192)  # the second plane is another rank's to store
mover.close()
print("copied")
"""


def test_a_mover_for_a_gpu_is_calibrated_and_copies(fake: FakeCuda, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").symlink_to(fake.path)
    env = {"LD_LIBRARY_PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.stdout == "copied\n", run.stdout + run.stderr
    (path,) = (tmp_path / "cache" / "flexkv").glob("*.json")
    assert "nodes=(7,)" in path.read_text()  # measured for memory like the arena's
