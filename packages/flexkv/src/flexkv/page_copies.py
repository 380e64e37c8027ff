# SPDX-License-Identifier: Apache-2.0
"""Copies between pages and a cache without an engine, step by step, as they are polled."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

from flexkv.cache import KVCache
from flexkv.errors import FlexKVError
from flexkv.host.arena import Arena
from flexkv.mover import Mover, Status
from flexkv.transfer.copies import Transfer
from flexkv.transfer.fetch import Fetch

_PAUSE_SECONDS = 0.0005
"""Between two looks at a lower tier that reads: less than an NVMe drive needs for a block."""

_WAIT_SECONDS = 0.1
"""Of one wait for a copy. The mover wakes earlier if the copy ends."""


class Copier:
    """Copies blocks between pages and slots, as transfers of a cache say.

    Args:
        cache: whose transfers these are.
        arena: of the cache.
        mover: of the pages.
        work_so_far: what a copy submitted now must wait for, as `Mover.submit` takes it.

    Attributes:
        cache: as given; used within `use` only.
        mover: as given.
        under_way: copies that have not ended.
        gone: why nothing can be copied any more; empty as long as it can.
    """

    def __init__(
        self, cache: KVCache, arena: Arena, mover: Mover, work_so_far: Callable[[], int]
    ) -> None:
        self.cache = cache
        self.mover = mover
        self.under_way: dict[PageCopy, None] = {}
        self.gone = ""
        self._lock = threading.RLock()
        self._arena = arena
        self._work_so_far = work_so_far

    @contextlib.contextmanager
    def use(self) -> Iterator[KVCache]:
        """The cache, for this thread alone.

        Raises:
            FlexKVError: it is closed, or not this process's.
        """
        self.check()  # in a forked child a thread that is not there may hold the lock
        with self._lock:
            self.check()
            yield self.cache

    def check(self) -> None:
        """Raise a FlexKVError if nothing can be copied any more."""
        if self.gone:
            raise FlexKVError(f"the cache is {self.gone}; allowed: a cache that is open")

    def submit(self, transfer: Transfer, pages: Sequence[int]) -> int:
        """Begin to copy between `pages` and the blocks of `transfer`; returns the ticket.

        Raises:
            RuntimeError, MemoryError: the mover refuses. The transfer fails.
        """
        board = self._arena.board
        try:
            return self.mover.submit(
                transfer.direction,
                array("Q", pages),
                array("Q", [self._arena.shard_offset(slot, 0) for slot in transfer.slots]),
                self._work_so_far(),
                board.flag_address(transfer.cell, 0),
            )
        except BaseException:
            board.report(transfer.cell, 0, Status.FAILED)
            raise

    def advance(self) -> None:
        """Take every copy as far as it gets without waiting. Within `use` only."""
        self.cache.poll()
        for copy in list(self.under_way):
            copy.advance()
            if copy.ended:
                del self.under_way[copy]


class PageCopy(ABC):
    """Pages that are being stored or loaded. Made by `PageCache.begin_store` and
    `PageCache.begin_load`; it goes on whenever the cache or a copy of the cache is used.

    Attributes:
        blocks: that were copied so far.
        ended: whether nothing more is copied.
    """

    def __init__(self, copier: Copier) -> None:
        self.blocks = 0
        self.ended = False
        self._copier = copier
        self._transfer: Transfer | None = None
        self._ticket = 0
        self._copies = False
        self._error: Exception | None = None
        copier.under_way[self] = None

    @property
    def done(self) -> bool:
        """Whether it has ended. Does not wait.

        Raises:
            FlexKVError: the cache belongs to the process that this one was forked from.
            RuntimeError, MemoryError: the device of the pages has failed, or memory is short.
        """
        if not self.ended:
            with self._copier.use():
                self._copier.advance()
        if self._error is not None:
            raise self._error
        return self.ended

    def wait(self, timeout: float | None = None) -> int:
        """How many blocks were copied, once that has ended.

        Args:
            timeout: seconds to wait at most; None for as long as it takes.

        Raises:
            TimeoutError: it has not ended by then. It goes on; `cancel` ends it.
            FlexKVError, RuntimeError, MemoryError: see `done`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            left = _WAIT_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the copy has not ended after {timeout} s")
            self._pause(min(left, _WAIT_SECONDS))
        return self.blocks

    def cancel(self) -> None:
        """Begin nothing more, and return once no page is read or written for it. What was copied
        stays where it is. Idempotent.

        Raises:
            FlexKVError: see `done`.
        """
        if self.ended:
            return
        with self._copier.use():
            self._stop()
        while not self.ended:
            self._pause(_WAIT_SECONDS)
            with self._copier.use():
                self._copier.advance()

    def advance(self) -> None:
        """See `Copier.advance`."""
        try:
            self._advance()
        except Exception as error:  # noqa: BLE001 - raised where this copy is waited for
            self._stop()
            self._error = error
            self.ended = True

    @abstractmethod
    def _advance(self) -> None:
        """Go on as far as that needs no waiting."""

    @abstractmethod
    def _stop(self) -> None:
        """Begin nothing more."""

    def _pause(self, seconds: float) -> None:
        """Let time pass until there may be news."""
        if self._copies:
            self._copier.mover.wait(self._ticket, seconds)
        else:
            time.sleep(min(seconds, _PAUSE_SECONDS))

    def _begin(self, transfer: Transfer, pages: Sequence[int]) -> None:
        self._transfer = transfer
        self._ticket = self._copier.submit(transfer, pages)
        self._copies = True

    def _take(self) -> bool:
        """Whether the copy under way has ended; counts its blocks. If it failed, so has all."""
        transfer = self._transfer
        if transfer is None:
            return True
        if transfer.status is Status.PENDING:
            return False
        self._transfer, self._copies = None, False
        if transfer.status is Status.DONE:
            self.blocks += len(transfer.blocks)
        else:
            self.ended = True
        return True


