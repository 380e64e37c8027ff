# SPDX-License-Identifier: Apache-2.0
"""What every benchmark works with: a rig on the device, and movers over it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from flexkv.host.arena import Arena
from flexkv.system.numa import bytes_by_node, node_of_device
from flexkv_kernels import (
    Calibration,
    CudaMode,
    CudaMover,
    CudaOptions,
    calibrated,
    cuda_device,
)
from flexkv_kernels.cuda_scratch import HostKind
from integration.gpu.device import DEVICE, Gpu
from integration.gpu.rig import Rig
from integration.gpu.shapes import BLOCK_BYTES, Shape
from integration.gpu.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Lab:
    """A rig whose arena stays registered with the driver; contenders need that as well.

    Attributes:
        gpu: the device.
        rig: the memory.
        sizes: how much is measured, and how often.
        notes: what a reader of the figures should know of the memory.
    """

    gpu: Gpu
    rig: Rig
    sizes: Sizes
    notes: tuple[str, ...]

    @property
    def has_bulk_copies(self) -> bool:
        """Whether the device can copy by TMA."""
        return cuda_device(DEVICE, self.gpu.driver).capability >= (9, 0)

    def calibration(self, shape: Shape) -> Calibration:
        """What FlexKV has calibrated on this device for such pages."""
        planes = self.rig.planes(shape)
        kind = HostKind.of(self.rig.arena)
        stored = range(len(planes))
        return calibrated(DEVICE, planes, stored, kind=kind, driver=self.gpu.driver)

    @contextmanager
    def mover(self, shape: Shape, mode: CudaMode = CudaMode.AUTO) -> Iterator[CudaMover]:
        """A mover for pages of this shape; by default it copies as FlexKV does for its users."""
        options = self.calibration(shape).options(self.gpu.driver)
        if mode is not CudaMode.AUTO:
            options = CudaOptions(mode=mode, ring_bytes=options.ring_bytes, driver=self.gpu.driver)
        with closing(self.mover_by(shape, options)) as mover:
            yield mover

    def mover_by(self, shape: Shape, options: CudaOptions) -> CudaMover:
        """A mover with options of the caller, who closes it."""
        return _mover(self.rig, shape, options)


@contextmanager
def open_lab(gpu: Gpu, sizes: Sizes) -> Iterator[Lab]:
    """Memory on the device and an arena near it. ValueError without a usable device."""
    gpu.start()
    node = node_of_device(cuda_device(DEVICE, gpu.driver).pci_bus_id)
    nodes = frozenset() if node is None else frozenset({node})
    rig = Rig(sizes.blocks, gpu.memory, nodes)
    with closing(rig):
        gpu.synchronize()
        start = time.perf_counter()
        options = CudaOptions(mode=CudaMode.DMA, driver=gpu.driver)
        registered = _mover(rig, Shape(BLOCK_BYTES), options)
        seconds = time.perf_counter() - start
        notes = (describe_arena(rig.arena, seconds),)
        with closing(registered):
            yield Lab(gpu, rig, sizes, notes)


def describe_arena(arena: Arena, seconds: float) -> str:
    """What it is made of, where it lies, and that the driver took `seconds` to page-lock it."""
    places = ", ".join(
        f"{size >> 20} MiB on NUMA node {node}"
        for node, size in sorted(bytes_by_node(arena.address).items())
    )
    page = os.fstat(arena.fd).st_blksize >> 10
    size = arena.spec.total_bytes >> 20
    return (
        f"arena: {size} MiB in pages of {page} KiB, {places or 'no NUMA node known'}; "
        f"page-locked, and a mover started, in {seconds:.2f} s"
    )


def _mover(rig: Rig, shape: Shape, options: CudaOptions) -> CudaMover:
    return CudaMover(
        rig.planes(shape),
        rig.blocks(shape),
        rig.arena.address,
        rig.arena.spec.total_bytes,
        DEVICE,
        options,
    )
