# SPDX-License-Identifier: Apache-2.0
"""One mover for an engine that keeps its pages in several pools.

An engine may number the pages of a sliding window apart from those of full attention. Behind this
mover, all of them have one range of block numbers: each pool has those from its first on.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flexkv.types.mover import MARKS, Direction, Mover, Status

logger = logging.getLogger(__name__)

_KEPT = 1 << 12
"""Copies that have ended and are kept, for `PoolMover.copy_seconds`."""


class NumberedPages(NamedTuple):
    """Pages that one mover copies: the number of their first among the blocks of all pools, and of
    their planes among those of all pools."""

    mover: Mover
    first: int
    planes: range


@dataclass(slots=True)
class _Copy:
    """A transfer, as the movers' transfers that it consists of. `flag` is the address of the word
    that gets the final status; 0 if none does, or if the only mover writes it. It has `failed` if a
    mover has refused its share. `seconds` are those of the longest share; None if unknown."""

    tickets: list[tuple[Mover, int]] = field(default_factory=list)
    flag: int = 0
    failed: bool = False
    seconds: float | None = None
    status: Status = Status.PENDING


class PoolMover:
    """A `Mover` over movers of several pools, in the order of their blocks; owned. Single-threaded.

    Whoever gets the flag of a transfer whose blocks are of several pools gets it once this mover
    has been polled.
    """

    def __init__(self, pools: Sequence[NumberedPages]) -> None:
        self._pools = pools
        self._firsts = np.array([pool.first for pool in pools], dtype=np.uint64)
        self._copies: dict[int, _Copy] = {}
        self._last = 0
        self._has_refused = False
        self._failed: set[int] = set()
        self._marks: dict[int, tuple[int, ...]] = {}
        self._marked = 0

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
        """See `Mover.submit`. If a mover refuses its share and another has begun, the transfer
        fails."""
        shares = list(self._shares(blocks, offsets, planes))
        marks = self._marks.get(mark) if mark else (0,) * len(self._pools)
        if marks is None:
            raise ValueError(f"mark {mark} is unknown; allowed: one of the last {MARKS}")
        own_flag, flag = (flag_address, 0) if len(shares) == 1 else (0, flag_address)
        self._last += 1
        ticket, copy = self._last, _Copy(flag=flag)
        self._copies[ticket] = copy
        try:
            for number, its_blocks, its_offsets, its_planes in shares:
                mover, follows = self._pools[number].mover, marks[number]
                # One statement, so that no error can lose a ticket.
                copy.tickets.append(
                    (
                        mover,
                        mover.submit(
                            direction,
                            its_blocks,
                            its_offsets,
                            after,
                            own_flag,
                            planes=its_planes,
                            mark=follows,
                        ),
                    )
                )
            return ticket
        except Exception as error:
            if not copy.tickets:
                del self._copies[ticket]
                raise
            if not self._has_refused:
                logger.error("a part of a copy is refused, so it fails (logged once): %r", error)
            self._has_refused = True
            # Shares under way must end before the transfer counts as failed.
            copy.failed = True
            return ticket

    def mark(self, stream: int) -> int:
        """See `Mover.mark`."""
        self._marks[self._marked + 1] = tuple(pool.mover.mark(stream) for pool in self._pools)
        self._marked += 1
        self._marks.pop(self._marked - MARKS, None)
        return self._marked

    def poll(self, ticket: int) -> Status:
        """See `Mover.poll`."""
        copy = self._copies.get(ticket)
        if copy is None:
            return Status.FAILED if ticket in self._failed else Status.DONE
        if copy.status is Status.PENDING:
            self._end(ticket, copy, [mover.poll(each) for mover, each in copy.tickets])
        return copy.status

    def copy_seconds(self, ticket: int) -> float | None:
        """See `Mover.copy_seconds`: those of the longest share."""
        copy = self._copies.get(ticket)
        return None if copy is None else copy.seconds

    def bytes_by_way(self) -> Mapping[str, int]:
        """See `Mover.bytes_by_way`."""
        total: Counter[str] = Counter()
        for pool in self._pools:
            total.update(pool.mover.bytes_by_way())
        return total

    def wait(self, ticket: int, timeout: float) -> Status:
        """See `Mover.wait`."""
        copy, end = self._copies.get(ticket), time.monotonic() + timeout
        if copy is not None and copy.status is Status.PENDING:
            for mover, each in copy.tickets:
                mover.wait(each, max(0.0, end - time.monotonic()))
        return self.poll(ticket)

    def hold(self, ticket: int, stream: int) -> Status:
        """See `Mover.hold`."""
        copy = self._copies.get(ticket)
        if copy is None or copy.status is not Status.PENDING:
            return self.poll(ticket)
        self._end(ticket, copy, [mover.hold(each, stream) for mover, each in copy.tickets])
        return copy.status

    def close(self) -> None:
        """See `Mover.close`."""
        with contextlib.ExitStack() as ends:
            for pool in self._pools:
                ends.callback(pool.mover.close)
        for ticket in list(self._copies):
            self.poll(ticket)

    def _shares(
        self, blocks: Sequence[int], offsets: Sequence[int], planes: range | None
    ) -> Iterator[tuple[int, array[int], array[int], range]]:
        """What each pool copies: its number, its blocks with their offsets, and its planes, by
        their numbers in its mover."""
        numbers = np.frombuffer(array("Q", blocks), dtype=np.uint64)
        places = np.frombuffer(array("Q", offsets), dtype=np.uint64)
        pool_of = np.searchsorted(self._firsts, numbers, side="right") - 1
        for number in np.unique(pool_of).tolist():
            pool = self._pools[number]
            own = pool.planes if planes is None else common(pool.planes, planes)
            if own:
                chosen = pool_of == number
                its = array("Q", (numbers[chosen] - np.uint64(pool.first)).tobytes())
                start = own.start - pool.planes.start
                its_offsets = array("Q", places[chosen].tobytes())
                yield number, its, its_offsets, range(start, start + len(own))

    def _end(self, ticket: int, copy: _Copy, states: Sequence[Status]) -> None:
        """Note how a transfer ended, if all its shares have."""
        if Status.PENDING in states:
            return
        status = Status.FAILED if copy.failed or Status.FAILED in states else Status.DONE
        if status is Status.FAILED:
            self._failed.add(ticket)
        else:
            seconds = [mover.copy_seconds(each) for mover, each in copy.tickets]
            copy.seconds = max((each for each in seconds if each is not None), default=None)
        if copy.flag:
            ctypes.c_uint32.from_address(copy.flag).value = status
        copy.status = status
        while len(self._copies) > _KEPT:
            oldest = next(iter(self._copies))
            if self._copies[oldest].status is Status.PENDING:
                break
            del self._copies[oldest]


def common(one: range, other: range) -> range:
    """The common part of two ranges with a step of 1."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))
