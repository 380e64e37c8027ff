# SPDX-License-Identifier: Apache-2.0
"""The mover for pages in CPU memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from flexkv_kernels._library import LIBRARY, CpuOptionsStruct
from flexkv_kernels.native_mover import (
    MESSAGE_BYTES,
    NativeMover,
    PlaneTuple,
    layout_struct,
    unsigned,
)


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """Tuning of a :class:`CpuMover`. The defaults are for engines; tests and benchmarks differ.

    Attributes:
        kernel: one of :func:`available_kernels`; "" takes the first.
        chunk_bytes: largest piece of a transfer that one thread takes at a time; 0 for the default.
        stream_bytes: transfers of at least this many bytes bypass the caches. A transfer of some of
            the planes counts as one of all. By default, 0, these are all stores, and loads as large
            as the last level cache.
    """

    kernel: str = ""
    chunk_bytes: int = 0
    stream_bytes: int = 0


def available_kernels() -> tuple[str, ...]:
    """Names of the copy kernels that this processor can run, the fastest first."""
    names: bytes = LIBRARY.brief.fkv_cpu_kernels()
    return tuple(names.decode().split(","))


class CpuMover(NativeMover):
    """Copies engine blocks between pages in CPU memory and an arena, with native threads.

    The threads inherit the CPU affinity of the thread that makes the mover.
    """

    __slots__ = ()

    def __init__(  # noqa: PLR0917 - where the memory is, in the order of the C ABI
        self,
        planes: Sequence[PlaneTuple],
        num_blocks: int,
        arena_address: int,
        arena_bytes: int,
        threads: int,
        options: CpuOptions = CpuOptions(),
        *,
        store: range | None = None,
    ) -> None:
        """Start the copying threads. Raises ValueError if an argument, which the message
        names, is out of range, or if a thread cannot start.

        Args:
            planes: planes of the pages; see :data:`~flexkv_kernels.native_mover.PlaneTuple`.
            num_blocks: engine blocks in each plane, numbered 0 to ``num_blocks - 1``.
            arena_address: address of the arena in this process.
            arena_bytes: bytes of the arena.
            threads: number of threads, 1 to 1024.
            options: see :class:`CpuOptions`.
            store: numbers of the planes that stores copy; None for all. Loads copy all planes.
        """
        layout = layout_struct(planes, num_blocks, arena_address, arena_bytes, store)
        native_options = CpuOptionsStruct(
            unsigned("threads", threads, bits=32),
            options.kernel.encode() or None,
            unsigned("chunk_bytes", options.chunk_bytes),
            unsigned("stream_bytes", options.stream_bytes),
        )
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        handle: int | None = LIBRARY.waiting.fkv_cpu_mover_create(
            ctypes.byref(layout),
            ctypes.byref(native_options),
            message,
            MESSAGE_BYTES,
        )
        if handle is None:
            raise ValueError(message.value.decode(errors="replace"))
        super().__init__(handle, len(planes))
