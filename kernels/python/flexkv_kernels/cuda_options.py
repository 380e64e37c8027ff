# SPDX-License-Identifier: Apache-2.0
"""Settings of the CUDA mover."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, TypeAlias

import msgspec

from flexkv.types.mover import Direction

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""A number from a file is refused if it is none of these."""


class CudaMode(IntEnum):
    """Ways of copying. The values are those of the C ABI (``flexkv/mover.h``)."""

    AUTO = 0
    """One of the other ways for each transfer."""
    DMA = 1
    """The device's copy engines. They use no multiprocessor; each run takes about 0.5 us."""
    KERNEL = 2
    """A kernel on a few multiprocessors, which reads or writes host memory itself."""
    TMA = 3
    """A kernel that uses bulk copies; compute capability 9.0 or newer."""
    STAGED = 4
    """Copy engines between the arena and a ring on the device, a kernel between ring and pages."""


@dataclass(frozen=True, slots=True)
class CudaChoice:
    """The way of transfers of one class; see ``fkv_cuda_choice`` of the C ABI.

    Attributes:
        direction: direction of the transfers.
        run_bytes: mean bytes of runs that are contiguous both among the pages and in the arena.
        slot_run_bytes: mean bytes of runs that are contiguous in the arena.
        mode: the way; not ``CudaMode.AUTO``.
        thread_blocks: the most thread blocks of a kernel's launch; 0 for the default.
    """

    direction: Direction
    run_bytes: Size
    slot_run_bytes: Size
    mode: CudaMode
    thread_blocks: Size = 0


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """Tuning of a :class:`CudaMover`. Engines use those of a calibration; see `calibrated`.

    Attributes:
        mode: the way of all transfers.
        choices: the ways of classes, for ``CudaMode.AUTO``. A transfer of another class goes the
            way of the nearest one whose lengths differ by at most one power of two. Lengths of
            64 KiB and more count as equal. If there is none, transfers go by DMA if their runs have
            64 KiB or more. Otherwise they go staged if their runs in the arena have 32 KiB or more,
            and else by a kernel.
        thread_blocks: the most thread blocks of a kernel; 0 for the number in the choice. Those of
            the staged way are of one warp, and fit beside an engine's. A block of the other ways
            takes a multiprocessor.
        ring_bytes: bytes of the ring of each direction; 0 for the default. Rings are smaller where
            device memory is short.
        driver: path of the driver's library; "" for the system's ``libcuda.so.1``.
    """

    mode: CudaMode = CudaMode.AUTO
    choices: tuple[CudaChoice, ...] = ()
    thread_blocks: int = 0
    ring_bytes: int = 0
    driver: str = ""
