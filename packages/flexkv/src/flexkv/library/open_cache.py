# SPDX-License-Identifier: Apache-2.0
"""A cache without an engine: one call opens it, `with` closes it."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Mapping, Sequence

from flexkv.engine.open_rank import closed_on_error, open_rank
from flexkv.engine.start import make_cache
from flexkv.engine.worker.pages import Device, RankPages
from flexkv.host.arena import Arena
from flexkv.layout import KVLayout, Sharding
from flexkv.library.page_cache import PageCache, open_caches
from flexkv.preflight.checks import check_start
from flexkv.settings import CacheConfig, load_config
from flexkv.settings.without_effect import engines_settings, report_without_effect
from flexkv.system.native import kernels
from flexkv.types.errors import ConfigError
from flexkv.types.mover import Mover

FLUSH_SECONDS = 30.0
"""Seconds in which lower tiers may write waiting blocks when a cache is closed: enough for 1 GiB, a
full queue, at 36 MB/s. Not tuned."""

_STORED_BLOCKS = 256
"""Blocks for which the node's service grants slots ahead: larger stores take several rounds, of
some milliseconds each. A program that has nothing to store keeps them from others. Not tuned."""

_IGNORED = engines_settings("there is no engine", but=["copy_threads"])
_IGNORED["log_level"] = "the program configures the logger `flexkv`"
"""The settings that have no effect without an engine, with the reasons."""


def open_cache(
    config: CacheConfig | Mapping[str, object] | None,
    layout: KVLayout,
    *,
    identity: str | Sequence[str] = (),
    device: Device | None = None,
    flush_seconds: float = FLUSH_SECONDS,
) -> PageCache:
    """Open a cache for the pages of this process. The caller closes it, for instance by `with`.

    Args:
        config: the settings. A mapping takes precedence over the settings file and the
            environment; a `CacheConfig`, as `load_config` returns it, is used as it is. None takes
            file and environment.
        layout: layout of the pages, which must not move while the cache is open. The cache keeps
            arrays alive that `TensorView.of` describes.
        identity: texts that, with key and shape, determine the bytes of a block: model, revision,
            dtype. Lower tiers find only blocks of the same identity, and so do programs that use
            the node's service. For the service, the first text is the name of the model.
        device: the device of the pages; None for host memory.
        flush_seconds: how long lower tiers may write waiting blocks when the cache is closed.

    Raises:
        TypeError: `config` is neither settings nor None.
        ConfigError: a setting is not allowed, or a lower tier or the node's service is set without
            an identity.
        ArenaError: the host memory cannot be allocated, or no service answers.
        DiskError: a cache directory cannot be used.
        LayoutError: the pages cannot be copied.
        FlexKVError: the copy kernels are not installed.
    """
    config = _read_config(config)
    parts = [identity] if isinstance(identity, str) else list(identity)
    if (config.names_lower_tier or config.service is not None) and not any(parts):
        raise ConfigError(
            "identity is empty and ssd_cache_gb, mooncake_master, objects_url or service is set; "
            "allowed with them: texts that change whenever equal keys mean other bytes (model, "
            "revision, dtype)"
        )
    report_without_effect(config, _IGNORED)
    check_start(config, meets=False)
    where = _host_memory() if device is None else device
    pages = RankPages(layout, 1, Sharding(1))
    (pool,) = pages.place()

    def start(arena: Arena, threads: int) -> Mover:
        return where.make_mover(pool.planes, pool.stored, layout.num_blocks, arena, threads)

    shard = pages.shard(["engine: none", *parts], where.numa_node)
    model = next(filter(None, parts), "")
    session, mover = open_rank(config, None, shard, 1, start, model=model, pages=layout.num_blocks)
    with closed_on_error(session):
        try:
            cache = make_cache(
                config,
                session,
                keeps_blocks=True,
                follows_requests=False,
                step_blocks=_STORED_BLOCKS,
            )
        except BaseException:
            mover.close()
            raise
    _close_at_exit()
    return PageCache(session, cache, mover, layout, where, flush_seconds)


def _read_config(config: CacheConfig | Mapping[str, object] | None) -> CacheConfig:
    if config is not None and not isinstance(config, CacheConfig | Mapping):
        raise TypeError(
            f"config is a {type(config).__name__}; allowed: a mapping of settings, a CacheConfig "
            f"or None"
        )
    read = config if isinstance(config, CacheConfig) else load_config(config, "open_cache")
    if not read.enable:
        raise ConfigError(
            "enable is false (ENABLE_FLEXKV); allowed: true, or a program that opens no cache"
        )
    return read


def _host_memory() -> Device:
    device: Device = kernels("host_memory").HostMemory()
    return device


@functools.cache
def _close_at_exit() -> None:
    """Close open caches when the interpreter ends: before the movers, which were imported earlier
    and therefore end later."""
    atexit.register(_close_all)


def _close_all() -> None:
    for cache in list(open_caches):
        cache.close()
