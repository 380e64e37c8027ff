# SPDX-License-Identifier: Apache-2.0
"""Draws what goes wrong next, and does it or has it done."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from integration.campaign import damage
from integration.campaign.engine import Server
from integration.campaign.faults import IN_ENGINE, IN_STORES, Kind, OrderBook
from integration.campaign.stores import SharedStores

_MOST_CALLS = 4
"""That one order spoils. FlexKV leaves a disk alone for 30 s after 16 failures in a row: a campaign
that did it all the time would test a disk that is not used."""
_HANG_SECONDS = 2.5
"""Longer than FlexKV waits for a disk, which is a second."""
_PATIENCE_SECONDS = 300.0
"""How long an order waits for its first call. Under load it comes within a second or two; later
where FlexKV leaves the disk alone, has to fill it anew, or the machine is slow."""
_FOREVER = 1 << 30


class Injector:
    """Lets things go wrong in `server`, one after another.

    Args:
        server: whose processes have the plugin.
        book: that the plugin obeys.
        root: of the disk tier.
        slot_bytes: of a slot there.
        kinds: of faults that come.
        stores: below the disk, or none.
        seed: decides what comes when.
        pause: waits for so many seconds, and tells of progress meanwhile.
    """

    def __init__(
        self,
        server: Server,
        book: OrderBook,
        root: Path,
        slot_bytes: int,
        *,
        kinds: Sequence[Kind],
        stores: SharedStores | None,
        seed: int,
        pause: Callable[[float], None],
    ) -> None:
        self._server = server
        self._book = book
        self._each = kinds
        self._stores = stores
        self._root = root
        self._slot_bytes = slot_bytes
        self._rng = random.Random(f"faults {seed}")
        self._pause = pause

    def run(self, seconds: float) -> None:
        """Each kind once in random order, then all again, for so long at least. Ends early if the
        server does."""
        deadline = time.monotonic() + seconds
        for number, kind in enumerate(self._kinds()):
            enough = number >= len(self._each) and time.monotonic() > deadline
            if enough or not self._server.alive:
                return
            self._inject(kind)
            self._pause(self._rng.uniform(0.1, 0.8))

    def _kinds(self) -> Iterator[Kind]:
        while True:
            yield from self._rng.sample(self._each, len(self._each))

    def _inject(self, kind: Kind) -> None:
        count, seconds = self._rng.randint(1, _MOST_CALLS), self._rng.uniform(1, 2)
        if kind is Kind.DISK_HANGS:
            self._let_hang()
        elif kind in IN_ENGINE:
            self._let_happen(kind, count, seconds)
        else:
            self._book.give(kind, 1, 0.0)
            self._do(kind, seconds)

    def _let_hang(self) -> None:
        """The disk hangs, and somebody notices."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        met = False
        while not met and time.monotonic() < deadline and self._server.alive:
            order = self._book.give(Kind.DISK_HANGS, _FOREVER, _HANG_SECONDS)
            self._pause(_HANG_SECONDS)
            met = self._hits(order.number) > 0

    def _let_happen(self, kind: Kind, count: int, seconds: float) -> None:
        """Until it has happened `count` times, or once in this time. One kind after the other, so
        that each failure has one cause."""
        order = self._book.give(kind, count, _PATIENCE_SECONDS)
        begun = time.monotonic()
        while (hits := self._hits(order.number)) < count and time.monotonic() < order.until:
            if (hits and time.monotonic() - begun > seconds) or not self._server.alive:
                break
            self._pause(0.05)
        self._book.withdraw()

    def _do(self, kind: Kind, seconds: float) -> None:
        if kind is Kind.RESET:
            self._server.forget_all()
        elif kind in IN_STORES:
            assert self._stores is not None
            self._stores.do(kind, seconds, self._rng, self._pause)
        elif kind in damage.AT_ONCE:
            files = damage.find_open_files(self._root, self._server.group, self._slot_bytes)
            files.damage(kind, self._rng)
        else:
            without = damage.gone if kind is Kind.DIRECTORY_GONE else damage.locked
            with without(self._root):
                self._pause(seconds)

    def _hits(self, number: int) -> int:
        return sum(hit.number == number for hit in self._book.hits())
