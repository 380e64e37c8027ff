# SPDX-License-Identifier: Apache-2.0
"""The device that is measured: its streams and its clock, by torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch

DEVICE = 0
"""The first that this process may see; CUDA_VISIBLE_DEVICES chooses another."""

_LEGACY_STREAM = 1
"""CU_GET_PROC_ADDRESS_LEGACY_STREAM: stream 0 is the one of all threads."""
_SINCE = 4000
"""The version of CUDA that has introduced cuMemcpyAsync as it is called here."""


class Stream(Protocol):
    """A stream of the device."""

    @property
    def handle(self) -> int:
        """As the driver has it."""
        ...

    def current(self) -> AbstractContextManager[Any]:
        """Work of torch goes into this stream meanwhile."""
        ...

    def synchronize(self) -> None:
        """Wait until its work is done."""
        ...


class Gpu(Protocol):
    """A device and the driver behind it."""

    driver: str
    """Path of the driver's library; "": the system's."""

    memory: str
    """What torch calls the device's memory."""

    def start(self) -> None:
        """Make the device current in this thread."""
        ...

    def stream(self) -> Stream:
        """A new one."""
        ...

    def synchronize(self) -> None:
        """Wait until all work that torch was given is done."""
        ...

    def seconds(self, stream: Stream, work: Callable[[], None]) -> float:
        """What the work of torch takes in a stream, by the device's clock."""
        ...


class TorchStream:
    """A stream that torch has made."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream)

    def current(self) -> AbstractContextManager[Any]:
        current: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return current

    def synchronize(self) -> None:
        self._stream.synchronize()


class TorchGpu:
    """See `Gpu`."""

    driver = ""
    memory = f"cuda:{DEVICE}"

    def start(self) -> None:
        torch.cuda.init()
        torch.cuda.set_device(DEVICE)

    def stream(self) -> TorchStream:
        return TorchStream()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, stream: Stream, work: Callable[[], None]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with stream.current():
            start.record()
            work()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


@cache
def driver_function(driver: str, name: str, since: int) -> int:
    """The address of a function of the driver.

    Args:
        driver: path of its library; "": the system's.
        name: of the function.
        since: 1000 * major + 10 * minor of the CUDA that has introduced this type of it.

    Raises:
        OSError: there is no such library.
        RuntimeError: it has no such function.
    """
    look_up = ctypes.CDLL(driver or "libcuda.so.1").cuGetProcAddress_v2
    look_up.argtypes = [
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_void_p,
    ]
    address = ctypes.c_void_p()
    code = look_up(name.encode(), ctypes.byref(address), since, _LEGACY_STREAM, None)
    if code != 0 or not address.value:
        raise RuntimeError(f"the driver has no {name} (CUresult {code})")
    return address.value


@cache
def driver_copy(driver: str) -> Any:
    """cuMemcpyAsync(target, source, bytes, stream); cudaMemcpyAsync is this behind more checks."""
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
    )
    return kind(driver_function(driver, "cuMemcpyAsync", _SINCE))
