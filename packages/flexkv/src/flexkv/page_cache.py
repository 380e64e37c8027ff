# SPDX-License-Identifier: Apache-2.0
"""A cache of pages that a program without an engine stores and loads."""

from __future__ import annotations

import operator
import time
import warnings
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import SupportsIndex

from flexkv.adapter.pages import Device
from flexkv.cache import KVCache
from flexkv.forks import close_in_children
from flexkv.host.session import Session
from flexkv.layout import KVLayout
from flexkv.mover import Mover
from flexkv.page_copies import Copier, PageCopy, PageLoad, PageStore
from flexkv.presence import Presence
from flexkv.tiers.base import MAX_KEY_BYTES

_FLUSH_PAUSE_SECONDS = 0.001


class PageCache:
    """Blocks of pages under keys, in host memory and, if the settings say so, on disk. Made by
    `open_cache`. Any thread of the process may use it.

    A *page* is what all tensors of the layout hold under one number. A *key* is bytes that name a
    block, which is the content of one page. Keys come in the order of a prefix: each block builds
    on the one before it, is found only if that one is, and leaves the cache before it. A load that
    fails is a miss: a page that a method counts as loaded holds what was stored under its key.

    Used as a context manager, it is closed at the end of the block. A process that forks keeps the
    cache to itself: every method raises in the child, except `close`.

    Args:
        session: with the arena; owned.
        cache: over that arena; owned.
        mover: of the pages; owned.
        layout: of the pages.
        device: that they are on.
        flush_seconds: see `close`.
    """

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        session: Session,
        cache: KVCache,
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
    def cache(self) -> KVCache:
        """Pins, counters and figures. Not thread-safe: use it only where no other thread uses this
        object meanwhile."""
        self._copier.check()
        return self._copier.cache

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many blocks of this prefix the cache has, from the first key on.

        Args:
            keys: of the prefix from some block on, first block first.
        """
        keys = _checked_keys(keys)
        with self._copier.use() as cache:
            self._copier.advance()
            places = cache.presence(keys)
        absent = (number for number, place in enumerate(places) if place is Presence.ABSENT)
        return next(absent, len(keys))

    def store(
        self, keys: Sequence[bytes], pages: Iterable[SupportsIndex], after: bytes | None = None
    ) -> int:
        """Store pages, and wait until they are in host memory, but not for a disk: blocks that its
        queue has no room for are not written before they are used again; see `flush`.

        Args:
            keys: of the blocks, in the order of the prefix.
            pages: number of the page of each block.
            after: key of the block that the first one builds on; None if `keys` begin a prefix.
                Nothing is stored if that block is not in host memory.

        Returns:
            How many blocks were copied. Those that host memory has already are not; nor are those
            that it has no room for, and all behind them.

        Raises:
            TypeError, ValueError: a key or a page is not one, or is there twice.
            FlexKVError: the cache is closed.
        """
        return _finish(self.begin_store(keys, pages, after))

    def load(self, keys: Sequence[bytes], pages: Iterable[SupportsIndex]) -> int:
        """Load the blocks of a prefix, as far as the cache has them, and wait for that.

        Args:
            keys: of the prefix from some block on, first block first.
            pages: number of the page to fill with each block.

        Returns:
            How many blocks were loaded, from the first on. Pages behind them hold undefined bytes.

        Raises:
            TypeError, ValueError: a key or a page is not one, or is there twice.
            FlexKVError: the cache is closed.
        """
        return _finish(self.begin_load(keys, pages))

    def begin_store(
        self, keys: Sequence[bytes], pages: Iterable[SupportsIndex], after: bytes | None = None
    ) -> PageCopy:
        """As `store`, without waiting: the pages must not change before the copy has ended."""
        keys = _checked_keys(keys)
        numbers = self._checked_pages(keys, pages)
        chain = keys if after is None else _checked_keys([after, *keys])
        with self._copier.use() as cache:
            self._copier.advance()
            absent = cache.missing(chain, len(chain) - len(keys))
            transfer = cache.store(chain, absent) if absent else None
            cache.touch(keys)
            return PageStore(self._copier, transfer, dict(zip(keys, numbers, strict=True)))

    def begin_load(self, keys: Sequence[bytes], pages: Iterable[SupportsIndex]) -> PageCopy:
        """As `load`, without waiting: the pages must not be used before the copy has ended."""
        keys = _checked_keys(keys)
        numbers = self._checked_pages(keys, pages)
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"pages are {numbers}; allowed: each page once")
        with self._copier.use():
            copy = PageLoad(self._copier, keys, numbers)
            self._copier.advance()
            return copy

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until lower tiers have written, or dropped, what waits to be written there.

        Args:
            timeout: seconds to wait at most; None for as long as it takes.

        Returns:
            Whether nothing waits any more.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._copier.use() as cache:
                self._copier.advance()
                if not cache.busy:
                    return True
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(_FLUSH_PAUSE_SECONDS)

    def clear(self) -> None:
        """Forget every block, on disk too, because the keys stand for something else from now on.
        What is stored afterwards stays in this process: the next one finds nothing on disk."""
        with self._copier.use() as cache:
            cache.clear()

    def close(self, flush_seconds: float | None = None) -> None:
        """End the copies under way, write to lower tiers what waits, and free the memory.
        Idempotent; in a forked child it does nothing.

        Args:
            flush_seconds: how long lower tiers may write; None takes what `open_cache` was given.
        """
        copier = self._copier
        if copier.gone:
            return
        with copier.use() as cache:
            for copy in list(copier.under_way):
                copy.cancel()
            copier.gone = "closed"
            copier.mover.close()
            if cache.close(self._flush_seconds if flush_seconds is None else flush_seconds):
                self._session.close()
            # Else a device hangs that may still use the arena: it stays until the process ends.

    def leave_to_parent(self) -> None:
        """Called in a forked child, which has neither the arena nor the threads."""
        self._copier.gone = "that of the process that this one was forked from"

    def __enter__(self) -> PageCache:
        self._copier.check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
    """Wait for a copy. If that is interrupted, no page is read or written any more."""
    try:
        return copy.wait()
    except BaseException:
        copy.cancel()
        raise


open_caches: weakref.WeakSet[PageCache] = weakref.WeakSet()
"""Those that may have to be closed."""
