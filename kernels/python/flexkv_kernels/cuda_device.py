# SPDX-License-Identifier: Apache-2.0
"""What there is of CUDA on this machine, found at run time.

The first call that finds a driver initialises it in this process, after which no forked child can
use CUDA: ask where the engine uses its GPU, not in a process that will fork workers.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from flexkv_kernels._library import LIBRARY, CudaDeviceStruct
from flexkv_kernels.native_mover import MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device as its driver describes it.

    pci_bus_id: as Linux writes it in ``/sys/bus/pci/devices``, "0000:18:00.0".
    capability: major and minor number.
    driver_version: of CUDA, as (major, minor).
    """

    name: str
    pci_bus_id: str
    capability: tuple[int, int]
    multiprocessors: int
    driver_version: tuple[int, int]


def cuda_unavailable(driver: str = "") -> str | None:
    """Why there can be no :class:`CudaMover` here, in one sentence; None if there can.

    driver: path of the driver's library; "" for the system's ``libcuda.so.1``.
    """
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    count: int = LIBRARY.waiting.fkv_cuda_devices(driver.encode() or None, message, MESSAGE_BYTES)
    return message.value.decode(errors="replace") if count < 0 else None


def cuda_device(device: int, driver: str = "") -> CudaDevice:
    """Describes the device with this ordinal; ValueError if it does not exist or cannot be used."""
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
