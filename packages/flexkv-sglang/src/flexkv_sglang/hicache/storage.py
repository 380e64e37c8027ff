# SPDX-License-Identifier: Apache-2.0
"""The storage backend that SGLang loads by name:

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "flexkv", "interface_v1": 1,
      "module_path": "flexkv_sglang.hicache.storage", "class_name": "FlexKVStorage"}'

Further keys of that JSON are FlexKV's settings. SGLang calls the backend from its scheduler and
from threads of its own, and waits for the answer.
"""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang import __version__ as sglang_version
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_server_args

from flexkv.engine.boundary import ErrorBoundary
from flexkv.settings import GIB, configure_logging
from flexkv.settings.without_effect import report_without_effect
from flexkv.types.errors import EngineVersionError
from flexkv_sglang.compat import STORAGE
from flexkv_sglang.hicache.hits import Hit, PoolPages, find_hit, leading
from flexkv_sglang.hicache.place import Place
from flexkv_sglang.hicache.stores import PoolStores
from flexkv_sglang.identity import model_identity, outlives_process, served_model
from flexkv_sglang.settings import IGNORED_UNDER_HICACHE, engines_of, read_storage_settings
from flexkv_sglang.support import load_page_hash

_KV = str(PoolName.KV)
_MOST_CALLS = 1024
"""The most reads, and writes, whose figures are kept until SGLang fetches them."""


class FlexKVStorage(HiCacheStorage):
    """Keeps HiCache's pages. After the start, no method raises: a failure is a miss. HiCache's
    `config` has the ranks, and FlexKV's settings in `extra_config`. Raises FlexKVError if a
    setting, SGLang's version or a kind of parallelism is not allowed."""

    def __init__(self, config: HiCacheStorageConfig, options: dict[str, Any]) -> None:
        settings = read_storage_settings(config.extra_config or {})
        configure_logging(settings)
        if settings.enable and config.tp_rank == config.pp_rank == 0:
            report_without_effect(settings, IGNORED_UNDER_HICACHE)
        _check_engine()
        load_page_hash()
        self._boundary = ErrorBoundary()
        self._counts = bool(config.enable_storage_metrics)
        self._reads: deque[tuple[int, float]] = deque(maxlen=_MOST_CALLS)
        self._writes: deque[tuple[int, float]] = deque(maxlen=_MOST_CALLS)
        self._stores: PoolStores | None = None
        engine = get_server_args() if settings.enable else None
        if engine is not None and outlives_process(engine):
            model = model_identity(engine, ModelConfig.from_server_args(engine), sglang_version)
            place = Place.of(config, engines_of(engine))
            served_as = served_model(engine)
            self._stores = PoolStores(settings, place, model, self._boundary, served_as)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, _KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if self._stores is not None:
            self._stores.add(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Open the pools. SGLang calls this from 0.5.23 on; in older releases, the first call for
        pages opens them."""
        if self._stores is not None:
            self._stores.open()

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return leading(self._contains(_KV, keys, extra_info))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        hit = Hit(0, {}, [])
        with self._boundary.guard("batch_exists_v2", "pages count as missing"):
            others = {
                str(each.name): PoolPages(
                    self._contains(str(each.name), keys, extra_info), _trailing(each)
                )
                for each in pool_transfers or ()
            }
            hit = find_hit(_KV, self._contains(_KV, keys, extra_info), others)
        return PoolTransferResult(*hit)

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._get(_KV, keys, host_indices, extra_info)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._set(_KV, keys, host_indices, extra_info)

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {
            each.name: self._get(str(each.name), each.keys or [], each.host_indices, extra_info)
            for each in transfers
        }

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {
            each.name: self._set(str(each.name), each.keys or [], each.host_indices, extra_info)
            for each in transfers
        }

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Return None. HiCache never calls this: `interface_v1`, which the start requires, makes it
        call `batch_get_v1`."""

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        """Return None for each key. HiCache never calls this; see `get`."""
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Keep nothing. HiCache never calls this; see `get`."""
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Keep nothing. HiCache never calls this; see `get`."""
        return False

    def clear(self) -> None:
        if self._stores is not None:
            self._stores.clear()

    def close(self) -> None:
        """Leave the service, or end this engine's own. Idempotent."""
        if self._stores is not None:
            self._stores.close()

    def get_stats(self) -> Any:
        """SGLang's `StorageMetrics`: pages and GiB/s of each call since SGLang last called this;
        None if SGLang's metrics of storage are off."""
        if not self._counts:
            return None
        reads = [self._reads.popleft() for _ in range(len(self._reads))]
        writes = [self._writes.popleft() for _ in range(len(self._writes))]
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in reads],
            prefetch_bandwidth=[rate for _, rate in reads],
            backup_pgs=[pages for pages, _ in writes],
            backup_bandwidth=[rate for _, rate in writes],
        )

    def _contains(
        self, pool: str, keys: Sequence[str], extra: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        if self._stores is None:
            return [False] * len(keys)
        return self._stores.contains(pool, keys, _before(extra))

    def _get(self, *call: Any) -> list[bool]:
        return self._copy(PoolStores.get, *call, calls=self._reads)

    def _set(self, *call: Any) -> list[bool]:
        return self._copy(PoolStores.set, *call, calls=self._writes)

    def _copy(
        self,
        copy: Callable[..., list[bool]],
        pool: str,
        keys: Sequence[str],
        indices: torch.Tensor | None,
        extra: HiCacheStorageExtraInfo | None,
        *,
        calls: deque[tuple[int, float]],
    ) -> list[bool]:
        """Read or write pages, and note pages and GiB/s in `calls`."""
        stores, begin = self._stores, time.monotonic()
        if stores is None:
            return [False] * len(keys)
        copied = copy(stores, pool, keys, indices, _before(extra))
        pages = leading(copied)
        if self._counts and pages:
            size = pages * stores.page_bytes(pool)
            calls.append((pages, size / GIB / max(time.monotonic() - begin, 1e-9)))
        return copied


def _check_engine() -> None:
    """Refuse an SGLang whose HiCache uses the same key for pages of different tenants. Raises
    EngineVersionError if this SGLang is refused. The message names its version and the allowed
    ones."""
    if not hasattr(importlib.import_module("sglang.srt.mem_cache.utils"), "storage_namespace_seed"):
        raise EngineVersionError(
            f"SGLang {sglang_version} is installed, whose HiCache names pages by their tokens "
            f"alone, so that requests with another extra_key or LoRA adapter would get them; "
            f"allowed: {STORAGE}"
        )


def _trailing(transfer: PoolTransfer) -> int | None:
    """How many pages of a pool before its end a prefix needs; None for all."""
    needs = {"all_pages": None, "trailing_pages": max(1, len(transfer.keys or ()))}
    return needs[transfer.hit_policy.value]


def _before(extra: HiCacheStorageExtraInfo | None) -> Sequence[str]:
    """The keys of the pages before those of a call. SGLang names them if its option
    `hicache_storage_pass_prefix_keys` is set."""
    return () if extra is None else extra.prefix_keys or ()
