# SPDX-License-Identifier: Apache-2.0
"""Keeps the pages of HiCache's host pools on disk, in a folder for each pool.

Imports nothing of SGLang. Once the folders are open, nothing here raises: a failure is a miss.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

import torch

from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.weights import digest
from flexkv.settings import GIB, CacheConfig
from flexkv.tiers.base import TierFigures
from flexkv.tiers.blocking import BlockingTier, Blocks
from flexkv.tiers.disk import MAX_OWNERS, DiskTier, open_disk_tier
from flexkv.tiers.disk.follower import FollowerTier
from flexkv.types.errors import ConfigError
from flexkv_sglang.hicache.place import Place
from flexkv_sglang.hicache.pool import HostPool, PagePool

logger = logging.getLogger("flexkv.sglang")

CALL_SECONDS = 8.0
"""The most seconds of a call. SGLang waits 10 s for its threads before it gives up a flush."""
_QUEUE_BYTES = 256 << 20
"""The most bytes of pages that wait to be written. Callers wait for their pages, so this is more
than one call brings. Not tuned."""
FLUSH_SECONDS = 1.0
"""Seconds for which waiting pages are still written when the process ends. Not tuned."""


class PoolStores:
    """Keeps the pages of all host pools of a rank on disk. Thread-safe.

    The caller adds all pools first. `open` then opens their folders; without it, the first call
    does.

    Args:
        config: FlexKV's settings.
        place: the place of this rank.
        model: all that the bytes of a page depend on, except pool, rank and key.
        boundary: counts and logs errors.

    Raises:
        ConfigError: the settings name no disk.
    """

    def __init__(
        self, config: CacheConfig, place: Place, model: Sequence[str], boundary: ErrorBoundary
    ) -> None:
        if config.ssd_cache_gb is None:
            raise ConfigError(
                "ssd_cache_gb and ssd_cache_dir are not set; allowed for HiCache: both "
                "(FLEXKV_SSD_CACHE_GB, FLEXKV_SSD_CACHE_DIR), because FlexKV keeps HiCache's pages "
                "on disk only"
            )
        self._config = config
        self._place = place
        self._model = list(model)
        self._boundary = boundary
        self._lock = threading.Lock()
        self._opened = False
        self._cleared = True
        self._pools: dict[str, PagePool] = {}
        self._stores: dict[str, BlockingTier] = {}

    def add(self, name: str, pool: HostPool) -> None:
        """Add a pool. It replaces a pool of the same name. Once the folders are open, a new pool
        has no room there: it is refused with a warning, and all of its pages are misses.

        Args:
            name: SGLang's name of the pool.
            pool: the pool; borrowed until `close`.

        Raises:
            LayoutError: FlexKV cannot keep pages of this pool.
        """
        with self._lock:
            if self._opened:
                logger.warning(
                    "HiCache registered its pool %r after FlexKV had opened its folders; pages of "
                    "this pool are not kept",
                    name,
                )
                return
            self._pools[name] = PagePool(name, pool)

    def open(self) -> None:
        """Open or create the folders of all pools. Idempotent.

        Raises:
            DiskError: a directory cannot be used. No folder is left open, and every later call is
                a miss.
        """
        with self._lock:
            if self._opened:
                return
            self._opened = True
            opened: dict[str, BlockingTier] = {}
            try:
                for name, pool in self._pools.items():
                    opened[name] = self._open(pool)
                self._stores = opened
            finally:
                if not self._stores:
                    for store in opened.values():
                        store.close()

    def contains(self, pool: str, keys: Sequence[str], before: Sequence[str] = ()) -> list[bool]:
        """For each page whether it can be read now.

        Args:
            pool: name of the pool.
            keys: SGLang's keys of the pages.
            before: keys of the pages before them in the prompt, which SGLang has itself. They count
                as used.
        """
        present = [False] * len(keys)
        with self._boundary.guard("contains", "pages count as missing"):
            store = self._store(pool)
            if store is not None:
                present = store.contains(_encoded(keys))
                store.touch(_encoded(before))
        return present

    def get(
        self,
        pool: str,
        keys: Sequence[str],
        indices: torch.Tensor | None,
        before: Sequence[str] = (),
    ) -> list[bool]:
        """Read pages into the host pool, up to the first that is missing. Waits for the disk.

        Args:
            pool: name of the pool.
            keys: SGLang's keys of the pages.
            indices: indices of all their tokens in the host pool, int64; None for no tokens.
            before: see `contains`.

        Returns:
            For each page whether it was read and verified. The memory of the others is undefined.
        """
        read = 0
        with self._boundary.guard("get", "pages count as missing"):
            store = self._store(pool)
            if store is not None and indices is not None:
                pages = self._pools[pool].at(indices, len(keys))
                read = store.read(_encoded(keys), pages.copy_in)
                store.touch(_encoded([*before, *keys[:read]]))
        return _first(read, len(keys))

    def set(
        self,
        pool: str,
        keys: Sequence[str],
        indices: torch.Tensor | None,
        before: Sequence[str] = (),
    ) -> list[bool]:
        """Write pages from the host pool, up to the first for which there is no room. Waits for the
        disk.

        Args:
            pool: name of the pool.
            keys: SGLang's keys of the pages, in the order of the prompt.
            indices: indices of all their tokens in the host pool, int64; None for no tokens.
            before: see `contains`.

        Returns:
            For each page whether the disk has it now.
        """
        written = 0
        with self._boundary.guard("set", "pages are not kept"):
            store = self._store(pool)
            if store is not None and indices is not None:
                pages = self._pools[pool].at(indices, len(keys))
                written = store.write(_encoded(keys), pages.copy_out)
                store.touch(_encoded([*before, *keys[:written]]))
        return _first(written, len(keys))

    def clear(self) -> None:
        """Forget all pages of this rank. Pages that are written later are found until the process
        ends, but not by the next process. After a failure, all pages are misses until a call
        succeeds."""
        self._cleared = False
        with self._boundary.guard("clear", "no page is read or written until a clear succeeds"):
            for store in self._open_stores().values():
                store.clear()
            self._cleared = True

    def close(self) -> None:
        """Write waiting pages for up to `FLUSH_SECONDS`, and release the folders. Idempotent."""
        with self._boundary.guard("close", "folders may be in use until the process ends"):
            with self._lock:
                self._opened = True
                stores, self._stores = self._stores, {}
            for store in stores.values():
                store.close(FLUSH_SECONDS)

    def page_bytes(self, pool: str) -> int:
        """Bytes of a page of an added pool. Raises KeyError for any other pool."""
        return self._pools[pool].page_bytes

    def figures(self) -> Mapping[str, TierFigures]:
        """The figures of each pool's folder, by name of the pool."""
        return {name: store.figures for name, store in self._open_stores().items()}

    def _open_stores(self) -> dict[str, BlockingTier]:
        with self._lock:
            return dict(self._stores)

    def _store(self, pool: str) -> BlockingTier | None:
        if not self._opened:
            self.open()
        return self._stores.get(pool) if self._cleared else None

    def _open(self, pool: PagePool) -> BlockingTier:
        config, place = self._config, self._place
        identity = [
            "connector: hicache",
            *self._model,
            f"pool: {', '.join(pool.traits)}",
            f"ranks: {', '.join(place.traits(pool.name))}",
        ]
        fingerprint = digest(identity)
        tier: Blocks
        if place.follows(pool.name):
            tier = FollowerTier(
                config.ssd_cache_dir,
                fingerprint,
                pool.slot_bytes,
                stall_seconds=config.ssd_timeout_seconds,
            )
        else:
            tier = self._own(pool, fingerprint, identity)
        return BlockingTier(tier, pool.slot_bytes, config.ssd_timeout_seconds, CALL_SECONDS)

    def _own(self, pool: PagePool, fingerprint: str, identity: Sequence[str]) -> DiskTier:
        config, place = self._config, self._place
        day_gb = config.ssd_write_gb_per_day
        share = self._share_of(pool)
        assert config.ssd_cache_gb is not None
        tier = open_disk_tier(
            config.ssd_cache_dir,
            fingerprint,
            pool.slot_bytes,
            int(config.ssd_cache_gb * GIB * share),
            owners=MAX_OWNERS if config.ssd_in_use == "own" or place.copies > 1 else 1,
            keep_others=config.ssd_other_models == "keep",
            day_bytes=None if day_gb is None else int(day_gb * GIB * share),
            queue_bytes=_QUEUE_BYTES,
            stall_seconds=config.ssd_timeout_seconds,
            identity=identity,
        )
        for drive in tier.drives:
            index = drive.index
            logger.info(
                "FlexKV keeps pages of HiCache's pool %r in %s: %d of %d slots are warm",
                pool.name,
                drive.path,
                len(index),
                index.num_slots,
            )
        return tier

    def _share_of(self, pool: PagePool) -> float:
        """This rank's part of the engine's disk space for a pool, from 0 to 1. Pools share the
        space in proportion to the bytes of a page, and ranks share it equally."""
        sizes = {name: each.slot_bytes for name, each in self._pools.items()}
        return sizes[pool.name] / sum(sizes.values()) / self._place.owners(pool.name)


def _encoded(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _first(count: int, pages: int) -> list[bool]:
    return [page < count for page in range(pages)]
