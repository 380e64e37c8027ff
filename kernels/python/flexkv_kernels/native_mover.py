# SPDX-License-Identifier: Apache-2.0
"""The common part of the movers for CPU and GPU: transfers, their states, and closing."""

from __future__ import annotations

import atexit
import ctypes
import time
import weakref
from array import array
from collections.abc import Sequence

from flexkv.types.mover import Direction, Status
from flexkv_kernels._library import (
    ECLOSED,
    EINVAL,
    ENOMEM,
    HELD,
    LIBRARY,
    LayoutStruct,
    PlaneStruct,
)

MESSAGE_BYTES = 1024
"""Size of the buffer for an error's message, its end included. Longer messages are cut."""

_WAIT_SLICE_SECONDS = 0.5
"""The longest wait in native code. Ctrl-C is handled between two of them. Not tuned."""

_STATUSES = tuple(Status)

PlaneTuple = tuple[int, int, int, int, int, int]
"""``(base, block_stride, rows, row_stride, row_bytes, slot_offset)``, in bytes, of any alignment.
Row r of engine block b is ``row_bytes`` bytes at ``base + b * block_stride + r * row_stride``. In
the arena, the rows of a block lie without gaps. They begin ``slot_offset`` bytes after the offset
that a transfer names."""


class NativeMover:
    """A mover of the shared object, for pages on any device; see `Mover`.

    Thread-safe. The object owns its threads and streams only. The memory of the planes and of the
    arena is the caller's and must stay mapped at the same addresses until :meth:`close` has
    returned. Open movers are closed when the interpreter exits. In a forked process, a mover of the
    parent is closed.

    Loads begin in the order of their submission, each with all threads, and so do stores; loads
    overtake stores. A transfer may begin before the previous one has ended, so a later one may end
    first. A transfer must not write bytes that a pending transfer reads or writes.
    """

    __slots__ = ("__weakref__", "_all_planes", "_handle", "block_bytes")

    block_bytes: int
    """Bytes of one engine block over all planes, among the pages as in the arena."""

    def __init__(self, handle: int, n_planes: int) -> None:
        """Take over a native mover.

        Args:
            handle: address that one of the library's create functions has returned; owned from now
                on.
            n_planes: number of its planes.
        """
        self._handle = handle
        self._all_planes = range(n_planes)
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
        *,
        planes: range | None = None,
        mark: int = 0,
    ) -> int:
        """Queue the copies of ``blocks[i]`` from or to arena bytes ``offsets[i]`` onward.

        Never waits for a copy. Returns the ticket, at least 1.

        Args:
            direction: direction of the transfer.
            blocks: numbers of engine blocks. An ``array('Q')`` is passed on without conversion. No
                other thread may resize it during the call; afterwards it is free again.
            offsets: for each block, its place in the arena, in bytes from the arena's address.
            after: the work that the copies must follow. For a CUDA mover, the handle of a stream of
                its device (``torch.cuda.Stream.cuda_stream``): the copies follow the work that is
                in it now. The legacy default stream, whose handle is 0 there, is 1 here. 0 stands
                for no work; a CPU mover takes nothing else.
            flag_address: 0, or the address of a 4-aligned uint32, possibly in shared memory, that
                the caller has set to ``Status.PENDING``. It becomes DONE or FAILED, with release
                order, once every byte is in place, and before :meth:`poll` reports it. The caller
                keeps it mapped until then.
            planes: numbers of the planes to copy, with a step of 1; None for all. Each goes from or
                to its usual place; ``offsets`` are those of a whole block. A store copies those of
                them that are in the mover's share (``store``), perhaps none. A transfer with
                nothing to copy is DONE.
            mark: 0, or a number that :meth:`mark` has returned. The copies then follow the marked
                work, and ``after`` is not used.

        Raises:
            ValueError: the planes, a block, an offset or the mark are out of range, and the message
                names the first of them; no byte was touched.
            RuntimeError: the mover is closed, or its device has failed.
            MemoryError: there is no memory for the bookkeeping.
        """
        if len(blocks) != len(offsets):
            raise ValueError(f"{len(blocks)} blocks but {len(offsets)} offsets")
        block_array = _as_array("blocks", blocks)
        offset_array = _as_array("offsets", offsets)
        first_plane, n_planes = _part("planes", self._all_planes if planes is None else planes)
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        ticket: int = LIBRARY.brief.fkv_mover_submit(
            self._handle,
            direction,
            block_array.buffer_info()[0],
            offset_array.buffer_info()[0],
            len(block_array),
            first_plane,
            n_planes,
            unsigned("after", after),
            unsigned("mark", mark, bits=63),
            unsigned("flag_address", flag_address),
            message,
            MESSAGE_BYTES,
        )
        if ticket < 0:
            raise call_error(ticket, message.value.decode(errors="replace"))
        return ticket

    def mark(self, stream: int) -> int:
        """Mark the work that is in a stream now, for :meth:`submit`. Takes about a microsecond.
        Returns a number, at least 1 and greater by 1 each time. The last 32 can be used. `stream`:
        the handle of a stream of the CUDA mover's device, as ``after`` of :meth:`submit`, but not
        0. Raises ValueError if this is not a stream of the mover's device (a CPU mover has none);
        RuntimeError if the mover is closed, or its device has failed."""
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        mark: int = LIBRARY.brief.fkv_mover_mark(
            self._handle, unsigned("stream", stream), message, MESSAGE_BYTES
        )
        if mark < 0:
            raise call_error(mark, message.value.decode(errors="replace"))
        return mark

    def poll(self, ticket: int) -> Status:
        """The state of a transfer, without waiting. Asking again gives the same answer. Raises
        ValueError if ``ticket`` is not one of this mover; RuntimeError if this is a forked
        process."""
        return _status(LIBRARY.brief.fkv_mover_poll(self._handle, ticket), ticket)

    def copy_seconds(self, ticket: int) -> float | None:
        """Seconds that the copies of a DONE transfer took, from the first byte to the last.

        They are measured by the clock of the thread or device that copied. Waiting in the queue or
        for ``after`` is not included. Returns None if unknown: the transfer is not DONE or had
        nothing to copy, or 4,096 others have been submitted since. Raises ValueError if ``ticket``
        is not one of this mover; RuntimeError if this is a forked process.
        """
        nanoseconds: int = LIBRARY.brief.fkv_mover_copy_ns(self._handle, ticket)
        if nanoseconds < 0:
            _status(nanoseconds, ticket)
        return nanoseconds / 1e9 if nanoseconds else None

    def bytes_by_way(self) -> dict[str, int]:
        """See `Mover.bytes_by_way`. Empty, because pages in CPU memory go one way."""
        return {}

    def wait(self, ticket: int, timeout: float) -> Status:
        """As :meth:`poll`, but wait up to ``timeout`` seconds (may be inf) for the transfer to end.
        Releases the GIL. Ctrl-C ends the wait."""
        deadline = time.monotonic() + timeout
        while True:
            left = min(deadline - time.monotonic(), _WAIT_SLICE_SECONDS)
            code = LIBRARY.waiting.fkv_mover_wait(self._handle, ticket, max(0, int(left * 1e6)))
            status = _status(code, ticket)
            if status is not Status.PENDING or time.monotonic() >= deadline:
                return status

    def hold(self, ticket: int, stream: int) -> Status:
        """Make a stream follow a transfer: work put into it from now on runs when every byte is in
        place, or when the transfer has failed. This thread does not wait for the bytes.

        It waits until the device has been given all copies: microseconds, unless more is pending
        than the device is given at a time (about 1,000 copies, 32 transfers, or the bytes of a
        ring). Returns the present state. PENDING: the stream follows, but the transfer may still
        fail. Poll later, and use no result computed from its bytes before it is DONE. DONE and
        FAILED: the transfer had ended; nothing was put into the stream. Raises ValueError if
        ``ticket`` is not one of this mover, or ``stream`` not one of its device; RuntimeError if
        this is a forked process, or the device has failed. The stream does not follow.

        Args:
            ticket: ticket of the transfer.
            stream: the handle of a stream of the CUDA mover's device, as ``after`` of
                :meth:`submit`, that no graph captures. 0: this thread itself waits until the
                transfer has ended; a CPU mover takes nothing else.
        """
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        stream = unsigned("stream", stream)
        library: ctypes.CDLL = LIBRARY.brief  # keeps the GIL: mostly there is nothing to wait for
        timeout_us = 0
        while True:
            code: int = library.fkv_mover_hold(
                self._handle, ticket, stream, timeout_us, message, MESSAGE_BYTES
            )
            if code < 0:
                raise call_error(code, message.value.decode(errors="replace"))
            if code == HELD:
                return Status.PENDING
            if code != Status.PENDING:
                return _STATUSES[code]
            library, timeout_us = LIBRARY.waiting, int(_WAIT_SLICE_SECONDS * 1e6)

    def close(self) -> None:
        """Finish the pieces being copied, fail the queued transfers, and join the threads.
        Idempotent.

        Afterwards the mover touches no memory of the caller. :meth:`submit` raises RuntimeError;
        :meth:`poll` and :meth:`wait` still answer.
        """
        _open_movers.discard(self)
        LIBRARY.waiting.fkv_mover_close(self._handle)


