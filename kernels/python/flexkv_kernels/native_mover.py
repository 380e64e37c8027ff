# SPDX-License-Identifier: Apache-2.0
"""What the movers for CPU and GPU share: transfers, their states, and closing."""

from __future__ import annotations

import atexit
import ctypes
import time
import weakref
from array import array
from collections.abc import Sequence

from flexkv.mover import Direction, Status
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

# A wait is cut into pieces so that Ctrl-C is handled in between.
_WAIT_SLICE_SECONDS = 0.5

_STATUSES = tuple(Status)

PlaneTuple = tuple[int, int, int, int, int, int]
"""``(base, block_stride, rows, row_stride, row_bytes, slot_offset)``, in bytes, of any alignment:
row r of engine block b is ``row_bytes`` bytes at ``base + b * block_stride + r * row_stride``; in
the arena the rows follow one another ``slot_offset`` bytes behind the offset that a transfer
names."""


class NativeMover:
    """A mover of the shared object, whatever device its pages are on.

    Thread-safe. The object owns its threads and streams only: the memory of the planes and of the
    arena is the caller's and must stay mapped at the same addresses until :meth:`close` has
    returned. Open movers are closed when the interpreter exits. In a process forked from the one
    that made it a mover is closed.

    Loads are taken up in the order of their submission, each with all threads, and so are stores;
    but loads overtake stores, and a transfer is taken up before the one before it has ended: none
    has certainly ended because a later one has. A transfer must not write bytes that a pending one
    reads or writes.
    """

    __slots__ = ("__weakref__", "_all_planes", "_handle", "block_bytes")

    block_bytes: int
    """Bytes of one engine block over all planes, which is also what it takes in the arena."""

    def __init__(self, handle: int, n_planes: int) -> None:
        """Takes over what one of the library's create functions returned, for so many planes."""
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
        """Queues the copies of ``blocks[i]`` from or to arena bytes ``offsets[i]`` onward.

        Never waits for a copy. ``array('Q')`` is passed on without conversion; it must not be
        resized by another thread meanwhile, and is free again when the call returns.

        after: what the copies must follow. For a CUDA mover the handle of a stream of its device
            (``torch.cuda.Stream.cuda_stream``): they follow the work that is in it now; the legacy
            default stream, whose handle is 0 there, is 1 here. 0: nothing, and all that a CPU mover
            takes.
        flag_address: 0, or the address of a 4-aligned uint32, possibly in shared memory, that the
            caller has set to ``Status.PENDING``. It becomes DONE or FAILED, with release order,
            once every byte is in place, and before :meth:`poll` says so; keep it mapped until then.
        planes: numbers of the planes to copy, with a step of 1; None: all. Each goes from or to its
            usual place, and ``offsets`` mean the same as without. A store copies those of them that
            are in the mover's share (``store``), perhaps none. What has nothing to copy is DONE.
        mark: 0, or a number that :meth:`mark` returned: the copies follow the work that was marked
            and not that of ``after``.

        Returns the ticket, at least 1. ValueError names the planes, the first block or offset, or
        the mark, out of range; then no byte is touched. RuntimeError if the mover is closed or its
        device has failed, MemoryError if memory for the bookkeeping is short.
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
            raise _error(ticket, message.value.decode(errors="replace"))
        return ticket

    def mark(self, stream: int) -> int:
        """Marks the work that is in a stream now, for :meth:`submit`. It takes a microsecond.

        stream: the handle of a stream of the CUDA mover's device, as ``after`` of :meth:`submit`,
            but not 0.

        Returns a number, at least 1 and greater by 1 each time. The last 32 can be used. ValueError
        if ``stream`` is none of this device; a CPU mover has none. RuntimeError if the mover is
        closed or its device has failed.
        """
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        mark: int = LIBRARY.brief.fkv_mover_mark(
            self._handle, unsigned("stream", stream), message, MESSAGE_BYTES
        )
        if mark < 0:
            raise _error(mark, message.value.decode(errors="replace"))
        return mark

    def poll(self, ticket: int) -> Status:
        """The state of a transfer, without waiting; may be asked any number of times.

        ValueError if ``ticket`` was never given out, RuntimeError in a forked process.
        """
        return _status(LIBRARY.brief.fkv_mover_poll(self._handle, ticket), ticket)

    def copy_seconds(self, ticket: int) -> float | None:
        """How long the copies of a transfer that is DONE took, from the first byte to the last, by
        the clock of what copied. What it waited before that, in the queue or for ``after``, is not
        in it. None if that is not known: the transfer is not DONE or had nothing to copy, or 4,096
        others have been submitted since.

        ValueError if ``ticket`` was never given out, RuntimeError in a forked process.
        """
        nanoseconds: int = LIBRARY.brief.fkv_mover_copy_ns(self._handle, ticket)
        if nanoseconds < 0:
            _status(nanoseconds, ticket)
        return nanoseconds / 1e9 if nanoseconds else None

    def bytes_by_way(self) -> dict[str, int]:
        """See `Mover`. Pages in CPU memory go one way."""
        return {}

    def wait(self, ticket: int, timeout: float) -> Status:
        """The same after the transfer has ended or ``timeout`` seconds (may be inf) have passed."""
        deadline = time.monotonic() + timeout
        while True:
            left = min(deadline - time.monotonic(), _WAIT_SLICE_SECONDS)
            code = LIBRARY.waiting.fkv_mover_wait(self._handle, ticket, max(0, int(left * 1e6)))
            status = _status(code, ticket)
            if status is not Status.PENDING or time.monotonic() >= deadline:
                return status

    def hold(self, ticket: int, stream: int) -> Status:
        """Makes a stream follow a transfer: work put into it from now on runs when every byte is in
        place, or when the transfer has failed. This thread does not wait for the bytes.

        stream: the handle of a stream of the CUDA mover's device, as ``after`` of :meth:`submit`,
            that no graph captures. 0: this thread itself waits until the transfer has ended; that
            is all that a CPU mover takes.

        Returns the state as it is known. PENDING: the stream follows, but the transfer may yet
        fail: poll later, and until it was DONE trust nothing that was computed from its bytes. DONE
        and FAILED: it had ended; nothing was put into the stream.

        The device must have been given all copies first, which is waited for: microseconds, unless
        more is pending than it is given at a time (some 1000 copies, or 32 transfers).

        ValueError if ``ticket`` was never given out or ``stream`` is none of this device;
        RuntimeError in a forked process or if the device has failed. The stream does not follow
        then.
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
                raise _error(code, message.value.decode(errors="replace"))
            if code == HELD:
                return Status.PENDING
            if code != Status.PENDING:
                return _STATUSES[code]
            library, timeout_us = LIBRARY.waiting, int(_WAIT_SLICE_SECONDS * 1e6)

    def close(self) -> None:
        """Finishes the pieces being copied, fails what is queued, joins the threads. Idempotent.

        Afterwards no memory of the caller is touched; submit raises RuntimeError, poll and wait
        still answer.
        """
        _open_movers.discard(self)
        LIBRARY.waiting.fkv_mover_close(self._handle)


_open_movers: weakref.WeakSet[NativeMover] = weakref.WeakSet()


@atexit.register
def _close_movers() -> None:
    """Ends the copies before the interpreter unmaps the memory they work on."""
    for mover in list(_open_movers):
        mover.close()


def layout_struct(
    planes: Sequence[PlaneTuple],
    num_blocks: int,
    arena_address: int,
    arena_bytes: int,
    store: range | None,
) -> LayoutStruct:
    """The C ABI's form of where the memory is; ValueError names a number that is out of range."""
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
    """ctypes would silently take such values modulo 2**bits."""
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{name} is {value}, it must be between 0 and 2**{bits} - 1")
    return value


def _part(name: str, planes: range) -> tuple[int, int]:
    """The first number of a range of planes, and how many they are."""
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
