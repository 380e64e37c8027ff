# SPDX-License-Identifier: Apache-2.0
"""Memory in which a device's copies are tried before an engine needs them."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from flexkv.host.arena import Arena, ArenaSpec
from flexkv.host.memory_file import HUGE_PAGE
from flexkv.layout import BlockFormat
from flexkv.system.numa import bytes_by_node
from flexkv.types.errors import ArenaError
from flexkv_kernels._library import LIBRARY
from flexkv_kernels.cuda_mover import CudaMover
from flexkv_kernels.cuda_options import CudaOptions
from flexkv_kernels.native_mover import MESSAGE_BYTES, PlaneTuple

_NODE_SHARE = 0.05
"""A NUMA node with less of an arena does not count as one of its nodes. Not tuned."""

_THREADS = 4
"""Threads that fill scratch memory."""


@dataclass(frozen=True, slots=True)
class HostKind:
    """What decides how fast a device reaches an arena.

    Attributes:
        nodes: NUMA nodes of its memory, in order; empty if the kernel does not report them.
        huge: whether its pages come from the kernel's pool of huge pages.
    """

    nodes: tuple[int, ...] = ()
    huge: bool = False

    @classmethod
    def of(cls, arena: Arena) -> HostKind:
        """The kind of an arena that is filled. Takes about 3 ms for each GiB in pages of 4 KiB."""
        placed = bytes_by_node(arena.address)
        least = _NODE_SHARE * sum(placed.values())
        nodes = sorted(node for node, size in placed.items() if size > least)
        return cls(tuple(nodes), os.fstat(arena.fd).st_blksize >= HUGE_PAGE)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory for pages on a device, and for an arena in this process.

    Attributes:
        device: ordinal of the device.
        driver: path of the driver's library; "" for the system's.
        pages: address of the pages' memory on the device.
        page_bytes: bytes of it.
        arena: address of the arena in this process.
        arena_bytes: bytes of the arena.
    """

    device: int
    driver: str
    pages: int
    page_bytes: int
    arena: int
    arena_bytes: int

    def open_mover(self, planes: Sequence[PlaneTuple], blocks: int, ring_bytes: int) -> CudaMover:
        """Make a mover that can be told to copy by each way, which the caller closes. Raises
        ValueError if there can be no mover on this device.

        Args:
            planes: planes within the pages' memory.
            blocks: engine blocks in each plane.
            ring_bytes: bytes of the ring of a direction. The mover's is smaller, or there is none,
                where the device lacks memory.
        """
        options = CudaOptions(ring_bytes=ring_bytes, driver=self.driver)
        return CudaMover(planes, blocks, self.arena, self.arena_bytes, self.device, options)


@contextmanager
def scratch_memory(
    device: int, driver: str, arena_bytes: int, page_bytes: int, kind: HostKind
) -> Iterator[Scratch]:
    """Allocate memory on a device and in this process, and free it at the end of the context.
    Raises MemoryError if the device or the host lacks the memory, or the device cannot be used.

    Args:
        device: ordinal of the device.
        driver: path of the driver's library; "" for the system's.
        arena_bytes: bytes of the arena, a multiple of 4 KiB.
        page_bytes: bytes of the pages' memory.
        kind: that of the engine's arena. This memory is of the same kind as far as the machine has
            such memory left.
    """
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    path = driver.encode() or None
    pages: int = LIBRARY.waiting.fkv_cuda_alloc(path, device, page_bytes, message, MESSAGE_BYTES)
    if pages == 0:
        raise MemoryError(message.value.decode(errors="replace"))
    try:
        spec = ArenaSpec(BlockFormat(1, (arena_bytes,)), 1)
        try:
            arena = Arena.create(spec, _THREADS, frozenset(kind.nodes))
        except ArenaError as error:
            raise MemoryError(str(error)) from None
        with contextlib.closing(arena):
            address = arena.address + spec.slots_offset
            yield Scratch(device, driver, pages, page_bytes, address, arena_bytes)
    finally:
        LIBRARY.waiting.fkv_cuda_free(pages)
