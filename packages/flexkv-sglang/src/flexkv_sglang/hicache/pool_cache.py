# SPDX-License-Identifier: Apache-2.0
"""The pages of one host pool, in the cache of a service: each rank's pool is one of its engines.

Pages are copied out of slots that this process holds, and into slots that were granted to it. The
service verifies what it reads from lower tiers.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Sequence

from flexkv.client import CacheClient
from flexkv.engine.key_epoch import KeyEpoch
from flexkv.engine.open_rank import closed_on_error, open_rank
from flexkv.engine.start import make_cache
from flexkv.engine.weights import digest
from flexkv.host.arena import Arena
from flexkv.library.page_copies import Copier, PageCopy, PageLoad, PageStore, find_pages, leading
from flexkv.session import Session, Shard
from flexkv.settings import CacheConfig
from flexkv.types.mover import Direction, Status
from flexkv_sglang.hicache.epochs import epoch_of
from flexkv_sglang.hicache.pool import PagePool

logger = logging.getLogger("flexkv.sglang")

_STORED_BYTES = 64 << 20
"""Bytes of the slots that are granted ahead: a drive of 4 GB/s writes them in 16 ms."""
_CALL_SECONDS = 8.0
"""The most seconds of a call. SGLang waits 10 s for its threads before it gives up a flush."""


class HostPageMover:
    """Copies pages of a pool in the caller's thread: each copy has ended when `submit` returns."""

    def __init__(self, pool: PagePool, arena: Arena) -> None:
        self._pool = pool
        self._address = arena.address

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
        """See `Mover.submit`. `blocks` are the indices of the pages' first tokens."""
        self._pool.copy(direction, blocks, [self._address + offset for offset in offsets])
        ctypes.c_uint32.from_address(flag_address).value = Status.DONE
        return 0

    def wait(self, ticket: int, timeout: float) -> Status:
        return Status.DONE

    def close(self) -> None:
        pass


class PoolCache:
    """Thread-safe. Calls wait, and raise after `close`. Owns the session, which holds the arena,
    and the service's cache; borrows the pages. `fingerprint` names those that share a pool."""

    def __init__(
        self, session: Session, cache: CacheClient, pool: PagePool, epoch: KeyEpoch
    ) -> None:
        self._session = session
        self.fingerprint = session.info.fingerprint
        mover = HostPageMover(pool, session.arena)
        self._copier = Copier(cache, session.arena, mover, lambda: 0, epoch)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each page whether it can be read. Behind the first that no tier has, shared stores
        are not asked."""
        return find_pages(self._copier, keys)

    def read(self, keys: Sequence[bytes], pages: Sequence[int]) -> int:
        """Read pages up to the first that cannot be read. Returns how many were read. `pages` are
        the indices of their first tokens."""
        with self._copier.use():
            load = PageLoad(self._copier, keys, pages)
            self._copier.advance()
        return self._end(load, time.monotonic() + _CALL_SECONDS)

    def write(self, keys: Sequence[bytes], pages: Sequence[int]) -> int:
        """Write pages up to the first for which there is no room; see `read`. Waits until lower
        tiers have made room. Returns how many the cache has now, from the first on."""
        late = time.monotonic() + _CALL_SECONDS
        with self._copier.use():
            own = self._copier.stored_keys(keys)
        for _ in range(2):  # what was begun before a clear of the service's pool is not published
            absent = self._write(keys, own, pages, late)
            if not absent or time.monotonic() > late:
                break
        return leading([place not in absent for place in range(len(keys))])

    def _write(
        self, keys: Sequence[bytes], own: Sequence[bytes], pages: Sequence[int], late: float
    ) -> set[int]:
        """Write pages, until a time. Returns the positions of those that the cache lacks then. It
        writes none if their keys are no longer `own`: the pages may be those of old weights."""
        with self._copier.use():
            if self._copier.stored_keys(keys) != own:
                return set(range(len(keys)))
            self._copier.advance()
            numbers = dict(zip(keys, pages, strict=True))
            store = PageStore(
                self._copier,
                keys,
                numbers,
                is_scattered=True,
                slot_seconds=late - time.monotonic(),
            )
        self._end(store, late)
        with self._copier.use() as cache:
            host, *_ = cache.where(self._copier.stored_keys(keys)).values()
            return {place for place in range(len(keys)) if not host[place]}

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count the use of a prefix. Its end leaves before its beginning."""
        with self._copier.use() as cache:
            cache.touch(self._copier.stored_keys(keys))
            self._copier.advance()

    def clear(self) -> None:
        """Forget all pages. Pages that are written later have other keys."""
        self._copier.clear()

    def close(self) -> None:
        """Leave the service. Idempotent."""
        if self._copier.gone:
            return
        with self._copier.use() as cache:
            self._copier.gone = "closed"
            cache.close()
            self._session.close()

    def _end(self, copy: PageCopy, late: float) -> int:
        """Wait for a copy until a time. Returns the number of copied pages."""
        try:
            return copy.wait(max(0.0, late - time.monotonic()))
        except BaseException as error:
            copy.cancel()
            if isinstance(error, TimeoutError):
                return copy.blocks
            raise


def open_pool_cache(
    config: CacheConfig, pool: PagePool, model: str, identity: Sequence[str]
) -> PoolCache:
    """Attach a pool, borrowed until the cache is closed, to the service. The service finds the
    sizes of its pool by the name `model`; pools of the same `identity` share pages. Raises
    ArenaError if no service answers, or it refuses the pool."""
    fingerprint = digest(identity)
    shard = Shard(0, fingerprint, 1, pool.page_bytes, identity=tuple(identity))
    session, _ = open_rank(config, None, shard, 1, lambda arena, threads: None, model=model)
    with closed_on_error(session):
        cache = make_cache(
            config,
            session,
            keeps_blocks=True,
            follows_requests=False,
            step_blocks=max(1, _STORED_BYTES // pool.slot_bytes),
        )
        slots = cache.info.num_slots
        logger.info("FlexKV keeps pages of HiCache's pool %r in %d blocks", pool.name, slots)
        return PoolCache(session, cache, pool, epoch_of(fingerprint))
