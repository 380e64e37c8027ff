# SPDX-License-Identifier: Apache-2.0
"""Checks a device's copies, and measures from which length of runs on its copy engines beat the
copy kernels.

Takes some tenths of a second and 96 MiB of device and host memory, once: the result is kept in the
user's cache folder for each kind of device, driver and version of this package.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from array import array
from collections.abc import Mapping
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

from flexkv.mover import Direction, Status
from flexkv_kernels.cuda_check import correct_modes
from flexkv_kernels.cuda_device import CudaDevice, cuda_device
from flexkv_kernels.cuda_mover import CudaMover
from flexkv_kernels.cuda_options import Crossover, Crossovers, CudaMode, CudaOptions
from flexkv_kernels.cuda_scratch import Scratch, scratch_memory
from flexkv_kernels.native_mover import PlaneTuple

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of the files in the cache."""

RUN_BYTES = tuple(1 << shift for shift in range(12, 20))
"""The lengths measured, 4 to 512 KiB: below, a kernel always wins, above, DMA does."""

BLOCK_BYTES = 1 << 20
BLOCKS = 32
"""Copied at a time. 32 MiB take 0.6 ms at 55 GB/s, far more than it takes to start a copy."""

REPEATS = 3

DMA_WINS = 0.97
"""DMA is chosen from where it reaches this part of a kernel's speed: it leaves the multiprocessors
to the engine."""


_DMA_ONLY = Crossover(0, CudaMode.KERNEL)


def calibrated_crossovers(
    device: int, *, driver: str = "", cache_dir: Path | None = None
) -> Crossovers:
    """The crossovers of a device, measured now or, if it was done before, read from the cache.

    cache_dir: None: ``flexkv`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Measure before an engine starts to compute: both would disturb each other. Every way of copying
    is checked first, see :mod:`~flexkv_kernels.cuda_check`: a kernel that moves bytes to wrong
    places is never chosen. ValueError if the device cannot be used at all, or if even its driver's
    copies are wrong. A cache that cannot be read or written, and memory that is too short to
    measure in, are no errors: then it is measured again, or DMA is used alone.
    """
    described = cuda_device(device, driver)
    path = _cache_path(described, cache_dir)
    known = _read(path)
    if known is not None:
        return known
    try:
        measured = _measure(device, driver)
    except (MemoryError, ValueError, RuntimeError):
        return Crossovers(_DMA_ONLY, _DMA_ONLY)
    if measured is None:
        raise ValueError(f"the driver's own copies move wrong bytes on CUDA device {device}")
    _write(path, measured)
    return measured


def _cache_path(device: CudaDevice, cache_dir: Path | None) -> Path:
    folder = cache_dir
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME", "")
        folder = (Path(base) if base else Path.home() / ".cache") / "flexkv"
    identity = f"{FORMAT}\0{device}\0{version('flexkv-kernels')}"
    digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    return folder / f"cuda-crossovers-{digest}.json"


def _read(path: Path) -> Crossovers | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return Crossovers(_crossover(document["load"]), _crossover(document["store"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _crossover(entry: Mapping[str, object]) -> Crossover:
    run_bytes, kernel = entry["run_bytes"], CudaMode[str(entry["kernel"])]
    if not isinstance(run_bytes, int) or not 0 <= run_bytes < 1 << 64:
        raise ValueError(f"run_bytes is {run_bytes!r}")
    if kernel not in {CudaMode.KERNEL, CudaMode.TMA}:
        raise ValueError(f"kernel is {kernel!r}")
    return Crossover(run_bytes, kernel)


def _write(path: Path, crossovers: Crossovers) -> None:
    """Readers see the whole file or none."""
    document = {
        name: {"run_bytes": crossover.run_bytes, "kernel": crossover.kernel.name}
        for name, crossover in (("load", crossovers.load), ("store", crossovers.store))
    }
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(document, file)
        temporary.replace(path)
    except OSError:
        return


def _measure(device: int, driver: str) -> Crossovers | None:
    """None if DMA moves wrong bytes."""
    with scratch_memory(device, driver, BLOCKS * BLOCK_BYTES) as scratch:
        wanted = [CudaMode.DMA, CudaMode.KERNEL]
        if cuda_device(device, driver).capability >= (9, 0):
            wanted.append(CudaMode.TMA)
        modes = correct_modes(scratch, wanted)
        if CudaMode.DMA not in modes:
            return None
        for mode in set(wanted) - set(modes):
            logger.error("copies by %s move wrong bytes on this device: not used", mode.name)
        speeds: dict[Direction, dict[CudaMode, list[float]]] = {
            direction: {mode: [] for mode in modes} for direction in Direction
        }
        # Stays open meanwhile, so that arena and kernels are made ready only once.
        with closing(_mover(scratch, CudaMode.DMA, BLOCK_BYTES)):
            for run_bytes in RUN_BYTES:
                for mode in modes:
                    for direction, speed in _speeds(scratch, mode, run_bytes).items():
                        speeds[direction][mode].append(speed)
    return Crossovers(choose(speeds[Direction.LOAD]), choose(speeds[Direction.STORE]))


def choose(speeds: Mapping[CudaMode, list[float]]) -> Crossover:
    """The crossover, from the speed of each mode at each of ``RUN_BYTES``.

    The kernel is the one that is faster over the lengths where it is used.
    """
    dma = speeds[CudaMode.DMA]
    kernels = [mode for mode in speeds if mode is not CudaMode.DMA]
    if not kernels:
        return _DMA_ONLY
    best = [max(speeds[mode][i] for mode in kernels) for i in range(len(dma))]
    first = len(dma)
    while first > 0 and dma[first - 1] >= DMA_WINS * best[first - 1]:
        first -= 1
    used = slice(0, max(first, 1))
    kernel = max(kernels, key=lambda mode: sum(speeds[mode][used]))
    run_bytes = 0 if first == 0 else 2 * RUN_BYTES[-1] if first == len(dma) else RUN_BYTES[first]
    return Crossover(run_bytes, kernel)


def _mover(scratch: Scratch, mode: CudaMode, run_bytes: int) -> CudaMover:
    stride = 2 * run_bytes
    planes: list[PlaneTuple] = [
        (scratch.pages + i * stride * BLOCKS, stride, 1, run_bytes, run_bytes, i * run_bytes)
        for i in range(BLOCK_BYTES // run_bytes)
    ]
    return CudaMover(
        planes,
        BLOCKS,
        scratch.arena,
        scratch.arena_bytes,
        scratch.device,
        CudaOptions(mode=mode, driver=scratch.driver),
    )


def _speeds(scratch: Scratch, mode: CudaMode, run_bytes: int) -> dict[Direction, float]:
    """Bytes per second with runs of this length, the best of a few repeats, in each direction."""
    blocks = array("Q", range(BLOCKS))
    offsets = array("Q", range(0, BLOCKS * BLOCK_BYTES, BLOCK_BYTES))
    seconds: dict[Direction, float] = {}
    with closing(_mover(scratch, mode, run_bytes)) as mover:
        for _ in range(REPEATS + 1):  # the first one is slowest: it warms up
            for direction in Direction:
                start = time.perf_counter()
                status = mover.wait(mover.submit(direction, blocks, offsets), 10)
                taken = time.perf_counter() - start
                if status is not Status.DONE:
                    raise RuntimeError(mover.error() or f"a copy is {status.name} after 10 s")
                seconds[direction] = min(taken, seconds.get(direction, taken))
    return {direction: BLOCKS * BLOCK_BYTES / taken for direction, taken in seconds.items()}
