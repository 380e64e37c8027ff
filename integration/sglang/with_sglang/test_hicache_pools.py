# SPDX-License-Identifier: Apache-2.0
"""SGLang's own host pools, page names and loader of storage backends, without an engine."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str

from flexkv_sglang.hicache import storage
from flexkv_sglang.hicache.pool_cache import PoolCache
from integration.sglang.hicache import BACKEND

PAGE, LAYERS, TOKENS = 4, 3, 64
LAYOUTS = {
    "mha": ["layer_first", "page_first", "page_first_direct", "page_head"],
    "mla": ["layer_first", "page_first", "page_first_direct"],
}
POOLS = [(kind, layout) for kind, layouts in LAYOUTS.items() for layout in layouts]


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only an engine knows of its model."""
    engine = SimpleNamespace(served_model_name="a model", dp_size=1)
    monkeypatch.setattr(storage, "get_server_args", lambda: engine)
    monkeypatch.setattr(ModelConfig, "from_server_args", lambda _: None)
    monkeypatch.setattr(storage, "model_identity", lambda *_: ["a model"])
    monkeypatch.setattr(storage, "outlives_process", lambda _: True)


def make_pool(kind: str, layout: str) -> Any:
    """A host pool for a KV cache in host memory, each number of it another one."""
    device: Any
    maker: Callable[..., Any]
    if kind == "mha":
        device = MHATokenToKVPool(TOKENS, PAGE, torch.float16, 2, 8, LAYERS, "cpu", False)
        maker = MHATokenToKVPoolHost
    else:
        device = MLATokenToKVPool(TOKENS, PAGE, torch.float16, 16, 8, LAYERS, "cpu", False)
        maker = MLATokenToKVPoolHost
    known = inspect.signature(maker).parameters
    source = device if "device_pool" in known else device.get_device_pool_infos()[0].buffer_info
    more = {
        "device_capacity_tokens": device.size,
        "start_layer": device.start_layer,
        "end_layer": device.end_layer,
        "target_layer_num": LAYERS,
    }
    more = {name: value for name, value in more.items() if name in known}
    pool = maker(source, 2.0, 0, PAGE, layout, **more)
    flat = torch.arange(pool.kv_buffer.numel(), dtype=torch.int32) % 2000
    pool.kv_buffer.copy_(flat.view(pool.kv_buffer.shape))
    return pool


def config_of(root: Path, kind: str, rank: int = 0, **settings: Any) -> HiCacheStorageConfig:
    extra = BACKEND | {
        "cpu_cache_gb": 0.01,
        "ssd_cache_gb": 0.01,
        "ssd_cache_dir": str(root / "disk"),
        "runtime_dir": str(root / "run"),
    }
    extra |= settings
    extra.pop("prefetch_threshold")
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=2,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=kind == "mla",
        enable_storage_metrics=True,
        is_page_first_layout=False,
        model_name="model",
        extra_config=extra,
    )


@contextmanager
def backend(root: Path, kind: str, pool: Any, rank: int = 0) -> Iterator[Any]:
    """A backend as HiCache makes it, with its pool."""
    made: Any = StorageBackendFactory.create_backend("dynamic", config_of(root, kind, rank), pool)
    made.register_mem_pool_host(pool)
    getattr(made, "on_host_pools_registered", lambda: None)()
    yield made
    made.close()


def names_of(tokens: int, tenant: str | None = None) -> list[str]:
    """SGLang's names of the pages of a prompt."""
    key = RadixKey(list(range(100, 100 + tokens)), tenant)
    names = get_storage_hash_str(key, page_size=PAGE)
    assert isinstance(names, list)
    return names


def indices(*pages: int) -> torch.Tensor:
    parts = (range(page * PAGE, (page + 1) * PAGE) for page in pages)
    return torch.tensor(list(itertools.chain(*parts)), dtype=torch.int64)


def page_of(pool: Any, page: int) -> torch.Tensor:
    """A page as SGLang reads it."""
    taken: torch.Tensor = pool.get_data_page(page * PAGE, flat=True).clone()
    return taken