_open_movers: weakref.WeakSet[NativeMover] = weakref.WeakSet()


@atexit.register
def _close_movers() -> None:
    """End the copies before the interpreter unmaps the memory that they read and write."""
    for mover in list(_open_movers):
        mover.close()


def layout_struct(
    planes: Sequence[PlaneTuple],
    num_blocks: int,
    arena_address: int,
    arena_bytes: int,
    store: range | None,
) -> LayoutStruct:
    """Make the C ABI's description of the memory. Returns a structure that keeps its array of
    planes alive. Raises ValueError if a number does not fit its field; the message names it.

    Args:
        planes: planes of the pages.
        num_blocks: engine blocks in each plane.
        arena_address: address of the arena in this process.
        arena_bytes: bytes of the arena.
        store: numbers of the planes that stores copy, with a step of 1; None for all.
    """
    names = [name for name, _ in PlaneStruct._fields_]
    structs = (PlaneStruct * len(planes))()
    for struct, plane in zip(structs, planes, strict=True):
        for name, value in zip(names, plane, strict=True):
            setattr(struct, name, unsigned(name, value))
    return LayoutStruct(
        structs,
        len(planes),
        *_part("store", range(len(planes)) if store is None else store),
        unsigned("num_blocks", num_blocks),
        unsigned("arena_address", arena_address),
        unsigned("arena_bytes", arena_bytes),
    )


def unsigned(name: str, value: int, bits: int = 64) -> int:
    """Check a number for a native call, because ctypes would take it modulo ``2**bits``. Returns
    ``value``. Raises ValueError if ``value`` is not between 0 and ``2**bits - 1``; the message
    begins with ``name``."""
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{name} is {value}, it must be between 0 and 2**{bits} - 1")
    return value


def _part(name: str, planes: range) -> tuple[int, int]:
    """The first number of a range of planes, and the number of planes in it."""
    if planes.step != 1:
        raise ValueError(f"{name} is {planes}, it must have a step of 1")
    first = unsigned(f"{name}.start", planes.start, bits=32)
    return first, unsigned(f"the number of {name}", len(planes), bits=32)


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
        raise call_error(code, "the mover belongs to the process that this one was forked from")
    raise call_error(code, f"ticket {ticket} was never given out by this mover")


def call_error(code: int, message: str) -> Exception:
    """The exception of a call of the C ABI that returned `code`, with its message."""
    if code == EINVAL:
        return ValueError(message)
    if code == ENOMEM:
        return MemoryError(message)
    if code == ECLOSED:
        return RuntimeError(message)
    return RuntimeError(f"unknown error {code}: {message}")
