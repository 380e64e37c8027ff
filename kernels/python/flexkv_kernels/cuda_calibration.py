# SPDX-License-Identifier: Apache-2.0
"""Checks a device's copies, and measures which way is fastest for the pages of an engine.

An engine's transfers are of few classes: whole blocks, this rank's share of them, and the layers
that a forward pass waits for. Each is measured by every way with every ring, over pages of the same
shape and an arena of the same kind of memory. That takes one to three seconds, host memory of
`TRANSFER_BYTES`, and up to twice as much of the device beside the rings; less is tried where memory
is short. The ranks of a machine measure one after another. The result is kept in the user's cache
folder for each device and layout, until the machine, the driver or this package change.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from flexkv.types.mover import Direction
from flexkv_kernels.calibration_file import Calibration, CalibrationFile
from flexkv_kernels.cuda_check import CHECK_BYTES, check_modes
from flexkv_kernels.cuda_choice import choice_for, choose, classes_of, for_all_classes
from flexkv_kernels.cuda_device import CudaDevice, cuda_device
from flexkv_kernels.cuda_measure import (
    Bench,
    Candidate,
    Sample,
    TransferClass,
    blocks_in,
    placed_at,
    run_lengths,
)
from flexkv_kernels.cuda_options import CudaMode
from flexkv_kernels.cuda_scratch import HostKind, Scratch, scratch_memory
from flexkv_kernels.native_mover import PlaneTuple

logger = logging.getLogger("flexkv.cuda")

FORMAT = 4
"""Version of the format of the files in the cache."""

TRANSFER_BYTES = 192 << 20
"""Bytes of the arena that is measured. The speed is the slope between a third of it and all."""

LEAST_BYTES = 1 << 20
"""The smallest arena that is tried where memory is short: ways can be checked in it."""

_LESS = 4
"""Where memory is short, a quarter is tried next."""

RINGS = (16 << 20, 32 << 20, 64 << 20)
"""The sizes that are tried for the ring of a direction, in bytes, the smallest first."""

CANDIDATES = (
    Candidate(CudaMode.DMA, 0),
    *(Candidate(CudaMode.STAGED, blocks) for blocks in (8, 16, 32)),
    *(Candidate(CudaMode.KERNEL, blocks) for blocks in (4, 8, 16)),
    *(Candidate(CudaMode.TMA, blocks) for blocks in (4, 8)),
)
"""The ways that are tried. Kernels that access host memory themselves need more multiprocessors:
vLLM reports 12 of 132 for plain accesses, SGLang 4 of 152 for bulk copies. Blocks of the staged way
have one warp, which copies 8 GB/s, by a model."""

COHERENT_CANDIDATES = (
    *(Candidate(CudaMode.STAGED, blocks) for blocks in (64, 128)),
    *(Candidate(CudaMode.KERNEL, blocks) for blocks in (32, 64)),
    *(Candidate(CudaMode.TMA, blocks) for blocks in (16, 32)),
)
"""Ways that are tried beside `CANDIDATES` on ARM hosts: a Grace CPU's link to its GPU is eight
times as fast as PCIe. By a model; see the design page on GPUs."""

_DMA_ONLY = Calibration(CudaMode.DMA, is_whole=False)
_UNKNOWN = HostKind()


@dataclass(frozen=True, slots=True)
class _Target:
    """What is calibrated."""

    device: int
    driver: str
    planes: Sequence[PlaneTuple]
    classes: Sequence[TransferClass]
    kind: HostKind


def calibrated(
    device: int,
    planes: Sequence[PlaneTuple],
    stored: range,
    *,
    kind: HostKind = _UNKNOWN,
    driver: str = "",
    cache_dir: Path | None = None,
) -> Calibration:
    """The calibration for a mover over these planes, measured now or read from the cache.

    Call it before the engine computes, because computing and measuring disturb each other. Each way
    is checked first (:mod:`~flexkv_kernels.cuda_check`): a way that copies wrong bytes is never
    chosen, and the others stay. If the cache cannot be read or written, copies are measured again
    at the next start. If they cannot be measured, because memory is short or a copy fails, the ways
    that were found correct are used by their defaults; without memory to check them, DMA alone.
    Raises ValueError if the device cannot be used, or its driver's own copies move wrong bytes.

    Args:
        device: ordinal of the device among those that this process sees.
        planes: planes of the engine's pages; at least one.
        stored: numbers of the planes that stores copy.
        kind: that of the engine's arena.
        driver: path of the driver's library; "" for the system's.
        cache_dir: folder of the cache; None for ``flexkv`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
    """
    described = cuda_device(device, driver)
    target = _Target(device, driver, planes, classes_of(planes, stored), kind)
    file = CalibrationFile(cache_dir, *_identity(described, target))
    found = file.read()
    if found is None:
        with file.turn():
            found = _calibrate(target)
        if found is None:
            raise ValueError(f"the driver's own copies move wrong bytes on CUDA device {device}")
        if found.is_whole:
            file.write(found)
    _log_ways(target, found)
    return found


def _calibrate(target: _Target) -> Calibration | None:
    """Check and measure in as much memory as there is. None if DMA moves wrong bytes."""
    arena_bytes = max(TRANSFER_BYTES, LEAST_BYTES)
    while True:
        blocks = blocks_in(target.planes, arena_bytes)
        _, page_bytes = placed_at(0, target.planes, blocks)
        try:
            with scratch_memory(
                target.device, target.driver, arena_bytes, max(page_bytes, CHECK_BYTES), target.kind
            ) as scratch:
                found = _tried(target, scratch)
            if found is not None and arena_bytes < TRANSFER_BYTES:
                found = replace(found, is_whole=False)
            return found
        except (MemoryError, RuntimeError, ValueError) as error:
            # A smaller arena may be page-locked where a larger one is not. A copy that fails does
            # so again.
            if isinstance(error, RuntimeError) or arena_bytes <= LEAST_BYTES:
                _log_unchecked(target.device, error)
                return _DMA_ONLY
        arena_bytes = max(arena_bytes // _LESS, LEAST_BYTES)


def _log_unchecked(device: int, error: Exception) -> None:
    change = "please report it with the names of the GPU and its driver"
    if isinstance(error, MemoryError):
        change = (
            "leave the GPU 64 MiB more, by a lower gpu_memory_utilization or mem_fraction_static"
        )
    logger.error(
        "copies on CUDA device %d cannot be checked (%s); copy engines alone are used, which are "
        "slow for short pages; %s",
        device,
        error,
        change,
    )


def _tried(target: _Target, scratch: Scratch) -> Calibration | None:
    """Check the ways, and measure the correct ones. None if DMA moves wrong bytes."""
    wanted = [CudaMode.DMA, CudaMode.KERNEL, CudaMode.STAGED]
    if cuda_device(target.device, target.driver).capability >= (9, 0):
        wanted.append(CudaMode.TMA)
    checked = check_modes(scratch, wanted)
    if CudaMode.DMA in checked.wrong:
        return None
    for mode in checked.wrong:
        logger.error(
            "copies by %s move wrong bytes on CUDA device %d: this way is not used, others are; "
            "please report it with the names of the GPU and its driver",
            mode.name,
            target.device,
        )
    if CudaMode.KERNEL not in checked.correct:
        return _DMA_ONLY  # what other ways cannot copy goes by the plain kernel
    samples, ring_bytes = _measured(target, scratch, checked.correct)
    choices, chosen_ring = choose(samples)
    if CudaMode.STAGED not in checked.correct:
        choices = list(for_all_classes(choices, checked.correct))
    return Calibration(
        CudaMode.AUTO,
        tuple(choices),
        chosen_ring or ring_bytes or RINGS[0],
        tuple(samples),
        is_whole=len(checked.correct) == len(wanted) and ring_bytes >= RINGS[-1],
    )


def _measured(
    target: _Target, scratch: Scratch, modes: Sequence[CudaMode]
) -> tuple[list[Sample], int]:
    """The speed of all ways for all classes, and bytes of the largest ring that there is memory
    for. No samples if no block fits, or a copy fails."""
    try:
        with closing(Bench(scratch, target.planes, RINGS[-1])) as bench:
            found = [
                bench.measure(part, way, ring)
                for part in target.classes
                for way in _candidates()
                if way.mode in modes
                for ring in (RINGS if way.mode is CudaMode.STAGED else (0,))
            ]
            return [sample for sample in found if sample is not None], bench.ring_bytes
    except (RuntimeError, ValueError) as error:
        logger.warning(
            "copies on CUDA device %d were not measured (%s); they go by default ways",
            target.device,
            error,
        )
        return [], 0


def _candidates() -> Sequence[Candidate]:
    return CANDIDATES + COHERENT_CANDIDATES if platform.machine() == "aarch64" else CANDIDATES


def _identity(device: CudaDevice, target: _Target) -> tuple[list[str], list[str]]:
    """The names of the device and the layout, and what else a calibration depends on."""
    first = min(plane[0] for plane in target.planes)
    shape = [(base - first, *rest) for base, *rest in target.planes]
    made_for = [
        f"format {FORMAT}",
        f"flexkv-kernels {version('flexkv-kernels')}",
        f"{device}",
        f"driver {_read_line('/sys/module/nvidia/version')}",
        f"kernel {platform.release()}",
        *(
            f"{name} {_read_line(f'/sys/bus/pci/devices/{device.pci_bus_id}/{name}')}"
            for name in ("max_link_speed", "max_link_width", "numa_node")
        ),
        f"{target.kind}",
        f"rings {RINGS}, {TRANSFER_BYTES} bytes",
        f"{_candidates()}",
    ]
    return [device.pci_bus_id, f"{shape}", f"{target.classes}"], made_for


def _read_line(path: str) -> str:
    """The first line of a file of the kernel's; empty if there is no such file."""
    try:
        return Path(path).read_text(encoding="utf-8").partition("\n")[0]
    except (OSError, UnicodeDecodeError):
        return ""


def _log_ways(target: _Target, found: Calibration) -> None:
    """Log in one line which way the copies of an idle start go."""
    names = ["loads", "layer-wise parts", "stores"]
    ways = {}
    parts = list(target.classes)
    if len(parts) > 1 and parts[1].direction is Direction.STORE:
        names.remove("layer-wise parts")
    for name, part in zip(names, parts, strict=False):
        key = part.direction, *run_lengths(target.planes[part.first : part.last])
        ways[name] = _way_text(found, key)
    logger.info(
        "copies on CUDA device %d: %s; ring %d MiB each way",
        target.device,
        "; ".join(f"{name} {way}" for name, way in ways.items()),
        found.ring_bytes >> 20,
    )


def _way_text(found: Calibration, key: tuple[Direction, int, int]) -> str:
    choice = choice_for(found.choices, *key)
    if found.mode is not CudaMode.AUTO:
        return f"by {found.mode.name.lower()}"
    if choice is None:
        return "by the default for runs of their length"
    blocks = f" on {choice.thread_blocks} thread blocks" if choice.thread_blocks else ""
    speeds = [
        sample.speed
        for sample in found.samples
        if (sample.direction, sample.run_bytes, sample.slot_run_bytes) == key
        and (sample.mode, sample.thread_blocks) == (choice.mode, choice.thread_blocks)
        and sample.ring_bytes in {0, found.ring_bytes}
    ]
    speed = f" at {max(speeds) / 1e9:.1f} GB/s" if speeds else ""
    return f"by {choice.mode.name.lower()}{blocks}{speed}"
