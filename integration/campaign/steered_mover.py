# SPDX-License-Identifier: Apache-2.0
"""A mover that fails when ordered, and leaves wrong bytes where it should have copied to."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flexkv import Mover
from flexkv.layout import PlacedPlane
from flexkv.types.mover import Direction, Status
from integration.campaign.faults import Kind, Steering

_KINDS = {
    Direction.LOAD: (Kind.LOAD_REFUSED, Kind.LOAD_FAILED, Kind.LOAD_LATE, Kind.LOAD_WRONG),
    Direction.STORE: (Kind.STORE_REFUSED, Kind.STORE_FAILED, Kind.STORE_LATE),
}
LATE_SECONDS = 0.2
"""Some steps of the engine: it goes on meanwhile, and may want the blocks for others."""
_POISON = 0x41
"""Makes each float32 about 12: finite, because attention may multiply rows that it does not use by
zero; and far from what a model's KV holds."""


@dataclass(slots=True)
class _Held:
    """A transfer that is not with the real mover. `begin` gives it to that; None: it fails."""

    due: float
    flag_address: int
    begin: Callable[[], int] | None
    ticket: int | None = None
    status: Status = Status.PENDING


class SteeredMover:
    """Wraps `inner`, as `steering` lets it work. See `Mover`.

    Args:
        inner: the real one; owned.
        planes: that loads fill.
        stored: which of them stores copy.
        arena_address: of the arena in this process.
        steering: says what goes wrong.
    """

    def __init__(
        self,
        inner: Mover,
        planes: Sequence[PlacedPlane],
        stored: range,
        arena_address: int,
        steering: Steering,
    ) -> None:
        self._inner = inner
        self._planes = planes
        self._stored = stored
        self._arena = arena_address
        self._steering = steering
        self._held: dict[int, _Held] = {}
        self._next = -1

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
        """As `Mover.submit`; tickets of transfers that it holds back are negative."""

        def begin() -> int:
            return self._inner.submit(
                direction, blocks, offsets, after, flag_address, planes=planes, mark=mark
            )

        fault = self._steering.draw(_KINDS[direction], len(blocks))
        if fault is None:
            return begin()
        if fault in (Kind.LOAD_REFUSED, Kind.STORE_REFUSED):
            raise ValueError("refused by the campaign")
        if fault is Kind.LOAD_WRONG:
            ticket = begin()
            while self._inner.wait(ticket, 1.0) is Status.PENDING:
                pass
            self._poison_pages(blocks, planes)
            return ticket
        fails = fault in (Kind.LOAD_FAILED, Kind.STORE_FAILED)
        if fault is Kind.LOAD_FAILED:
            self._poison_pages(blocks, planes)
        elif fault is Kind.STORE_FAILED:
            self._poison_slots(offsets)
        ticket, self._next = self._next, self._next - 1
        self._held[ticket] = _Held(
            time.monotonic() + LATE_SECONDS, flag_address, None if fails else begin
        )
        return ticket

    def poll(self, ticket: int) -> Status:
        held = self._held.get(ticket)
        return self._inner.poll(ticket) if held is None else self._advance(held, 0.0)

    def wait(self, ticket: int, timeout: float) -> Status:
        held = self._held.get(ticket)
        if held is None:
            return self._inner.wait(ticket, timeout)
        time.sleep(max(0.0, min(timeout, held.due - time.monotonic())))
        return self._advance(held, timeout)

    def mark(self, stream: int) -> int:
        return self._inner.mark(stream)

    def copy_seconds(self, ticket: int) -> float | None:
        held = self._held.get(ticket)
        inner = ticket if held is None else held.ticket
        return None if inner is None else self._inner.copy_seconds(inner)

    def bytes_by_way(self) -> Mapping[str, int]:
        return self._inner.bytes_by_way()

    def hold(self, ticket: int, stream: int) -> Status:
        if ticket not in self._held:
            return self._inner.hold(ticket, stream)
        while (status := self.wait(ticket, 1.0)) is Status.PENDING:
            pass
        return status

    def close(self) -> None:
        for held in self._held.values():
            if held.ticket is None and held.status is Status.PENDING:
                _fail(held)
        self._inner.close()

    def _advance(self, held: _Held, timeout: float) -> Status:
        if held.status is not Status.PENDING or time.monotonic() < held.due:
            return held.status
        if held.begin is None:
            _fail(held)
            return held.status
        if held.ticket is None:
            held.ticket = held.begin()
        held.status = self._inner.wait(held.ticket, timeout)
        return held.status

    def _poison_pages(self, blocks: Sequence[int], planes: range | None) -> None:
        for plane in self._planes if planes is None else self._planes[planes.start : planes.stop]:
            for block in blocks:
                page = plane.base + block * plane.block_stride
                for row in range(plane.rows):
                    ctypes.memset(page + row * plane.row_stride, _POISON, plane.row_bytes)

    def _poison_slots(self, offsets: Sequence[int]) -> None:
        for plane in (self._planes[i] for i in self._stored):
            for offset in offsets:
                place = self._arena + offset + plane.slot_offset
                ctypes.memset(place, _POISON, plane.page_bytes)


def _fail(held: _Held) -> None:
    """As a mover does it: the word is written once."""
    held.status = Status.FAILED
    if held.flag_address:
        ctypes.c_uint32.from_address(held.flag_address).value = Status.FAILED
