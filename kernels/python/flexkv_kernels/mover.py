# SPDX-License-Identifier: Apache-2.0
"""The mover for pages in CPU memory."""

from __future__ import annotations

import atexit
import ctypes
import time
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.transfer import Direction, Status
from flexkv_kernels._library import (
    ECLOSED,
    EINVAL,
    ENOMEM,
    LIBRARY,
    CpuOptionsStruct,
    PlaneStruct,
)

_MESSAGE_BYTES = 512

# A wait is cut into pieces so that Ctrl-C is handled in between.
_WAIT_SLICE_SECONDS = 0.5


_STATUSES = tuple(Status)


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """Tuning of a :class:`CpuMover`. The defaults fit the processor; tests and benchmarks differ.

    kernel: one of :func:`available_kernels`; "" takes the first.
    chunk_bytes: largest piece of a transfer that one thread takes at a time; 0: default.
    stream_bytes: transfers of at least so many bytes bypass the caches; 0: every store, and loads
        as large as the last level cache.
    """

    kernel: str = ""
    chunk_bytes: int = 0
    stream_bytes: int = 0


def available_kernels() -> tuple[str, ...]:
    """Names of the copy kernels this processor can run, best first."""
    names: bytes = LIBRARY.brief.fkv_cpu_kernels()
    return tuple(names.decode().split(","))


class CpuMover:
    """Copies engine blocks between an engine's pages and an arena with native threads.

    Thread-safe. The object owns its threads only: the memory of the planes and of the arena is the
    caller's and must stay mapped at the same addresses until :meth:`close` has returned. Open
    movers are closed when the interpreter exits. The threads inherit the CPU affinity of the thread
    that makes the mover. In a process forked from the one that made it a mover is closed.

    Transfers of one mover are not ordered with one another: loads overtake queued stores. A
    transfer must not write bytes that a pending one reads or writes.
    """

    __slots__ = ("__weakref__", "_handle", "block_bytes")

    block_bytes: int
    """Bytes of one engine block over all planes, which is also its size in the arena."""

    def __init__(  # noqa: PLR0917 - where the memory is, in the order of the C ABI
        self,
        planes: Sequence[tuple[int, int, int]],
        num_blocks: int,
        arena_address: int,
        arena_bytes: int,
        threads: int,
        options: CpuOptions = CpuOptions(),
    ) -> None:
        """Starts ``threads`` threads (1 to 1024).

        planes: ``(base, block_stride, page_bytes)`` each, in bytes, of any alignment: the page of
            engine block b is ``page_bytes`` bytes at ``base + b * block_stride``. A block's pages
            follow one another in the arena in this order.
        num_blocks: engine blocks are numbered 0 to num_blocks - 1.
        arena_address, arena_bytes: the arena as mapped in this process.

        ValueError names the argument that is out of range; also raised if a thread cannot start.
        """
        structs = (PlaneStruct * len(planes))()
        for struct, (base, block_stride, page_bytes) in zip(structs, planes, strict=True):
            struct.base = _unsigned("base", base)
            struct.block_stride = _unsigned("block_stride", block_stride)
            struct.page_bytes = _unsigned("page_bytes", page_bytes)
        native_options = CpuOptionsStruct(
            _unsigned("threads", threads, bits=32),
            options.kernel.encode() or None,
            _unsigned("chunk_bytes", options.chunk_bytes),
            _unsigned("stream_bytes", options.stream_bytes),
        )
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        handle: int | None = LIBRARY.waiting.fkv_cpu_mover_create(
            structs,
            len(planes),
            _unsigned("num_blocks", num_blocks),
            _unsigned("arena_address", arena_address),
            _unsigned("arena_bytes", arena_bytes),
            ctypes.byref(native_options),
            message,
            _MESSAGE_BYTES,
        )
        if handle is None:
            raise ValueError(message.value.decode(errors="replace"))
        self._handle = handle
        self.block_bytes = int(LIBRARY.brief.fkv_mover_block_bytes(handle))
        # Not at exit: another thread may still call the mover then. Closing is safe, see below.
        weakref.finalize(self, LIBRARY.waiting.fkv_mover_destroy, handle).atexit = False
        _open_movers.add(self)

    def submit(
        self,
        direction: Direction,
        blocks: Sequence[int],
        offsets: Sequence[int],
        after: int = 0,
        flag_address: int = 0,
    ) -> int:
        """Queues the copies of ``blocks[i]`` from or to arena bytes ``offsets[i]`` onward.

        Never waits for a copy. ``array('Q')`` is passed on without conversion; it must not be
        resized by another thread meanwhile, and is free again when the call returns.

        after: handle of the work the copies must follow; the CPU has none, so only 0.
        flag_address: 0, or the address of a 4-aligned uint32, possibly in shared memory, that the
            caller has set to ``Status.PENDING``. It becomes DONE or FAILED, with release order,
            once every byte is in place, and before :meth:`poll` says so; keep it mapped until then.

        Returns the ticket, at least 1. ValueError names the first block or offset out of range;
        then no byte is touched. RuntimeError if the mover is closed, MemoryError if memory for the
        bookkeeping is short.
        """
        if len(blocks) != len(offsets):
            raise ValueError(f"{len(blocks)} blocks but {len(offsets)} offsets")
        block_array = _as_array("blocks", blocks)
        offset_array = _as_array("offsets", offsets)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        ticket: int = LIBRARY.brief.fkv_mover_submit(
            self._handle,
            direction,
            block_array.buffer_info()[0],
            offset_array.buffer_info()[0],
            len(block_array),
            _unsigned("after", after),
            _unsigned("flag_address", flag_address),
            message,
            _MESSAGE_BYTES,
        )
        if ticket < 0:
            raise _error(ticket, message.value.decode(errors="replace"))
        return ticket

    def poll(self, ticket: int) -> Status:
        """The state of a transfer, without waiting; may be asked any number of times.

        ValueError if ``ticket`` was never given out, RuntimeError in a forked process.
        """
        return _status(LIBRARY.brief.fkv_mover_poll(self._handle, ticket), ticket)

    def wait(self, ticket: int, timeout: float) -> Status:
        """The same after the transfer has ended or ``timeout`` seconds (may be inf) have passed."""
        deadline = time.monotonic() + timeout
        while True:
            left = min(deadline - time.monotonic(), _WAIT_SLICE_SECONDS)
            code = LIBRARY.waiting.fkv_mover_wait(self._handle, ticket, max(0, int(left * 1e6)))
            status = _status(code, ticket)
            if status is not Status.PENDING or time.monotonic() >= deadline:
                return status

    def close(self) -> None:
        """Finishes the pieces being copied, fails what is queued, joins the threads. Idempotent.

        Afterwards no memory of the caller is touched; submit raises RuntimeError, poll and wait
        still answer.
        """
        _open_movers.discard(self)
        LIBRARY.waiting.fkv_mover_close(self._handle)


