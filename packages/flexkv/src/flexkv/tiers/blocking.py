# SPDX-License-Identifier: Apache-2.0
"""A lower tier for callers that wait in threads of their own.

Blocks pass through buffers of this class. A read or write that hangs keeps such a buffer, never the
caller's memory. The caller may reuse its memory once a call has returned.
"""

from __future__ import annotations

import math
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from flexkv.tiers.base import BlockResult, TierFigures
from flexkv.tiers.job import Outcome, Priority

BUFFER_BYTES = 64 << 20
"""Bytes of the buffers for reads, and as many for writes. A drive of 4 GB/s fills them in 16 ms, in
which the caller's thread runs again. Not tuned."""
_MOST_BUFFERS = 128
"""The most buffers of a direction, for small blocks. Not tuned."""
_LEAST_BUFFERS = 2
"""The fewest buffers of a direction: one is read while the other is copied."""

_POLL_SECONDS = 0.0002
"""Pause between two polls of a busy tier: a fifth of the time in which a drive of 4 GB/s reads a
block of 4 MiB. Not tuned."""

Copy: TypeAlias = Callable[[int, memoryview], None]
"""Copies the block at a position of a call out of or into a buffer."""

_NONE = math.inf
"""Behind every position."""

_Submit: TypeAlias = Callable[[Sequence[int], Sequence[memoryview]], int]
"""Begins to read or write the blocks at some positions of a call. Returns the ticket."""


class Blocks(Protocol):
    """The methods that this class uses of a lower tier; see `LowerTier`."""

    @property
    def figures(self) -> TierFigures: ...

    def contains(self, keys: Sequence[bytes]) -> list[bool]: ...

    def read(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], priority: Priority
    ) -> int: ...

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int: ...

    def touch(self, keys: Sequence[bytes]) -> None: ...

    def clear(self) -> None: ...

    def cancel(self, ticket: int) -> None: ...

    def poll(self) -> list[BlockResult]: ...

    def close(self, flush_seconds: float = 0.0) -> bool: ...