class PageStore(PageCopy):
    """A store of pages, in one transfer.

    Args:
        copier: of the cache.
        transfer: of the blocks that get a slot; None if none does.
        pages: of the blocks, by key.
    """

    def __init__(
        self, copier: Copier, transfer: Transfer | None, pages: Mapping[bytes, int]
    ) -> None:
        super().__init__(copier)
        if transfer is not None:
            self._begin(transfer, [pages[block.key] for block in transfer.blocks])

    def _advance(self) -> None:
        self.ended = self._take()

    def _stop(self) -> None:
        pass


class PageLoad(PageCopy):
    """A load of a prefix: what is in the arena, then in rounds what lower tiers bring there.

    Args:
        copier: of the cache.
        keys: of the prefix from some block on.
        pages: to load them into.
    """

    def __init__(self, copier: Copier, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        super().__init__(copier)
        self._keys = keys
        self._pages = pages
        self._fetch: Fetch | None = None
        self._stopped = False

    def _advance(self) -> None:
        if not self._take() or self.ended:
            return
        cache, rest = self._copier.cache, self._keys[self.blocks :]
        if rest and not self._stopped:
            if self._fetch is None:
                self._fetch = cache.fetch(rest)
            if self._fetch is not None and not self._fetch.done:
                return
            found = cache.lookup(rest)
            transfer = cache.load(rest[:found]) if found else None
            self._end_fetch()
            if transfer is not None:
                self._begin(transfer, self._pages[self.blocks : self.blocks + found])
                return
        self.ended = True
        if self.blocks:
            cache.record(self._keys[: self.blocks])

    def _stop(self) -> None:
        self._stopped = True
        self._end_fetch()

    def _end_fetch(self) -> None:
        if self._fetch is not None:
            self._copier.cache.end_fetch(self._fetch)
            self._fetch = None
