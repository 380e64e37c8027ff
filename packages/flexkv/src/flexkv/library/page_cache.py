# SPDX-License-Identifier: Apache-2.0
"""A cache of pages that a program without an engine stores and loads."""

from __future__ import annotations

import logging
import operator
import time
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from flexkv.client import CacheClient
from flexkv.engine.worker.pages import Device
from flexkv.layout import KVLayout
from flexkv.library.page_copies import (
    Copier,
    PageCopy,
    PageLoad,
    PageStore,
    find_pages,
    leading,
)
from flexkv.session import Session
from flexkv.system.forks import close_in_children
from flexkv.tiers.base import MAX_KEY_BYTES
from flexkv.types.mover import Mover

logger = logging.getLogger(__name__)

_FLUSH_PAUSE_SECONDS = 0.001
"""Pause between two polls while a flush waits for lower tiers. Not tuned."""


class PageCache:
    """Keeps the contents of pages under keys, in host memory and in lower tiers. `open_cache` makes
    it. Any thread of the process may use it.

    A *page* is the part of all tensors of the layout that has one number. A *block* is the content
    of a page. A *key* names a block; it has 1 to 96 bytes. Keys come in the order of a prefix. Each
    block builds on the one before it: it is found only if that one is found, and is evicted before
    that one. A load that fails is a miss: a page that a method counts as loaded holds the bytes
    that were stored under its key.

    Used as a context manager, it is closed at the end of the block. A process that forks keeps the
    cache to itself: every method raises in the child, except `close`.

    Keys of a call are those of a prefix from some block on, first block first. Methods raise
    TypeError or ValueError if a key or a page is not allowed or is there twice, and FlexKVError if
    the cache is closed. Copies raise RuntimeError or MemoryError if the device of the pages has
    failed, or memory is short.

    It owns the session, the cache over its arena, and the mover between that and the pages. The
    layout keeps the arrays alive that it was made from.
    """

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        session: Session,
        cache: CacheClient,
        mover: Mover,
        layout: KVLayout,
        device: Device,
        flush_seconds: float,
    ) -> None:
        self._session = session
        self._copier = Copier(cache, session.arena, mover, device.work_so_far)
        self._layout = layout  # keeps the arrays alive
        self._flush_seconds = flush_seconds
        open_caches.add(self)
        close_in_children(self)

    @property
    def cache(self) -> CacheClient:
        """The cache behind this object, for figures, and for holds of `stored_keys`. Not
        thread-safe: no other thread may use this object at the same time."""
        self._copier.check()
        return self._copier.cache

    def stored_keys(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The keys of these blocks in `cache`: others after a `clear` with the node's service."""
        keys = _checked_keys(keys)
        with self._copier.use():
            return self._copier.stored_keys(keys)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many blocks of this prefix the cache has, from the first key on. Waits only for
        shared stores, which have to be asked, and for each of them up to its deadline
        (`mooncake_question_seconds`, `objects_question_seconds`)."""
        return leading(find_pages(self._copier, _checked_keys(keys)))

    def store(
        self, keys: Sequence[bytes], pages: Iterable[SupportsIndex], after: bytes | None = None
    ) -> int:
        """Store pages, and wait until they are in host memory. The method does not wait for lower
        tiers; see `flush`. If the queue of a tier is full, the tier drops blocks; they are offered
        to it again when they are used.

        Args:
            pages: number of the page of each block.
            after: key of the block that the first one builds on; None if `keys` begin a prefix.
                If host memory lacks that block, nothing is stored.

        Returns:
            How many blocks were copied. Blocks that host memory has already are not copied, nor is
            a block that it has no room for, nor any block behind that. Of the node's service, only
            blocks that it has in host memory count. The method waits no longer for a service that
            has ended, or has not answered for a second.
        """
        return _finish(self.begin_store(keys, pages, after))

    def load(self, keys: Sequence[bytes], pages: Iterable[SupportsIndex]) -> int:
        """Load the blocks of a prefix, as far as the cache has them, into the pages of these
        numbers, and wait for that. Returns how many blocks were loaded, from the first on. Pages
        behind them hold undefined bytes."""
        return _finish(self.begin_load(keys, pages))

    def begin_store(
        self, keys: Sequence[bytes], pages: Iterable[SupportsIndex], after: bytes | None = None
    ) -> PageCopy:
        """Begin what `store` does, without waiting. The pages must not change before the copy has
        ended."""
        keys = _checked_keys(keys)
        numbers = self._checked_pages(keys, pages)
        chain = keys if after is None else _checked_keys([after, *keys])
        with self._copier.use() as cache:
            self._copier.advance()
            store = PageStore(self._copier, chain, dict(zip(keys, numbers, strict=True)))
            cache.touch(self._copier.stored_keys(keys))
            return store

    def begin_load(self, keys: Sequence[bytes], pages: Iterable[SupportsIndex]) -> PageCopy:
        """Begin what `load` does, without waiting. The pages must not be used before the copy has
        ended."""
        keys = _checked_keys(keys)
        numbers = self._checked_pages(keys, pages)
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"pages are {numbers}; allowed: each page once")
        with self._copier.use():
            copy = PageLoad(self._copier, keys, numbers)
            self._copier.advance()
            return copy

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until lower tiers have written, or dropped, the blocks that wait to be written; or
        until the node's service, whose lower tiers go on without this process, has all blocks.
        While the service hangs, blocks whose fate it has not reported wait. The wait ends after
        `timeout` seconds; None: as long as it takes. Returns whether nothing waits any more."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._copier.use() as cache:
                self._copier.advance()
                if not cache.busy and not cache.status.publishing:
                    return True
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(_FLUSH_PAUSE_SECONDS)

    def clear(self) -> None:
        """Forget every block, in lower tiers, too, because keys mean something else from now on.
        Blocks that are stored afterwards are found in this process only: the next process finds
        nothing on disk. With the node's service, other programs keep their blocks."""
        self._copier.clear()

    def close(self, flush_seconds: float | None = None) -> None:
        """End the copies under way, let lower tiers write the blocks that wait, and free the
        memory. Idempotent. In a forked child it does nothing. Errors are logged, never raised.
        `flush_seconds`: how long lower tiers may write; None takes the time of `open_cache`."""
        copier = self._copier
        if copier.gone:
            return
        with copier.use() as cache:
            for copy in list(copier.under_way):
                try:
                    copy.cancel()
                except Exception as error:  # noqa: BLE001 - the memory would never be freed
                    logger.error("a copy failed while the cache closes: %r", error)
            copier.gone = "closed"
            copier.mover.close()
            if cache.close(self._flush_seconds if flush_seconds is None else flush_seconds):
                self._session.close()
            # Else a device hangs that may still use the arena, which stays until the process ends.

    def leave_to_parent(self) -> None:
        """Refuse all calls in a forked child, which has neither the arena nor the threads."""
        self._copier.gone = "that of the process that this one was forked from"

    def __enter__(self) -> PageCache:
        self._copier.check()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        copier = getattr(self, "_copier", None)  # None if the constructor raised
        if copier is not None and not copier.gone:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)
            self.close()

    def _checked_pages(
        self, keys: Sequence[bytes], pages: Iterable[SupportsIndex]
    ) -> Sequence[int]:
        numbers = [operator.index(page) for page in pages]
        if len(numbers) != len(keys):
            raise ValueError(f"{len(keys)} keys, but {len(numbers)} pages; allowed: as many")
        count = self._layout.num_blocks
        for number in numbers:
            if not 0 <= number < count:
                raise ValueError(f"page {number} is not in the layout; allowed: 0 to {count - 1}")
        return numbers


def _checked_keys(keys: Iterable[object]) -> list[bytes]:
    if isinstance(keys, bytes | str):
        raise TypeError(f"keys is {keys!r}; allowed: a list of keys, each of them bytes")
    checked: dict[bytes, None] = {}
    for number, key in enumerate(keys):
        if not isinstance(key, bytes) or not key:
            raise TypeError(f"key {number} is {key!r}; allowed: bytes, at least one")
        if len(key) > MAX_KEY_BYTES:
            raise ValueError(
                f"key {number} has {len(key)} bytes; allowed: up to {MAX_KEY_BYTES}: a hash of it"
            )
        if key in checked:
            raise ValueError(f"key {number}, {key!r}, is a duplicate; allowed: each key once")
        checked[key] = None
    return list(checked)


def _finish(copy: PageCopy) -> int:
    """Wait for a copy, and cancel it if the wait is interrupted."""
    try:
        return copy.wait()
    except BaseException:
        copy.cancel()
        raise


open_caches: weakref.WeakSet[PageCache] = weakref.WeakSet()
"""The caches of this process, which are closed when it ends."""
