# SPDX-License-Identifier: Apache-2.0
"""Memory in which a device's copies are tried before an engine needs them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flexkv_kernels._library import LIBRARY
from flexkv_kernels.native_mover import MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory for pages on a device, and half as much for an arena in this process.

    Attributes:
        device: ordinal of the device.
        driver: path of the driver's library; "" for the system's.
        pages: address of the pages' memory on the device.
        arena: address of the arena in this process.
        arena_bytes: bytes of the arena; the pages' memory has twice as many.
    """

    device: int
    driver: str
    pages: int
    arena: int
    arena_bytes: int


@contextmanager
def scratch_memory(device: int, driver: str, arena_bytes: int) -> Iterator[Scratch]:
    """Allocate memory on a device and in this process, and free it at the end of the context.

    Args:
        device: ordinal of the device.
        driver: path of the driver's library; "" for the system's.
        arena_bytes: bytes of the arena.

    Raises:
        MemoryError: the device lacks the memory, or cannot be used.
    """
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    path = driver.encode() or None
    pages: int = LIBRARY.waiting.fkv_cuda_alloc(
        path, device, 2 * arena_bytes, message, MESSAGE_BYTES
    )
    if pages == 0:
        raise MemoryError(message.value.decode(errors="replace"))
    try:
        arena = mmap.mmap(-1, arena_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        ctypes.memset(address, 1, arena_bytes)  # pages of its own, not the zero page
        yield Scratch(device, driver, pages, address, arena_bytes)
    finally:
        LIBRARY.waiting.fkv_cuda_free(pages)
