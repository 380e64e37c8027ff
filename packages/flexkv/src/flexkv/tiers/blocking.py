# SPDX-License-Identifier: Apache-2.0
"""A lower tier for callers that have threads of their own and wait in them.

Blocks pass through buffers of this class. A read or write that hangs keeps such a buffer, and never
memory of the caller, who may use its own for something else once a call has returned.
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
"""Buffers of reads, and as much of writes: a drive of 4 GB/s fills them in 16 ms, in which a
caller's thread is surely run again."""
_MOST_BUFFERS = 128
_LEAST_BUFFERS = 2
"""One is read while another is copied."""

_POLL_SECONDS = 0.0002
"""Between two looks at a tier that is at work: a fifth of what a block of 4 MiB takes."""

Copy: TypeAlias = Callable[[int, memoryview], None]
"""Copies a block of a call, given by its position, out of or into a buffer."""

_NONE = math.inf
"""Behind every position."""

_Submit: TypeAlias = Callable[[Sequence[int], Sequence[memoryview]], int]
"""Begins to read or write the blocks at some positions of a call; returns the ticket."""


class Blocks(Protocol):
    """What is used of a lower tier; see `LowerTier`."""

    @property
    def figures(self) -> TierFigures: ...

    def contains(self, keys: Sequence[bytes]) -> list[bool]: ...

    def read(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], priority: Priority
    ) -> int: ...

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int: ...

    def clear(self) -> None: ...

    def cancel(self, ticket: int) -> None: ...

    def poll(self) -> list[BlockResult]: ...

    def close(self, flush_seconds: float = 0.0) -> bool: ...


class _Buffers:
    """Memory for the blocks of one direction; each begins at a multiple of 4 KiB."""

    def __init__(self, slot_bytes: int) -> None:
        count = max(_LEAST_BUFFERS, min(_MOST_BUFFERS, BUFFER_BYTES // slot_bytes))
        memory = memoryview(mmap.mmap(-1, count * slot_bytes))
        starts = range(0, count * slot_bytes, slot_bytes)
        self.free = [memory[start : start + slot_bytes] for start in starts]


@dataclass(slots=True, eq=False)
class _Call:
    """A read or write that its caller waits for.

    Attributes:
        buffers: where those that it holds come from.
        submit: begins a batch; called under the lock.
        end: is told of each block that is done.
        fill: prepares a buffer.
        given_up: nobody waits any more; its buffers are free as they come back.
        tickets: of its batches that have not ended.
        under_way: buffer of each block that has not ended, by the block's position in the call.
        ended: blocks that have ended and the caller has not seen.
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
    """What the tier works on under one ticket.

    Attributes:
        call: of which it is a part.
        positions: of its blocks in the call.
        left: blocks that have not ended.
    """

    call: _Call
    positions: list[int]
    left: int


class BlockingTier:
    """Reads and writes that return when they are done. Any number of threads may call.

    Args:
        tier: owned; nobody else calls it.
        slot_bytes: of a block.
        quiet_seconds: a read is given up when no block of it has ended for so long.
        call_seconds: a call is given up after so long in any case.
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
            self._settle()
            return self._tier.figures

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether its block can be read now."""
        with self._lock:
            if self._closed:
                return [False] * len(keys)
            self._settle()
            return self._tier.contains(keys)

    def read(self, keys: Sequence[bytes], take: Copy) -> int:
        """Read blocks up to the first that cannot be read.

        Args:
            keys: of the blocks.
            take: is given each block that was read and verified, in any order, some of those
                behind the first that failed too; the buffer is valid until it returns.

        Returns:
            How many blocks from the first on `take` was given.
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
            keys: of the blocks.
            fill: is to copy a block into the buffer, all of which is written; called for those
                that the tier does not have.

        Returns:
            How many blocks from the first on the tier has now.
        """

        def submit(positions: Sequence[int], buffers: Sequence[memoryview]) -> int:
            return self._tier.write([keys[position] for position in positions], buffers)

        def end(position: int, _: memoryview) -> None:
            done[position] = True

        done = self.contains(keys)
        missing = [position for position, there in enumerate(done) if not there]
        self._run(_Call(self._writing, submit, end, fill), missing, self._call_seconds)
        return _leading(done)

    def clear(self) -> None:
        """See `LowerTier`."""
        with self._lock:
            if not self._closed:
                self._tier.clear()

    def close(self, flush_seconds: float = 0.0) -> bool:
        """See `LowerTier`. Calls under way are given up, later ones find nothing. Idempotent."""
        with self._lock:
            if self._closed:
                return True
            self._closed = True
            return self._tier.close(flush_seconds)

    def _run(self, call: _Call, positions: Sequence[int], quiet_seconds: float) -> None:
        """Have the tier work on the blocks at `positions` up to the first that fails, as buffers
        are free. No block may end for `quiet_seconds` at most."""
        now = time.monotonic()
        deadline, quiet = now + self._call_seconds, now + quiet_seconds
        begun, failed = 0, _NONE
        try:
            while call.ended or _first(call.under_way, positions[begun:]) < failed:
                batch = self._take(call, positions[begun:] if failed is _NONE else ())
                begun += len(batch)
                self._fill(call, batch)
                ended = self._exchange(call, batch)
                for position, buffer, outcome in ended:
                    if outcome is Outcome.DONE:
                        call.end(position, buffer)
                    else:
                        failed = min(failed, position)
                self._give_back(call, [each.buffer for each in ended])
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
        """Buffers for the first of `positions`, as many as are free."""
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

    def _give_back(self, call: _Call, buffers: Iterable[memoryview]) -> None:
        with self._lock:
            call.buffers.free += buffers

    def _exchange(self, call: _Call, batch: dict[int, memoryview]) -> list[_Ended]:
        """Begin a batch if there is one; return what has ended of the call."""
        with self._lock:
            if self._closed:
                call.buffers.free += batch.values()
                return []
            if batch:
                ticket = call.submit(list(batch), list(batch.values()))
                self._batches[ticket] = _Batch(call, list(batch), len(batch))
                call.tickets.add(ticket)
                call.under_way |= batch
            self._settle()
            ended, call.ended = call.ended, []
            return ended

    def _settle(self) -> None:
        """Hand what the tier has ended to the calls. Under the lock."""
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
        """End a call: what has not begun of it does not begin."""
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