@pytest.mark.parametrize(("kind", "layout"), POOLS)
def test_pages_come_back_after_a_restart(tmp_path: Path, kind: str, layout: str) -> None:
    pool, keys = make_pool(kind, layout), names_of(4 * PAGE)
    written = [page_of(pool, page) for page in (1, 5, 2, 9)]
    with backend(tmp_path, kind, pool) as first:
        assert first.batch_set_v1(keys[:4], indices(1, 5, 2, 9)) == [True] * 4
    after = make_pool(kind, layout)
    after.kv_buffer.zero_()
    with backend(tmp_path, kind, after) as second:
        assert second.batch_exists([*keys, "none"]) == 4
        assert second.batch_get_v1([*keys, "none"], indices(8, 3, 4, 6, 7)) == [True] * 4 + [False]
        stats = second.get_stats()
        assert (stats.prefetch_pgs, stats.backup_pgs) == ([4], [])
    for page, was in zip((8, 3, 4, 6), written, strict=True):
        assert torch.equal(page_of(after, page), was)
    assert page_of(after, 1).count_nonzero() == 0


def test_tenants_have_names_of_their_own(tmp_path: Path) -> None:
    pool = make_pool("mha", "page_first")
    with backend(tmp_path, "mha", pool) as made:
        assert made.batch_set_v1(names_of(8, "A"), indices(0, 1)) == [True, True]
        assert made.batch_exists(names_of(8, "A")) == 2
        assert made.batch_exists(names_of(8, "B")) == made.batch_exists(names_of(8)) == 0


@pytest.mark.parametrize(("kind", "there"), [("mha", 0), ("mla", 2)])
def test_ranks_share_what_is_the_same_for_all(tmp_path: Path, kind: str, there: int) -> None:
    pool, keys = make_pool(kind, "page_first"), names_of(8)
    with backend(tmp_path, kind, pool) as zero:
        assert zero.batch_set_v1(keys, indices(0, 1)) == [True, True]
        with backend(tmp_path, kind, make_pool(kind, "page_first"), rank=1) as one:
            assert one.batch_exists(keys) == there


def test_hybrid_models_ask_for_all_their_pools(tmp_path: Path) -> None:
    pool, states, keys = make_pool("mha", "page_first"), make_pool("mha", "page_head"), names_of(16)
    made: Any = StorageBackendFactory.create_backend("dynamic", config_of(tmp_path, "mha"), pool)
    made.register_mem_pool_host(pool)
    made.register_mem_host_pool_v2(pool, PoolName.KV)
    made.register_mem_host_pool_v2(states, PoolName.MAMBA)
    kv = PoolTransfer(PoolName.KV, indices(0, 1, 2, 3), keys=keys)
    state = PoolTransfer(
        PoolName.MAMBA, indices(6), keys=keys[1:2], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    assert made.batch_exists_v2(keys, [state]).kv_hit_pages == 0
    assert made.batch_set_v2([kv, state]) == {"kv": [True] * 4, "mamba": [True]}
    found = made.batch_exists_v2(keys, [state])
    assert found.kv_hit_pages == 2
    assert found.extra_pool_hit_pages == {"kv": 4, "mamba": 2}
    before = page_of(states, 6)
    state.host_indices = indices(7)
    states.kv_buffer[:, 7].zero_()
    assert made.batch_get_v2([state]) == {"mamba": [True]}
    assert torch.equal(page_of(states, 7), before)
    made.close()


def test_pages_before_those_of_a_call_count_as_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang names them where its option `hicache_storage_pass_prefix_keys` is set."""
    pool, keys = make_pool("mha", "page_first"), names_of(12)
    before = HiCacheStorageExtraInfo(prefix_keys=keys[:2])
    used: list[list[bytes]] = []
    with backend(tmp_path, "mha", pool) as made:
        monkeypatch.setattr(PoolCache, "touch", lambda _, each: used.append(each))
        assert made.batch_exists(keys[2:], before) == 0
        assert made.batch_set_v1(keys[2:], indices(0), before) == [True]
        assert made.batch_get_v1(keys[2:], indices(1), before) == [True]
        assert made.batch_exists(keys[2:], HiCacheStorageExtraInfo()) == 1
    names = [key.encode() for key in keys]
    assert used == [names[:2], names, names, []]


def test_a_setting_that_is_wrong_stops_the_start(tmp_path: Path) -> None:
    config = config_of(tmp_path, "mha", ssd_cache_gb=-1)
    with pytest.raises(Exception, match=r"ssd_cache_gb.*storage-backend-extra-config.*allowed"):
        StorageBackendFactory.create_backend("dynamic", config, None)
