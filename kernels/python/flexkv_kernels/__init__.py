# SPDX-License-Identifier: Apache-2.0
"""Native copies between the pages of an engine's KV cache and an arena in host memory."""

from __future__ import annotations

from flexkv.types.mover import Direction, Status
from flexkv_kernels.calibration_file import Calibration
from flexkv_kernels.cpu_mover import CpuMover, CpuOptions, available_kernels
from flexkv_kernels.cuda_calibration import calibrated
from flexkv_kernels.cuda_device import CudaDevice, cuda_device, cuda_unavailable
from flexkv_kernels.cuda_mover import CudaMover
from flexkv_kernels.cuda_options import CudaChoice, CudaMode, CudaOptions
from flexkv_kernels.host_memory import HostMemory

__all__ = [
    "Calibration",
    "CpuMover",
    "CpuOptions",
    "CudaChoice",
    "CudaDevice",
    "CudaMode",
    "CudaMover",
    "CudaOptions",
    "Direction",
    "HostMemory",
    "Status",
    "available_kernels",
    "calibrated",
    "cuda_device",
    "cuda_unavailable",
]
