# SPDX-License-Identifier: Apache-2.0
"""Keeps the pages of HiCache's host pools in the cache of a service: the node's, or one of this
engine's own.

Imports nothing of SGLang. Once the pools are open, nothing here raises: a failure is a miss.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flexkv.engine.boundary import ErrorBoundary
from flexkv.eviction import AUTO
from flexkv.service.pool_sizes import PoolSize
from flexkv.service.private_service import PrivateService, start_private
from flexkv.service.state import clear_pools
from flexkv.settings import CacheConfig
from flexkv.types.errors import ConfigError
from flexkv_sglang.hicache.epochs import engine_name
from flexkv_sglang.hicache.place import Place
from flexkv_sglang.hicache.pool import PagePool
from flexkv_sglang.hicache.pool_cache import PoolCache, open_pool_cache

logger = logging.getLogger("flexkv.sglang")

_MEMORY_GB = 1.0
"""Host memory of a rank's pools together, in GiB, if the settings have none: pages pass through it
to and from lower tiers. A call brings 128 pages."""
_MOST_NAME = 200
"""Characters of a model's name that the names of its pools begin with."""


class PoolStores:
    """Keeps the pages of all host pools of a rank. Thread-safe.

    The caller adds all pools first. `open` then attaches them to the service; without it, the first
    call does. Raises ConfigError if the settings name no lower tier and no service.

    Args:
        place: the place of this rank.
        model: all that the bytes of a page depend on, except pool, rank and key.
        served_as: the name by which SGLang serves the model.
    """

    def __init__(
        self,
        config: CacheConfig,
        place: Place,
        model: Sequence[str],
        boundary: ErrorBoundary,
        served_as: str = "",
    ) -> None:
        if config.service is None and not config.names_lower_tier:
            raise ConfigError(
                "ssd_cache_gb and ssd_cache_dir are not set; allowed for HiCache: both, or "
                "mooncake_master, objects_url or service, because HiCache has host memory of its "
                "own"
            )
        self._config = config
        self._place = place
        self._model = list(model)
        self._served_as = served_as
        self._boundary = boundary
        self._lock = threading.Lock()
        self._opened = False
        self._cleared = True
        self._pools: dict[str, PagePool] = {}
        self._caches: dict[str, PoolCache] = {}
        self._private: PrivateService | None = None
        self._root = f"{config.session_root}/hicache-{engine_name()}"

    def add(self, name: str, pool: Any) -> None:
        """Add a pool. It replaces a pool of the same name. Once the pools are open, a new one is
        refused with a warning, and all of its pages are misses. `pool` is borrowed until `close`.
        Raises LayoutError if FlexKV cannot keep pages of this pool."""
        with self._lock:
            if self._opened:
                logger.warning(
                    "HiCache registered its pool %r after FlexKV had opened its pools; pages of "
                    "this pool are not kept",
                    name,
                )
                return
            self._pools[name] = PagePool(name, pool)

    def open(self) -> None:
        """Attach all pools to the service. Idempotent. Raises ArenaError if the service does not
        start or answer, or refuses a pool, for instance because a directory cannot be used. Nothing
        is left open, and every later call is a miss."""
        with self._lock:
            if self._opened:
                return
            self._opened = True
            opened: dict[str, PoolCache] = {}
            try:
                config = self._serve()
                for name, pool in self._pools.items():
                    opened[name] = self._open(pool, config)
                self._caches = opened
            finally:
                if not self._caches:
                    self._close(opened)

    def contains(self, pool: str, keys: Sequence[str], before: Sequence[str] = ()) -> list[bool]:
        """For each page whether it can be read now. `before` are keys of the pages before them in
        the prompt, which SGLang has itself. They count as used."""
        present = [False] * len(keys)
        with self._boundary.guard("contains", "pages count as missing"):
            cache = self._cache(pool)
            if cache is not None:
                present = cache.contains(_encoded(keys))
                cache.touch(_encoded(before))
        return present

    def get(
        self,
        pool: str,
        keys: Sequence[str],
        indices: torch.Tensor | None,
        before: Sequence[str] = (),
    ) -> list[bool]:
        """Read pages into the host pool, up to the first that is missing. Waits for lower tiers.
        Returns for each page whether it was read and verified. The memory of the others is
        undefined.

        Args:
            indices: indices of all their tokens in the host pool, int64; None for no tokens.
            before: see `contains`.
        """
        copied = 0
        with self._boundary.guard("get", "pages count as missing"):
            copied = self._copy(PoolCache.read, pool, keys, indices, before)
        return [page < copied for page in range(len(keys))]

    def set(
        self,
        pool: str,
        keys: Sequence[str],
        indices: torch.Tensor | None,
        before: Sequence[str] = (),
    ) -> list[bool]:
        """Write pages from the host pool, in the order of the prompt, up to the first for which
        there is no room. Lower tiers get them afterwards. Returns for each page whether the service
        has it now. `indices` and `before`: see `get`."""
        copied = 0
        with self._boundary.guard("set", "pages are not kept"):
            copied = self._copy(PoolCache.write, pool, keys, indices, before)
        return [page < copied for page in range(len(keys))]

    def _copy(
        self,
        copy: Callable[[PoolCache, Sequence[bytes], Sequence[int]], int],
        pool: str,
        keys: Sequence[str],
        indices: torch.Tensor | None,
        before: Sequence[str],
    ) -> int:
        cache = self._cache(pool)
        if cache is None or indices is None:
            return 0
        names = _encoded(keys)
        copied = copy(cache, names, self._pools[pool].first_tokens(indices, len(keys)))
        with self._boundary.guard("touch", "the use of pages is not counted"):
            cache.touch([*_encoded(before), *names[:copied]])
        return copied

    def clear(self) -> None:
        """Forget all pages of this rank. Pages that are written later are found until the server
        ends, but not by the next one. Other users of the node's service keep theirs, as does the
        next server with it. After a failure, all pages are misses until a call succeeds."""
        self._cleared = False
        with self._boundary.guard("clear", "no page is read or written until a clear succeeds"):
            for cache in self._open_caches().values():
                if self._config.service is None:
                    clear_pools(self._root, cache.fingerprint)
                cache.clear()
            self._cleared = True

    def close(self) -> None:
        """Leave the service. One of this process's own then writes waiting pages, and ends.
        Idempotent."""
        with self._boundary.guard("close", "folders may be in use until the process ends"):
            with self._lock:
                self._opened = True
                caches, self._caches = self._caches, {}
            self._close(caches)

    def _close(self, caches: Mapping[str, PoolCache]) -> None:
        private, self._private = self._private, None
        try:
            for cache in caches.values():
                cache.close()
        finally:
            if private is not None:
                private.close()

    def page_bytes(self, pool: str) -> int:
        """Bytes of a page of an added pool. Raises KeyError for any other pool."""
        return self._pools[pool].page_bytes

    def _open_caches(self) -> dict[str, PoolCache]:
        with self._lock:
            return dict(self._caches)

    def _cache(self, pool: str) -> PoolCache | None:
        if not self._opened:
            self.open()
        return self._caches.get(pool) if self._cleared else None

    def _open(self, pool: PagePool, config: CacheConfig) -> PoolCache:
        place = self._place
        identity = [
            "connector: hicache",
            *self._model,
            f"pool: {', '.join(pool.traits)}",
            f"ranks: {', '.join(place.traits(pool.name))}",
        ]
        model = self._names(pool.name)[place.owner(pool.name)]
        return open_pool_cache(config, pool, model, identity)

    def _names(self, pool: str) -> list[str]:
        """The names by which a service finds the sizes for the pool of each rank that has pages of
        its own."""
        owners, name = self._place.owners(pool), f"{self._served_as[:_MOST_NAME]} {pool}"
        return [f"{name} {number}" for number in range(owners)] if owners > 1 else [name]

    def _serve(self) -> CacheConfig:
        """The settings with a service, which is started if they name none."""
        config = self._config
        if config.service is not None:
            return config
        if self._place.copies > 1:
            config = replace(config, ssd_in_use="own")
        if config.eviction_policy == AUTO:
            config = replace(config, eviction_policy="lru")  # HiCache tells of no request
        self._private = start_private(self._root, config, self._sizes())
        return replace(config, service=self._root)

    def _sizes(self) -> dict[str, PoolSize]:
        """Memory and disk space of all ranks' pools. Pools share the space in proportion to the
        bytes of a page, and ranks share it equally."""
        config, owners = self._config, max(map(self._place.owners, self._pools), default=1)
        memory = config.cpu_cache_gb or _MEMORY_GB * owners
        sizes = {name: each.slot_bytes for name, each in self._pools.items()}
        made: dict[str, PoolSize] = {}
        for name, size in sizes.items():
            share = size / sum(sizes.values()) / self._place.owners(name)
            disk = None if config.ssd_cache_gb is None else config.ssd_cache_gb * share
            made |= dict.fromkeys(self._names(name), PoolSize(memory * share, disk))
        return made


def _encoded(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]
