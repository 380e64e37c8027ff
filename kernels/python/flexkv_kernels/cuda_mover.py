# SPDX-License-Identifier: Apache-2.0
"""The mover for pages in the memory of a CUDA device."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from flexkv.types.mover import FALLBACK
from flexkv_kernels._library import LIBRARY, CudaChoiceStruct, CudaOptionsStruct
from flexkv_kernels.cuda_options import CudaChoice, CudaMode, CudaOptions
from flexkv_kernels.native_mover import (
    MESSAGE_BYTES,
    NativeMover,
    PlaneTuple,
    call_error,
    layout_struct,
    unsigned,
)

_DEFAULTS = CudaOptions()


class CudaMover(NativeMover):
    """Copies engine blocks between pages on a CUDA device and an arena in host memory.

    It works in the device's primary context, as engines do, with streams and a thread of its
    own. The arena is page-locked while a mover over it is open. No other code of the process may
    have registered a part of it.

    :meth:`close` waits for the copies that the device has been given, and so for the work that
    these follow.
    """

    __slots__ = ()

    def __init__(  # noqa: PLR0917 - where the memory is, in the order of the C ABI
        self,
        planes: Sequence[PlaneTuple],
        num_blocks: int,
        arena_address: int,
        arena_bytes: int,
        device: int,
        options: CudaOptions = _DEFAULTS,
        *,
        store: range | None = None,
    ) -> None:
        """Page-lock the arena and start the thread. Raises ValueError if an argument is out of
        range, there is no driver, or the arena cannot be page-locked. The message says which, and
        names the limit.

        Args:
            planes: planes of the pages, with addresses on the device; see
                :data:`~flexkv_kernels.native_mover.PlaneTuple`.
            num_blocks: engine blocks in each plane, numbered 0 to ``num_blocks - 1``.
            arena_address: address of the arena in this process.
            arena_bytes: bytes of the arena.
            device: ordinal of the device among those that this process sees, as torch counts them.
            options: see :class:`CudaOptions`.
            store: numbers of the planes that stores copy; None for all. Loads copy all planes.
        """
        layout = layout_struct(planes, num_blocks, arena_address, arena_bytes, store)
        choices = (CudaChoiceStruct * len(options.choices))(*map(_choice, options.choices))
        native_options = CudaOptionsStruct(
            device,
            options.mode,
            choices,
            len(choices),
            unsigned("thread_blocks", options.thread_blocks, bits=32),
            unsigned("ring_bytes", options.ring_bytes),
            options.driver.encode() or None,
        )
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        handle: int | None = LIBRARY.waiting.fkv_cuda_mover_create(
            ctypes.byref(layout), ctypes.byref(native_options), message, MESSAGE_BYTES
        )
        if handle is None:
            raise ValueError(message.value.decode(errors="replace"))
        super().__init__(handle, len(planes))

    def force(self, mode: CudaMode, thread_blocks: int = 0, ring_bytes: int = 0) -> None:
        """Make all later transfers go one way, for measurements. Raises ValueError if the device or
        the mover lacks what the way takes, or a transfer is pending; RuntimeError if the mover is
        closed.

        Args:
            mode: the way; not ``CudaMode.AUTO``.
            thread_blocks: the most thread blocks of a kernel's launch; 0 for the default.
            ring_bytes: bytes of each ring that are used, at most those that it has; 0 for all.
        """
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        code: int = LIBRARY.waiting.fkv_cuda_mover_force(
            self._handle,
            mode,
            unsigned("thread_blocks", thread_blocks, bits=32),
            unsigned("ring_bytes", ring_bytes),
            message,
            MESSAGE_BYTES,
        )
        if code != 0:
            raise call_error(code, message.value.decode(errors="replace"))

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring of each direction: fewer than the options say where device memory is
        short, and 0 where there is none."""
        size: int = LIBRARY.waiting.fkv_cuda_mover_ring_bytes(self._handle)
        return size

    def bytes_by_mode(self) -> dict[CudaMode, int]:
        """Bytes of the copies given to the device so far, by the way that they went. ``AUTO`` has
        those that could not go the chosen way, because device or ring did not allow it."""
        counts = (ctypes.c_uint64 * len(CudaMode))()
        LIBRARY.brief.fkv_mover_path_bytes(self._handle, counts)
        return {mode: counts[mode] for mode in CudaMode}

    def bytes_by_way(self) -> dict[str, int]:
        """See `Mover.bytes_by_way`."""
        return {
            FALLBACK if mode is CudaMode.AUTO else mode.name.lower(): size
            for mode, size in self.bytes_by_mode().items()
        }

    def error(self) -> str | None:
        """The reason of the latest failure of a transfer, in one sentence. None if no transfer has
        failed; those that :meth:`close` failed do not count."""
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        code: int = LIBRARY.waiting.fkv_mover_error(self._handle, message, MESSAGE_BYTES)
        return message.value.decode(errors="replace") if code == 1 else None


def _choice(choice: CudaChoice) -> CudaChoiceStruct:
    return CudaChoiceStruct(
        choice.direction,
        choice.mode,
        unsigned("run_bytes", choice.run_bytes),
        unsigned("slot_run_bytes", choice.slot_run_bytes),
        unsigned("thread_blocks", choice.thread_blocks, bits=32),
    )
