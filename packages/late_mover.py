# SPDX-License-Identifier: Apache-2.0
"""A mover that copies as late as its contract allows, and fails when told to.

It puts off each transfer until it was polled a random number of times (or waited for), then lets
the real mover do it. So a block that is freed or overwritten before its store is done is copied
with the wrong bytes, which an eager mover would hide by being fast.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexkv import Mover
from flexkv.types.mover import Direction, Status
from packages.conftest import PATIENCE_SECONDS


@dataclass(slots=True)
class Waiting:
    direction: Direction
    blocks: Sequence[int]
    offsets: Sequence[int]
    flag_address: int
    planes: range | None
    polls: int


_FIRST_TICKET = 1 << 40
"""Smaller ones are the real mover's, of transfers that began before."""


class LateMover:
    """Wraps `inner`; see above.

    Args:
        polls: least and most times that a transfer is polled before it is begun.
        failure_rate: share of transfers refused with an error.

    Attributes:
        polls: may be changed.
        failure_rate: may be changed.
        failing: directions of those that it is the share of; may be changed.
        refused: how many were.
    """

    def __init__(
        self, inner: Mover, rng: random.Random, polls: tuple[int, int], failure_rate: float
    ) -> None:
        self._inner = inner
        self._rng = rng
        self.polls = polls
        self.failure_rate = failure_rate
        self.failing = frozenset(Direction)
        self._waiting: dict[int, Waiting] = {}
        self._tickets: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._closed = False
        self._next = _FIRST_TICKET
        self.refused = 0

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
        if self._closed:
            raise RuntimeError("the mover is closed")
        if direction in self.failing and self._rng.random() < self.failure_rate:
            self.refused += 1
            raise ValueError("refused by the test")
        ticket, self._next = self._next, self._next + 1
        polls = self._rng.randint(*self.polls)
        self._waiting[ticket] = Waiting(direction, blocks, offsets, flag_address, planes, polls)
        return ticket

    def poll(self, ticket: int) -> Status:
        waiting = self._waiting.get(ticket)
        if waiting is not None:
            waiting.polls -= 1
            if waiting.polls >= 0:
                return Status.PENDING
        return self.wait(ticket, PATIENCE_SECONDS)

    def wait(self, ticket: int, timeout: float) -> Status:
        if ticket in self._dropped:
            return Status.FAILED
        waiting = self._waiting.get(ticket)
        if waiting is not None and timeout < 1 and waiting.polls > 0:
            return Status.PENDING  # a short wait need not end with the transfer
        if waiting is not None:
            self._tickets[ticket] = self._inner.submit(
                waiting.direction,
                waiting.blocks,
                waiting.offsets,
                0,
                waiting.flag_address,
                planes=waiting.planes,
            )
            del self._waiting[ticket]  # only now: a later call tries again after an error
        return self._inner.wait(self._tickets.get(ticket, ticket), timeout)

    def mark(self, stream: int) -> int:
        raise ValueError("the test's pages are in CPU memory")

    def copy_seconds(self, ticket: int) -> float | None:
        inner = self._tickets.get(ticket, ticket)
        return None if inner >= _FIRST_TICKET else self._inner.copy_seconds(inner)

    def bytes_by_way(self) -> Mapping[str, int]:
        return self._inner.bytes_by_way()

    def hold(self, ticket: int, stream: int) -> Status:
        if stream != 0:
            raise ValueError("the test's pages are in CPU memory")
        return self.wait(ticket, PATIENCE_SECONDS)

    def catch_up(self) -> None:
        """Begin all that was put off."""
        for ticket in list(self._waiting):
            self.wait(ticket, PATIENCE_SECONDS)

    def close(self) -> None:
        self._closed = True
        for waiting in self._waiting.values():
            if waiting.flag_address:
                word = ctypes.c_uint32.from_address(waiting.flag_address)
                word.value = Status.FAILED
        self._dropped.update(self._waiting)
        self._waiting.clear()
        self._inner.close()
