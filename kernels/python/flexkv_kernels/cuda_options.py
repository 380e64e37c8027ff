# SPDX-License-Identifier: Apache-2.0
"""Settings of the CUDA mover."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class CudaMode(IntEnum):
    """Ways of copying: the numbers of the C ABI, which says more."""

    AUTO = 0
    """DMA for long runs, a kernel for short ones."""
    DMA = 1
    """The device's copy engines: no multiprocessor is used, each run costs some 0.5 us."""
    KERNEL = 2
    """A kernel on a few multiprocessors."""
    TMA = 3
    """The same through the bulk copy engine; compute capability 9.0 or newer."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """What ``CudaMode.AUTO`` does in one direction.

    run_bytes: transfers whose runs are shorter than this on average go by a kernel; a run is
        contiguous among the pages and in the arena. 0: always DMA.
    kernel: that kernel, ``CudaMode.KERNEL`` or ``CudaMode.TMA``; KERNEL where the device lacks TMA.
    """

    run_bytes: int
    kernel: CudaMode


@dataclass(frozen=True, slots=True)
class Crossovers:
    """Of both directions. The defaults are guesses for devices that were not measured, see
    :func:`flexkv_kernels.cuda_calibration.calibrated_crossovers`: about where 0.5 us a run, the
    time of the driver, becomes less than a PCIe 5.0 link takes for it."""

    load: Crossover = Crossover(32 * 1024, CudaMode.TMA)
    store: Crossover = Crossover(32 * 1024, CudaMode.TMA)


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """Tuning of a :class:`CudaMover`. The defaults fit the device; tests and benchmarks differ.

    mode: how to copy.
    crossovers: for ``CudaMode.AUTO``.
    thread_blocks: how many multiprocessors a kernel may occupy; 0: default.
    driver: path of the driver's library; "": the system's ``libcuda.so.1``.
    """

    mode: CudaMode = CudaMode.AUTO
    crossovers: Crossovers = Crossovers()
    thread_blocks: int = 0
    driver: str = ""
