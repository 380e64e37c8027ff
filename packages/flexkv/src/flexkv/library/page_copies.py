# SPDX-License-Identifier: Apache-2.0
"""Copies between pages and a cache without an engine. Each goes on, step by step, when polled."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

from flexkv.client import CacheClient, FetchId, Reset, Transfer
from flexkv.engine.key_epoch import KeyEpoch
from flexkv.host.arena import Arena
from flexkv.types.changes import Medium
from flexkv.types.errors import FlexKVError
from flexkv.types.mover import BlockMover, Status
from flexkv.types.presence import Presence

_PAUSE_SECONDS = 0.0005
"""Pause between two polls of a lower tier that reads or a shared store that is asked: less than an
NVMe drive needs for a block."""

_BLOCKS_A_POLL = 16
"""The least number of waiting blocks that a poll begins to write to a lower tier; see
`flexkv.transfer.demote`."""

SLOT_SECONDS = 0.25
"""Seconds for which a store waits for slots of the node's service, which grants them in
milliseconds if it has any. Not tuned."""

_WAIT_SECONDS = 0.1
"""Seconds of one wait for a copy. The mover ends the wait earlier if the copy ends. Not tuned."""


class Copier:
    """Copies blocks between pages and slots by the transfers of a cache. Any thread may call it.
    `epoch` is that of the keys; None for one of this object's own.

    Attributes:
        cache: used within `use` only.
        under_way: the copies that have not ended.
        gone: why nothing can be copied any more; empty while copies are possible.
    """

    def __init__(
        self,
        cache: CacheClient,
        arena: Arena,
        mover: BlockMover,
        work_so_far: Callable[[], int],
        epoch: KeyEpoch | None = None,
    ) -> None:
        self.cache = cache
        self._epoch = epoch or KeyEpoch()
        self.mover = mover
        self.under_way: dict[PageCopy, None] = {}
        self.gone = ""
        self._lock = threading.RLock()
        self._copying: dict[int, PageCopy] = {}
        from flexkv.engine.worker.rank_copies import RankSlots  # `import flexkv` needs no numpy

        self._slots = RankSlots(arena, 0)
        self._work_so_far = work_so_far

    @contextlib.contextmanager
    def use(self) -> Iterator[CacheClient]:
        """Lock the cache for this thread, and return it. See `check` for what this raises."""
        self.check()  # in a forked child the lock may be held by a thread of the parent
        with self._lock:
            self.check()
            yield self.cache

    def check(self) -> None:
        """Raise a FlexKVError if nothing can be copied any more."""
        if self.gone:
            raise FlexKVError(f"the cache is {self.gone}; allowed: a cache that is open")

    def stored_keys(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The keys by which the cache knows these blocks now. Within `use` only."""
        end = self._epoch.end
        return [key + end for key in keys] if end else keys

    def clear(self) -> None:
        """Forget all blocks, and begin no further transfer of the copies under way. Others that
        share the cache keep theirs, so that later blocks get other keys. If this raises, nothing is
        found until it succeeds."""
        with self.use() as cache:
            cache.reset(Reset.SUSPEND)
            for copy in self.under_way:
                copy.stop()
            cache.reset(Reset.CLEAR)
            if cache.info.is_shared:
                self._epoch.renew()

    def submit(self, copy: PageCopy, transfer: Transfer, pages: Sequence[int]) -> int:
        """Copy between pages and the blocks of a transfer of `copy`. Returns the mover's ticket. If
        the mover refuses, this raises, and the transfer fails."""
        self._copying[transfer.id] = copy
        try:
            offsets, after = self._slots.offsets(transfer.slots), self._work_so_far()
            return self._slots.submit(
                self.mover, transfer.direction, transfer.cell, pages, offsets, after
            )
        except BaseException:
            self._slots.report(transfer.cell, Status.FAILED)
            raise

    def advance(self) -> None:
        """Poll the cache, and let every copy go on as far as it can without waiting. Within `use`
        only.

        When copies have ended, lower tiers begin to write all of their blocks: until its next call
        the program may compute for hours."""
        self._poll()
        ended = 0
        for copy in list(self.under_way):
            copy.advance()
            if copy.ended:
                del self.under_way[copy]
                ended += copy.blocks
        if ended and self.cache.info.media:
            for _ in range(1 + -(-ended // _BLOCKS_A_POLL)):
                self._poll()

    def _poll(self) -> None:
        for each in self.cache.poll():
            copy = self._copying.pop(each.id, None)
            if copy is not None:
                copy.transfer_ended(done=each.done)


class PageCopy(ABC):
    """A store or load of pages. `PageCache.begin_store` and `PageCache.begin_load` make it. It goes
    on whenever the cache, or any copy of the cache, is used.

    Attributes:
        blocks: how many blocks were copied so far.
        ended: whether the copy has ended, with or without an error.
    """

    def __init__(self, copier: Copier) -> None:
        self.blocks = 0
        self.ended = False
        self._copier = copier
        self._transfer: Transfer | None = None  # copied or being copied, and not counted
        self._is_copying = False
        self._ticket: int | None = None
        self._error: Exception | None = None
        copier.under_way[self] = None

    @property
    def done(self) -> bool:
        """Whether the copy has ended. Does not wait.

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
        """Wait until the copy has ended, and return how many blocks were copied. Raises as `done`
        does, and TimeoutError after `timeout` seconds: the copy goes on, and `cancel` ends it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            left = _WAIT_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the copy has not ended after {timeout} s")
            self._pause(min(left, _WAIT_SECONDS))
        return self.blocks

    def cancel(self) -> None:
        """End the copy early, and wait until it reads and writes no page. Blocks that were copied
        stay. Idempotent. Raises FlexKVError; see `done`."""
        if self.ended:
            return
        with self._copier.use():
            self.stop()
        while not self.ended:
            self._pause(_WAIT_SECONDS)
            with self._copier.use():
                self._copier.advance()

    def advance(self) -> None:
        """See `Copier.advance`."""
        if self.ended or self._is_copying:
            return
        try:
            self._advance()
        except Exception as error:  # noqa: BLE001 - raised where this copy is waited for
            self.stop()
            # Without the calls that it came from, which may hold views of the arena.
            self._error = error.with_traceback(None)
            self._error.__context__ = self._error.__cause__ = None
            self.ended = True

    @abstractmethod
    def _advance(self) -> None:
        """No transfer is under way: count the last one, and begin the next."""

    @abstractmethod
    def stop(self) -> None:
        """Begin no further transfer."""

    def _pause(self, seconds: float) -> None:
        """Wait until the mover has copied, or for at most `seconds`."""
        if self._ticket is not None:
            self._copier.mover.wait(self._ticket, seconds)
        else:
            time.sleep(min(seconds, _PAUSE_SECONDS))

    def transfer_ended(self, *, done: bool) -> None:
        """The transfer under way has ended. If it failed, the copy ends."""
        self._is_copying, self._ticket = False, None
        self.ended = self.ended or not done

    def _begin(self, transfer: Transfer, pages: Sequence[int]) -> None:
        self._transfer, self._is_copying = transfer, True
        self._ticket = self._copier.submit(self, transfer, pages)


class PageStore(PageCopy):
    """A store of pages: in one transfer, or in rounds, if the node's service grants the slots. It
    ends once lookups find its blocks, or the service is silent. Blocks that the service has not
    published do not count.

    Args:
        chain: keys of the blocks, behind that of the block that they build on, if there is one.
        is_scattered: whether each block is found without the one before it.
        slot_seconds: seconds to wait for slots of the node's service, if it grants none.
    """

    def __init__(
        self,
        copier: Copier,
        chain: Sequence[bytes],
        pages: Mapping[bytes, int],
        *,
        is_scattered: bool = False,
        slot_seconds: float = SLOT_SECONDS,
    ) -> None:
        super().__init__(copier)
        self._chain = copier.stored_keys(chain)
        own = copier.stored_keys([*pages])
        self._pages = dict(zip(own, pages.values(), strict=True))
        self._starts = range(len(chain)) if is_scattered else (0,)
        self._next = len(chain) - len(pages)
        self._slot_seconds = slot_seconds
        self._late = time.monotonic() + slot_seconds
        self._store()

    def _advance(self) -> None:
        cache, copied = self._copier.cache, self._transfer
        status = cache.status
        if copied is not None and copied.id in status.publishing and not status.is_silent:
            return
        if copied is not None:
            self.blocks += sum(map(bool, cache.where(copied.keys)[Medium.HOST]))
            self._transfer = None
        self.ended = status.is_silent or (copied is not None and not cache.info.is_shared)
        if not self.ended:
            self._store()

    def _store(self) -> None:
        """Store the blocks that are behind those of the last round and have no slot. Blocks that a
        round has stored and that have left again are not stored anew, which might have no end."""
        cache = self._copier.cache
        absent = cache.missing(self._chain, self._next)
        transfer = cache.store(self._chain, absent, self._starts) if absent else None
        if transfer is not None:
            self._next = 1 + self._chain.index(transfer.keys[-1])
            self._late = time.monotonic() + self._slot_seconds
            self._begin(transfer, [self._pages[key] for key in transfer.keys])
        elif not (absent and cache.status.awaits_slots) or time.monotonic() > self._late:
            self.ended = True

    def stop(self) -> None:
        self._next = len(self._chain)


class PageLoad(PageCopy):
    """A load of a prefix: first the blocks in the arena, then, round by round, the blocks that
    lower tiers give. So a prefix may be larger than the arena."""

    def __init__(self, copier: Copier, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        super().__init__(copier)
        self._keys = copier.stored_keys(keys)
        self._pages = pages
        self._fetch: FetchId | None = None
        self._stopped = False

    def _advance(self) -> None:
        if self._transfer is not None:
            self.blocks += len(self._transfer.slots)
            self._transfer = None
        cache, rest = self._copier.cache, self._keys[self.blocks :]
        if rest and not self._stopped:
            if self._fetch is None:
                self._fetch = cache.fetch(rest)
            if self._fetch is not None and not cache.fetch_state(self._fetch).done:
                return
            found = cache.lookup(rest)
            if not found and self._waits_for_others(rest):
                return
            transfer = cache.load(rest[:found]) if found else None
            self._end_fetch()
            if transfer is not None:
                self._begin(transfer, self._pages[self.blocks : self.blocks + found])
                return
        self.ended = True
        if self.blocks:
            cache.record(self._keys[: self.blocks])

    def stop(self) -> None:
        self._stopped = True
        self._end_fetch()

    def _waits_for_others(self, rest: Sequence[bytes]) -> bool:
        """Whether other loads hold as many blocks of the node's service as they may."""
        cache = self._copier.cache
        return (
            cache.info.is_shared
            and bool(cache.status.loading_blocks)
            and not cache.missing(rest[:1])
        )

    def _end_fetch(self) -> None:
        if self._fetch is not None:
            self._copier.cache.end_fetch(self._fetch)
            self._fetch = None


def find_pages(copier: Copier, asked: Sequence[bytes]) -> list[bool]:
    """For each block of a prefix whether the cache has it. Waits for each shared store up to its
    deadline. Behind the first block that no tier has, stores are not asked."""
    while True:
        with copier.use() as cache:
            copier.advance()
            is_shared, keys = cache.info.is_shared, copier.stored_keys(asked)
            asks = cache.info.must_query and not is_shared and cache.query(keys)
            places = cache.presence(keys)
            found = [place in {Presence.HOST, Presence.BELOW} for place in places]
            count = leading(found)
            is_known = count == len(keys) or places[count] is Presence.ABSENT
            fetch = None
            if not is_known and is_shared:
                fetch = cache.fetch(keys[count:], queued=True)  # the service asks its stores
        if fetch is not None:
            more = _count_coming(copier, fetch)
            found[count : count + more] = [True] * more
        if fetch is not None or is_known or not asks:
            return found
        time.sleep(_PAUSE_SECONDS)


def leading(found: Sequence[bool]) -> int:
    """The number of blocks before the first that is missing."""
    return found.index(False) if False in found else len(found)


def _count_coming(copier: Copier, fetch: FetchId) -> int:
    """How many blocks a fetch can bring. Ends it."""
    try:
        while True:
            with copier.use() as cache:
                copier.advance()
                state = cache.fetch_state(fetch)
            if state.queried is None or state.done:
                return state.stop
            time.sleep(_PAUSE_SECONDS)
    finally:
        with copier.use() as cache:
            cache.end_fetch(fetch)
