# SPDX-License-Identifier: Apache-2.0
"""What is kept on disk of HiCache's host pools: a folder and its slots for each pool.

Imports nothing of SGLang. Nothing here raises once the folders are open: a failure is a miss.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

import torch

from flexkv.adapter.guard import Edge
from flexkv.adapter.weights import digest
from flexkv.config import GIB, CacheConfig
from flexkv.errors import ConfigError
from flexkv.tiers.base import TierFigures
from flexkv.tiers.blocking import BlockingTier, Blocks
from flexkv.tiers.disk import DiskTier, open_disk_tier
from flexkv.tiers.disk.follower import FollowerTier
from flexkv_sglang.hicache.place import Place
from flexkv_sglang.hicache.pool import HostPool, PagePool

logger = logging.getLogger("flexkv.sglang")

CALL_SECONDS = 8.0
"""How long a call may take in all: SGLang waits 10 s for its threads before it gives up a flush."""
_QUEUE_BYTES = 256 << 20
"""That may wait to be written: more than one call brings, as their callers wait."""
FLUSH_SECONDS = 1.0
"""How long pages that wait may be written at the end."""


class PoolStores:
    """The pages of all host pools of a rank on disk. Thread-safe.

    Pools are added first; then `open`, or else the first call, opens their folders.

    Args:
        config: settings in force.
        place: of this rank.
        model: what makes the bytes of a page what they are, apart from pool, rank and key.
        edge: where what goes wrong is counted and logged.

    Raises:
        ConfigError: no disk is set.
    """

    def __init__(self, config: CacheConfig, place: Place, model: Sequence[str], edge: Edge) -> None:
        if config.ssd_cache_gb is None:
            raise ConfigError(
                "ssd_cache_gb and ssd_cache_dir are not set; allowed for HiCache: both "
                "(FLEXKV_SSD_CACHE_GB, FLEXKV_SSD_CACHE_DIR), as it keeps pages on disk only"
            )
        self._config = config
        self._place = place
        self._model = list(model)
        self._edge = edge
        self._lock = threading.Lock()
        self._opened = False
        self._pools: dict[str, PagePool] = {}
        self._stores: dict[str, BlockingTier] = {}

    def add(self, name: str, pool: HostPool) -> None:
        """Keep a pool's pages too. One that was added already is replaced; one that comes after
        the folders were opened has no room there, and misses.

        Raises:
            LayoutError: its pages cannot be kept.
        """
        with self._lock:
            if self._opened:
                logger.warning("HiCache's pool %r came too late: its pages are not kept", name)
                return
            self._pools[name] = PagePool(name, pool)

    def open(self) -> None:
        """Open or create the folders. Idempotent.

        Raises:
            DiskError: a directory cannot be used. Nothing is left open.
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

    def contains(self, pool: str, keys: Sequence[str]) -> list[bool]:
        """For each page whether it can be read now."""
        present = [False] * len(keys)
        with self._edge.guard("contains", "pages count as missing"):
            store = self._store(pool)
            if store is not None:
                present = store.contains(_encoded(keys))
        return present

    def get(self, pool: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        """Read pages to where `indices` says, up to the first that is not there.

        Args:
            keys: of the pages.
            indices: of all tokens of the pages in the host pool.

        Returns:
            For each page whether it was read and verified. Others hold anything.
        """
        read = 0
        with self._edge.guard("get", "pages count as missing"):
            store = self._store(pool)
            if store is not None and indices is not None:
                pages = self._pools[pool].at(indices, len(keys))
                read = store.read(_encoded(keys), pages.copy_in)
        return _first(read, len(keys))

    def set(self, pool: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        """Write the pages of a prefix, up to the first for which there is no room.

        Args:
            keys: of the pages.
            indices: of all tokens of the pages in the host pool.

        Returns:
            For each page whether it is there now.
        """
        written = 0
        with self._edge.guard("set", "pages are not kept"):
            store = self._store(pool)
            if store is not None and indices is not None:
                pages = self._pools[pool].at(indices, len(keys))
                written = store.write(_encoded(keys), pages.copy_out)
        return _first(written, len(keys))

    def clear(self) -> None:
        """Forget all pages of this rank; what comes later is kept until the process ends."""
        with self._edge.guard("clear", "pages may be left"):
            for store in self._open_stores().values():
                store.clear()

    def close(self) -> None:
        """Write what waits, and give the folders back. Idempotent."""
        with self._edge.guard("close", "folders may be in use until the process ends"):
            with self._lock:
                self._opened = True
                stores, self._stores = self._stores, {}
            for store in stores.values():
                store.close(FLUSH_SECONDS)

    def page_bytes(self, pool: str) -> int:
        """Bytes of a page of a pool that was added."""
        return self._pools[pool].page_bytes

    def figures(self) -> Mapping[str, TierFigures]:
        """What each pool's folder holds and has done."""
        return {name: store.figures for name, store in self._open_stores().items()}

    def _open_stores(self) -> dict[str, BlockingTier]:
        with self._lock:
            return dict(self._stores)

    def _store(self, pool: str) -> BlockingTier | None:
        if not self._opened:
            self.open()
        return self._stores.get(pool)

    def _open(self, pool: PagePool) -> BlockingTier:
        config, place = self._config, self._place
        fingerprint = digest(["hicache", *self._model, *pool.traits, *place.traits(pool.name)])
        tier: Blocks
        if place.follows(pool.name):
            tier = FollowerTier(
                config.ssd_cache_dir,
                fingerprint,
                pool.slot_bytes,
                stall_seconds=config.ssd_timeout_seconds,
            )
        else:
            tier = self._own(pool, fingerprint)
        return BlockingTier(tier, pool.slot_bytes, config.ssd_timeout_seconds, CALL_SECONDS)

    def _own(self, pool: PagePool, fingerprint: str) -> DiskTier:
        config, place = self._config, self._place
        day_gb = config.ssd_write_gb_per_day
        share = self._share_of(pool)
        assert config.ssd_cache_gb is not None
        tier = open_disk_tier(
            config.ssd_cache_dir,
            fingerprint,
            pool.slot_bytes,
            int(config.ssd_cache_gb * GIB * share),
            share=config.ssd_in_use == "own" or place.copies > 1,
            keep_others=config.ssd_other_models == "keep",
            day_bytes=None if day_gb is None else int(day_gb * GIB * share),
            queue_bytes=_QUEUE_BYTES,
            stall_seconds=config.ssd_timeout_seconds,
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
        """Which part of an engine's disk space this rank's pages of a pool get: pools in
        proportion to their pages, ranks alike."""
        sizes = {name: each.slot_bytes for name, each in self._pools.items()}
        return sizes[pool.name] / sum(sizes.values()) / self._place.owners(pool.name)


def _encoded(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _first(count: int, pages: int) -> list[bool]:
    return [page < count for page in range(pages)]
