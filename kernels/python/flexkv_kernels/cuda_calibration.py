# SPDX-License-Identifier: Apache-2.0
"""Checks a device's copies, and measures which way is fastest for the pages of an engine.

An engine's transfers are of few classes: whole blocks, this rank's share of them, and the layers
that a forward pass waits for. Each is measured by every way, over pages of the same shape. That
takes some tenths of a second, 128 MiB of device memory beside the rings, and 64 MiB of host memory.
The result is kept in the user's cache folder for each kind of device, driver, layout and version of
this package, so that it is measured once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flexkv.system.directories import open_directory
from flexkv.system.regular_files import open_regular
from flexkv.types.mover import LAYER_PARTS, Direction
from flexkv_kernels.cuda_check import correct_modes
from flexkv_kernels.cuda_device import CudaDevice, cuda_device
from flexkv_kernels.cuda_measure import Bench, Candidate, Sample, TransferClass
from flexkv_kernels.cuda_options import CudaChoice, CudaMode, CudaOptions
from flexkv_kernels.cuda_scratch import scratch_memory
from flexkv_kernels.native_mover import PlaneTuple

logger = logging.getLogger(__name__)

FORMAT = 2
"""Version of the format of the files in the cache."""

TRANSFER_BYTES = 64 << 20
"""Bytes that are copied at a time. They take 1.2 ms at 55 GB/s, so that starting a copy, about
10 us, is less than 1 %."""

RINGS = (16 << 20, 32 << 20, 64 << 20)
"""The sizes that are tried for the ring of a direction, in bytes, the smallest first."""

CANDIDATES = (
    Candidate(CudaMode.DMA, 0),
    *(Candidate(CudaMode.STAGED, blocks) for blocks in (1, 2, 4)),
    *(Candidate(CudaMode.KERNEL, blocks) for blocks in (4, 8, 16)),
    *(Candidate(CudaMode.TMA, blocks) for blocks in (4, 8)),
)
"""The ways that are tried. Kernels that access host memory themselves need more multiprocessors:
vLLM reports 12 of 132 for plain accesses, SGLang 4 of 152 for bulk copies."""

ABOUT_AS_FAST = 0.97
"""A way that reaches this share of the fastest one's speed is chosen if it needs fewer
multiprocessors, because those belong to the engine. Not tuned."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result for a layout on a device.

    Attributes:
        mode: AUTO, or DMA if the kernels copy wrong bytes or could not be measured.
        choices: the way of each class.
        ring_bytes: bytes of the ring of each direction; 0 for the default.
        samples: all measurements.
    """

    mode: CudaMode = CudaMode.AUTO
    choices: tuple[CudaChoice, ...] = ()
    ring_bytes: int = 0
    samples: tuple[Sample, ...] = field(default=(), compare=False, repr=False)

    def options(self, driver: str = "") -> CudaOptions:
        """Make the options of a mover.

        Args:
            driver: path of the driver's library; "" for the system's.
        """
        return CudaOptions(self.mode, self.choices, ring_bytes=self.ring_bytes, driver=driver)


_DMA_ONLY = Calibration(CudaMode.DMA)


def calibrated(
    device: int,
    planes: Sequence[PlaneTuple],
    stored: range,
    *,
    driver: str = "",
    cache_dir: Path | None = None,
) -> Calibration:
    """The calibration for a mover over these planes, measured now or read from the cache.

    Call it before the engine computes, because computing and measuring disturb each other. Each way
    is checked first (:mod:`~flexkv_kernels.cuda_check`): a kernel that copies wrong bytes is never
    chosen. If the cache cannot be read or written, copies are measured again at the next start. If
    they cannot be measured, for instance because memory is short, only DMA is used.

    Args:
        device: ordinal of the device among those that this process sees.
        planes: planes of the engine's pages; at least one.
        stored: numbers of the planes that stores copy.
        driver: path of the driver's library; "" for the system's.
        cache_dir: folder of the cache; None for ``flexkv`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        ValueError: the device cannot be used, or its driver's own copies move wrong bytes.
    """
    described = cuda_device(device, driver)
    classes = classes_of(planes, stored)
    path = _cache_path(described, planes, classes, cache_dir)
    known = None if path is None else _read(path)
    if known is not None:
        return known
    try:
        found = _measure(device, driver, planes, classes)
    except (MemoryError, ValueError, RuntimeError) as error:
        logger.warning(
            "copies on CUDA device %d were not measured (%s); DMA is used", device, error
        )
        return _DMA_ONLY
    if found is None:
        raise ValueError(f"the driver's own copies move wrong bytes on CUDA device {device}")
    if path is not None:
        _write(path, found)
    return found


def classes_of(planes: Sequence[PlaneTuple], stored: range) -> list[TransferClass]:
    """The classes of an engine's transfers, each once: loads of all planes, loads of as many as a
    layer-wise load has in a part, and stores of ``stored``. Classes without planes are left out."""
    step = -(-len(planes) // LAYER_PARTS)
    wanted = [
        TransferClass(Direction.LOAD, 0, len(planes)),
        TransferClass(Direction.LOAD, 0, step),
        TransferClass(Direction.STORE, stored.start, stored.stop),
    ]
    return [part for part in dict.fromkeys(wanted) if part.first < part.last]


def choose(samples: Sequence[Sample]) -> list[CudaChoice]:
    """Choose for each class the way that is about as fast as the fastest and needs the fewest
    multiprocessors."""
    by_class: dict[tuple[Direction, int, int], list[Sample]] = {}
    for sample in samples:
        key = (sample.direction, sample.run_bytes, sample.slot_run_bytes)
        by_class.setdefault(key, []).append(sample)
    choices = []
    for (direction, run_bytes, slot_run_bytes), found in by_class.items():
        best = max(sample.speed for sample in found)
        fast = [sample for sample in found if sample.speed >= ABOUT_AS_FAST * best]
        way = min(fast, key=lambda sample: (sample.thread_blocks, -sample.speed))
        choices.append(
            CudaChoice(direction, run_bytes, slot_run_bytes, way.mode, way.thread_blocks)
        )
    return choices


def choose_ring(speeds: dict[int, float]) -> int:
    """The smallest ring that is about as fast as the fastest one; 0 if none was measured.

    Args:
        speeds: bytes per second, by bytes of the ring.
    """
    best = max(speeds.values(), default=0.0)
    return min((size for size, speed in speeds.items() if speed >= ABOUT_AS_FAST * best), default=0)


def _measure(
    device: int, driver: str, planes: Sequence[PlaneTuple], classes: Sequence[TransferClass]
) -> Calibration | None:
    """Check and measure. None if DMA moves wrong bytes."""
    with scratch_memory(device, driver, max(TRANSFER_BYTES, 1 << 20)) as scratch:
        wanted = [CudaMode.DMA, CudaMode.KERNEL, CudaMode.STAGED]
        if cuda_device(device, driver).capability >= (9, 0):
            wanted.append(CudaMode.TMA)
        modes = correct_modes(scratch, wanted)
        if CudaMode.DMA not in modes:
            return None
        for mode in set(wanted) - set(modes):
            logger.error("copies by %s move wrong bytes on this device: not used", mode.name)
        if not {CudaMode.KERNEL, CudaMode.STAGED} <= set(modes):
            return _DMA_ONLY
        bench = Bench(scratch, planes, TRANSFER_BYTES)
        staged = Candidate(CudaMode.STAGED, 2)
        rings = {ring: bench.measure(classes[0], staged, ring) for ring in RINGS}
        ring_bytes = choose_ring({ring: found.speed for ring, found in rings.items() if found})
        ways = [candidate for candidate in CANDIDATES if candidate.mode in modes]
        found = [bench.measure(part, way, ring_bytes) for part in classes for way in ways]
    samples = tuple(sample for sample in found if sample is not None)
    return Calibration(CudaMode.AUTO, tuple(choose(samples)), ring_bytes, samples)


def _cache_path(
    device: CudaDevice,
    planes: Sequence[PlaneTuple],
    classes: Sequence[TransferClass],
    cache_dir: Path | None,
) -> Path | None:
    """The file of a layout on a device; None if this user has no home, as some containers' have."""
    folder = cache_dir
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME", "")
        try:
            folder = (Path(base) if base else Path.home() / ".cache") / "flexkv"
        except RuntimeError:
            return None
    first = min(plane[0] for plane in planes)
    shape = [(base - first, *rest) for base, *rest in planes]
    identity = f"{FORMAT}\0{device}\0{version('flexkv-kernels')}\0{shape}\0{classes}"
    digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    return folder / f"cuda-calibration-{digest}.json"


def _read(path: Path) -> Calibration | None:
    try:
        folder = open_directory(str(path.parent))
        try:
            with open(open_regular(folder, path.name, os.O_RDONLY), encoding="utf-8") as file:
                document = json.load(file)
        finally:
            os.close(folder)
        found = Calibration(
            CudaMode[document["mode"]],
            tuple(_choice(entry) for entry in document["choices"]),
            _size(document["ring_bytes"]),
            tuple(Sample(**_enums(entry)) for entry in document["samples"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return found


def _choice(entry: dict[str, Any]) -> CudaChoice:
    choice = CudaChoice(**_enums(entry))
    if choice.mode is CudaMode.AUTO:
        raise ValueError("a choice is AUTO")
    for size in (choice.run_bytes, choice.slot_run_bytes, choice.thread_blocks):
        _size(size)
    return choice


def _enums(entry: dict[str, Any]) -> dict[str, Any]:
    return entry | {"direction": Direction[entry["direction"]], "mode": CudaMode[entry["mode"]]}


def _size(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError(f"{value!r} is no size")
    return value


def _names(entry: CudaChoice | Sample) -> dict[str, Any]:
    return asdict(entry) | {"direction": entry.direction.name, "mode": entry.mode.name}


def _write(path: Path, found: Calibration) -> None:
    """Write the file so that readers see all of it or none. Failures are ignored."""
    document = {
        "mode": found.mode.name,
        "choices": [_names(choice) for choice in found.choices],
        "ring_bytes": found.ring_bytes,
        "samples": [_names(sample) for sample in found.samples],
    }
    temporary = path.with_suffix(f".{secrets.token_hex(4)}").name
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        folder = open_directory(str(path.parent), mode_above=0o700)
        try:
            with open(open_regular(folder, temporary, flags), "w", encoding="utf-8") as file:
                json.dump(document, file)
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            os.close(folder)
    except OSError:
        return