class _Buffers:
    """Buffers of one block each, for reads or for writes. Each begins at a multiple of 4 KiB."""

    def __init__(self, slot_bytes: int) -> None:
        count = max(_LEAST_BUFFERS, min(_MOST_BUFFERS, BUFFER_BYTES // slot_bytes))
        memory = memoryview(mmap.mmap(-1, count * slot_bytes))
        starts = range(0, count * slot_bytes, slot_bytes)
        self.free = [memory[start : start + slot_bytes] for start in starts]


@dataclass(slots=True, eq=False)
class _Call:
    """A read or write that its caller waits for.

    Attributes:
        buffers: the pool of its buffers.
        submit: begins a batch; called under the lock.
        end: called with each block that is DONE.
        fill: copies a block into a buffer before it is written; None for reads.
        given_up: whether nobody waits any more. Each buffer then returns to the pool when its block
            has ended.
        tickets: tickets of the batches that have not ended.
        under_way: the buffer of each block that has not ended, by the block's position.
        ended: blocks that have ended and were not given to the caller.
    """

    buffers: _Buffers
    submit: _Submit
    end: Copy
    fill: Copy | None = None
    given_up: bool = False
    tickets: set[int] = field(default_factory=set)
    under_way: dict[int, memoryview] = field(default_factory=dict)
    ended: list[_Ended] = field(default_factory=list)


class _Ended(NamedTuple):
    """A block that has ended."""

    position: int
    buffer: memoryview
    outcome: Outcome


@dataclass(slots=True)
class _Batch:
    """The blocks that the tier reads or writes under one ticket.

    Attributes:
        call: the call that the batch is a part of.
        positions: positions of the blocks in the call.
        left: how many blocks have not ended.
    """

    call: _Call
    positions: list[int]
    left: int


class BlockingTier:
    """Reads and writes that return when they have ended. Any number of threads may call it.

    Args:
        tier: the tier; owned, and called by this object only.
        slot_bytes: bytes of a block.
        quiet_seconds: a read is given up if none of its blocks has ended for this time.
        call_seconds: every call is given up after this time.
    """

    def __init__(
        self, tier: Blocks, slot_bytes: int, quiet_seconds: float, call_seconds: float
    ) -> None:
        self._tier = tier
        self._quiet_seconds = quiet_seconds
        self._call_seconds = call_seconds
        self._lock = threading.Lock()
        self._closed = False
        self._batches: dict[int, _Batch] = {}
        self._reading = _Buffers(slot_bytes)
        self._writing = _Buffers(slot_bytes)

    @property
    def figures(self) -> TierFigures:
        """See `LowerTier`."""
        with self._lock:
            self._take_results()
            return self._tier.figures

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether its block can be read now."""
        with self._lock:
            if self._closed:
                return [False] * len(keys)
            self._take_results()
            return self._tier.contains(keys)

    def read(self, keys: Sequence[bytes], take: Copy) -> int:
        """Read blocks up to the first that cannot be read.

        Args:
            keys: keys of the blocks.
            take: called with each block that was read and verified, in any order, and perhaps with
                some behind the first that failed. The buffer is valid until `take` returns.

        Returns:
            How many blocks `take` was given, from the first on without a gap.
        """

        def submit(positions: Sequence[int], buffers: Sequence[memoryview]) -> int:
            wanted = [keys[position] for position in positions]
            return self._tier.read(wanted, buffers, Priority.PREFETCH)

        def end(position: int, buffer: memoryview) -> None:
            take(position, buffer)
            done[position] = True

        done = [False] * len(keys)
        call = _Call(self._reading, submit, end)
        self._run(call, range(len(keys)), self._quiet_seconds)
        return _leading(done)

    def write(self, keys: Sequence[bytes], fill: Copy) -> int:
        """Write the blocks of a prefix, in its order, up to the first that cannot be written.

        Args:
            keys: keys of the blocks, in the order of the prefix.
            fill: copies a block into the whole buffer; called for the blocks that the tier lacks.

        Returns:
            How many blocks the tier has now, from the first on without a gap.
        """

        def submit(positions: Sequence[int], buffers: Sequence[memoryview]) -> int:
            return self._tier.write([keys[position] for position in positions], buffers)

        def end(position: int, _: memoryview) -> None:
            done[position] = True

        done = self.contains(keys)
        missing = [position for position, there in enumerate(done) if not there]
        self._run(_Call(self._writing, submit, end, fill), missing, self._call_seconds)
        return _leading(done)

    def touch(self, keys: Sequence[bytes]) -> None:
        """See `IndexedTier.touch`."""
        with self._lock:
            if not self._closed:
                self._tier.touch(keys)

    def clear(self) -> None:
        """See `LowerTier`."""
        with self._lock:
            if not self._closed:
                self._tier.clear()

    def close(self, flush_seconds: float = 0.0) -> bool:
        """See `LowerTier`. Calls under way are given up; later calls find nothing. Idempotent."""
        with self._lock:
            if self._closed:
                return True
            self._closed = True
            return self._tier.close(flush_seconds)

    def _run(self, call: _Call, positions: Sequence[int], quiet_seconds: float) -> None:
        """Read or write the blocks at `positions` up to the first that fails, as many at once as
        buffers are free. The call is given up if no block has ended for `quiet_seconds`."""
        now = time.monotonic()
        deadline, quiet = now + self._call_seconds, now + quiet_seconds
        begun, failed = 0, _NONE
        try:
            while call.ended or _first(call.under_way, positions[begun:]) < failed:
                batch = self._take(call, positions[begun:] if failed is _NONE else ())
                begun += len(batch)
                self._fill(call, batch)
                ended = self._exchange(call, batch)
                failed = min(failed, self._hand_over(call, ended))
                now = time.monotonic()
                if ended:
                    quiet = now + quiet_seconds
                if self._closed or now > min(quiet, deadline):
                    break
                if not ended:
                    time.sleep(_POLL_SECONDS)
        finally:
            self._give_up(call)

    def _take(self, call: _Call, positions: Sequence[int]) -> dict[int, memoryview]:
        """Take free buffers for the first of `positions`."""
        with self._lock:
            free = call.buffers.free
            return {position: free.pop() for position in positions[: len(free)]}

    def _fill(self, call: _Call, batch: dict[int, memoryview]) -> None:
        if call.fill is None:
            return
        filled = False
        try:
            for position, buffer in batch.items():
                call.fill(position, buffer)
            filled = True
        finally:
            if not filled:
                self._give_back(call, batch.values())

    def _hand_over(self, call: _Call, ended: Sequence[_Ended]) -> float:
        """Give blocks that are DONE to the caller. Returns the first position of the others."""
        failed = _NONE
        try:
            for position, buffer, outcome in ended:
                if outcome is Outcome.DONE:
                    call.end(position, buffer)
                else:
                    failed = min(failed, position)
        finally:
            self._give_back(call, [each.buffer for each in ended])
        return failed

    def _give_back(self, call: _Call, buffers: Iterable[memoryview]) -> None:
        with self._lock:
            call.buffers.free += buffers

    def _exchange(self, call: _Call, batch: dict[int, memoryview]) -> list[_Ended]:
        """Begin a batch, if it has blocks, and return the blocks of the call that have ended."""
        with self._lock:
            if self._closed:
                call.buffers.free += batch.values()
                return []
            if batch:
                ticket = call.submit(list(batch), list(batch.values()))
                self._batches[ticket] = _Batch(call, list(batch), len(batch))
                call.tickets.add(ticket)
                call.under_way |= batch
            self._take_results()
            ended, call.ended = call.ended, []
            return ended

    def _take_results(self) -> None:
        """Give the results of the tier to their calls. Under the lock."""
        for result in self._tier.poll():
            batch = self._batches[result.ticket]
            call, position = batch.call, batch.positions[result.position]
            buffer = call.under_way.pop(position)
            if call.given_up:
                call.buffers.free.append(buffer)
            else:
                call.ended.append(_Ended(position, buffer, result.outcome))
            batch.left -= 1
            if not batch.left:
                del self._batches[result.ticket]
                call.tickets.discard(result.ticket)

    def _give_up(self, call: _Call) -> None:
        """End a call, and cancel those of its blocks that have not begun."""
        with self._lock:
            call.given_up = True
            call.buffers.free += [ended.buffer for ended in call.ended]
            if not self._closed:
                for ticket in call.tickets:
                    self._tier.cancel(ticket)


def _first(under_way: Iterable[int], waiting: Sequence[int]) -> float:
    """The first position that has not ended."""
    return min([*under_way, *waiting[:1]], default=_NONE)


def _leading(done: Sequence[bool]) -> int:
    return done.index(False) if False in done else len(done)
