# SPDX-License-Identifier: Apache-2.0
"""Finds and describes the CUDA devices of this machine at run time.

The first call that finds a driver initialises it in this process. Afterwards no forked child can
use CUDA. Call these functions in the process that uses the GPU, not in one that will fork workers.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from flexkv_kernels._library import LIBRARY, CudaDeviceStruct
from flexkv_kernels.native_mover import MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device as its driver describes it.

    Attributes:
        name: name of the product.
        pci_bus_id: as Linux writes it in ``/sys/bus/pci/devices``, for instance "0000:18:00.0".
        capability: compute capability, (major, minor).
        multiprocessors: number of multiprocessors.
        driver_version: newest version of CUDA that the driver supports, (major, minor).
    """

    name: str
    pci_bus_id: str
    capability: tuple[int, int]
    multiprocessors: int
    driver_version: tuple[int, int]


def cuda_unavailable(driver: str = "") -> str | None:
    """The reason why there can be no :class:`CudaMover` here, in one sentence; None if there can be
    one. `driver`: path of the driver's library; "" for the system's ``libcuda.so.1``."""
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    count: int = LIBRARY.waiting.fkv_cuda_devices(driver.encode() or None, message, MESSAGE_BYTES)
    return message.value.decode(errors="replace") if count < 0 else None


def cuda_device(device: int, driver: str = "") -> CudaDevice:
    """Describe a device. Raises ValueError if there is no such device, or it cannot be used; the
    message says why.

    Args:
        device: ordinal of the device among those that this process sees.
        driver: path of the driver's library; "" for the system's ``libcuda.so.1``.
    """
    info = CudaDeviceStruct()
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    code: int = LIBRARY.waiting.fkv_cuda_describe(
        driver.encode() or None, device, ctypes.byref(info), message, MESSAGE_BYTES
    )
    if code < 0:
        raise ValueError(message.value.decode(errors="replace"))
    return CudaDevice(
        name=info.name.decode(errors="replace"),
        pci_bus_id=info.pci_bus_id.decode().lower(),
        capability=(info.major, info.minor),
        multiprocessors=info.multiprocessors,
        driver_version=(info.driver_version // 1000, info.driver_version % 1000 // 10),
    )
