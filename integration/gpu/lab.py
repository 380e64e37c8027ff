# SPDX-License-Identifier: Apache-2.0
"""What every benchmark works with: a rig on the device, and movers over it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from flexkv.host.arena import Arena
from flexkv.host.numa import bytes_by_node, node_of_device
from flexkv_kernels import (
    Calibration,
    CudaMode,
    CudaMover,
    CudaOptions,
    calibrated,
    cuda_device,
)
from integration.gpu.rig import Rig
from integration.gpu.shapes import BLOCK_BYTES, Shape

DEVICE = 0
"""The first that this process may see; CUDA_VISIBLE_DEVICES chooses another."""

BLOCKS, QUICK_BLOCKS = 480, 128
"""Blocks of 2 MiB on each side: 960 MiB is far more than any cache holds, so that no copy is served
from one, and takes some 20 ms, against which what it takes to start and to notice the end is
nothing. No more than 1 GiB, the piece in which arenas are registered, as one large copy must not
cross the border of two. Quick runs take a quarter."""

REPEATS, QUICK_REPEATS = 9, 3


@dataclass(frozen=True, slots=True)
class Lab:
    """A rig whose arena stays registered with the driver; contenders need that as well.

    Attributes:
        rig: the memory.
        repeats: measurements of everything.
        notes: what a reader of the figures should know of the memory.
    """

    rig: Rig
    repeats: int
    notes: tuple[str, ...]

    def calibration(self, shape: Shape) -> Calibration:
        """What FlexKV has calibrated on this device for such pages."""
        planes = shape.planes(self.rig.base, self.rig.blocks)
        return calibrated(DEVICE, planes, range(len(planes)))

    @contextmanager
    def mover(self, shape: Shape, mode: CudaMode = CudaMode.AUTO) -> Iterator[CudaMover]:
        """A mover for pages of this shape; by default it copies as FlexKV does for its users."""
        options = self.calibration(shape).options()
        if mode is not CudaMode.AUTO:
            options = CudaOptions(mode=mode, ring_bytes=options.ring_bytes)
        with closing(_mover(self.rig, shape, options)) as mover:
            yield mover


@contextmanager
def open_lab(quick: bool) -> Iterator[Lab]:
    """Memory on the device and an arena near it. ValueError without a usable device."""
    torch.cuda.init()
    node = node_of_device(cuda_device(DEVICE).pci_bus_id)
    nodes = frozenset() if node is None else frozenset({node})
    rig = Rig(QUICK_BLOCKS if quick else BLOCKS, f"cuda:{DEVICE}", nodes)
    with closing(rig):
        torch.cuda.synchronize()
        start = time.perf_counter()
        registered = _mover(rig, Shape(BLOCK_BYTES), CudaOptions(mode=CudaMode.DMA))
        seconds = time.perf_counter() - start
        notes = (describe_arena(rig.arena, seconds),)
        with closing(registered):
            yield Lab(rig, QUICK_REPEATS if quick else REPEATS, notes)


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
        shape.planes(rig.base, rig.blocks),
        rig.blocks,
        rig.arena.address,
        rig.arena.spec.total_bytes,
        DEVICE,
        options,
    )