_open_movers: weakref.WeakSet[CpuMover] = weakref.WeakSet()


@atexit.register
def _close_movers() -> None:
    """Ends the copies before the interpreter unmaps the memory they work on."""
    for mover in list(_open_movers):
        mover.close()


def _unsigned(name: str, value: int, bits: int = 64) -> int:
    """ctypes would silently take such values modulo 2**bits."""
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{name} is {value}, it must be between 0 and 2**{bits} - 1")
    return value


def _as_array(name: str, values: Sequence[int]) -> array[int]:
    if isinstance(values, array) and values.typecode == "Q":
        return values
    try:
        return array("Q", values)
    except OverflowError:
        bad = next(value for value in values if not 0 <= value < 1 << 64)
        raise ValueError(f"{name} holds {bad}, it must be between 0 and 2**64 - 1") from None


def _status(code: int, ticket: int) -> Status:
    if code >= 0:
        return _STATUSES[code]
    if code == ECLOSED:
        raise _error(code, "the mover belongs to the process that this one was forked from")
    raise _error(code, f"ticket {ticket} was never given out by this mover")


def _error(code: int, message: str) -> Exception:
    if code == EINVAL:
        return ValueError(message)
    if code == ENOMEM:
        return MemoryError(message)
    if code == ECLOSED:
        return RuntimeError(message)
    return RuntimeError(f"unknown error {code}: {message}")
