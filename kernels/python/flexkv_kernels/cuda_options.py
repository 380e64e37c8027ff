# SPDX-License-Identifier: Apache-2.0
"""Settings of the CUDA mover."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from flexkv.mover import Direction


class CudaMode(IntEnum):
    """Ways of copying: the numbers of the C ABI, which says more."""

    AUTO = 0
    """One of the others for each transfer."""
    DMA = 1
    """The device's copy engines: no multiprocessor is used, each run costs some 0.5 us."""
    KERNEL = 2
    """A kernel on a few multiprocessors, which reads or writes host memory itself."""
    TMA = 3
    """The same through the bulk copy engine; compute capability 9.0 or newer."""
    STAGED = 4
    """Copy engines between the arena and a ring on the device, a kernel between ring and pages."""


@dataclass(frozen=True, slots=True)
class CudaChoice:
    """The way of transfers of one class, see ``fkv_cuda_choice`` of the C ABI.

    run_bytes: mean length of runs that are contiguous among the pages and in the arena.
    slot_run_bytes: of those that are contiguous in the arena.
    mode: not ``CudaMode.AUTO``.
    thread_blocks: the most of a kernel's launch; 0: default.
    """

    direction: Direction
    run_bytes: int
    slot_run_bytes: int
    mode: CudaMode
    thread_blocks: int = 0


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """Tuning of a :class:`CudaMover`. The defaults fit the device; tests and benchmarks differ.

    mode: how to copy.
    choices: for ``CudaMode.AUTO``; other transfers go by DMA if their runs have 64 KiB or more,
        staged if their runs in the arena have, and else by a kernel.
    thread_blocks: how many multiprocessors a kernel may occupy; 0: as chosen.
    ring_bytes: of the ring of each direction; 0: default.
    driver: path of the driver's library; "": the system's ``libcuda.so.1``.
    """

    mode: CudaMode = CudaMode.AUTO
    choices: tuple[CudaChoice, ...] = ()
    thread_blocks: int = 0
    ring_bytes: int = 0
    driver: str = ""
