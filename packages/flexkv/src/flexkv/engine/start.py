# SPDX-License-Identifier: Apache-2.0
"""Start of an engine's cache, and of what decides with it."""

from __future__ import annotations

import logging

from flexkv.cache import KVCache
from flexkv.client import CacheClient, FetchState
from flexkv.engine.choice.chooser import LoadChooser, LoadMode
from flexkv.engine.recorder import Recorder, open_recorder
from flexkv.host.arena import ArenaSpec
from flexkv.open_tiers import ages_of, host_policy, open_tiers, policy_maker
from flexkv.operators.engine_door import OperatorAccess, PromptKeys, local_http
from flexkv.service.attach import Attached
from flexkv.service.served_cache import ServedCache
from flexkv.session import Session, attach
from flexkv.settings import CacheConfig
from flexkv.types.tenants import tenant_number

logger = logging.getLogger(__name__)


def attach_session(config: CacheConfig, engine_id: str) -> Session:
    """Attach to the session of an engine's ranks, as its scheduler, which closes it. Raises
    ArenaError if the ranks have opened none."""
    return attach(config.session_root, engine_id)


def make_cache(
    config: CacheConfig,
    session: Session,
    *,
    keeps_blocks: bool,
    follows_requests: bool,
    step_blocks: int,
    engines: int = 1,
) -> CacheClient:
    """Make the cache over the arena of `session`, with the lower tiers that the settings name; or
    attach to the node's service, if it has given the arena. The caller closes the cache, then the
    session.

    Args:
        keeps_blocks: whether blocks below the arena are valid for other processes. If not, the
            cache has no lower tiers.
        follows_requests: whether the caller reports to the cache each request with all blocks of
            its prompt, and its end. It decides what `eviction_policy=auto` selects.
        step_blocks: how many blocks the engine can fill before its first stores are published.
        engines: see `open_tiers`.

    Raises:
        ArenaError: the service does not answer, or refuses the engine.
        DiskError: a cache directory cannot be used.
        ConfigError: what a shared store needs is not installed.
        StoreSettingError: a shared store cannot be used as the settings name it.
    """
    ticket, tenant = session.info.service, tenant_number(config.tenant or "")
    if ticket is not None:
        logger.info("host memory and lower tiers are those of the service in %r", ticket.root)
        attached = Attached(session.info, step_blocks, session.arena, tenant)
        return ServedCache(attached, session.arena)
    slots = session.arena.spec.num_slots
    name, policy = host_policy(config, slots, follows_requests=follows_requests)
    logger.info("host memory evicts by %s (eviction_policy is %s)", name, config.eviction_policy)
    ages = ages_of(config, slots)
    return KVCache(
        session.arena,
        policy,
        open_tiers(config, session.info, policy_maker(config, follows_requests), engines, ages)
        if keeps_blocks
        else [],
        policy_name=name,
        pin_seconds=config.pin_seconds,
        tenant=tenant,
        ages=ages,
    )


def operator_access(config: CacheConfig, keys: PromptKeys) -> OperatorAccess:
    """How operators reach an engine's cache, by `control_port` also if it is set. Raises
    ConfigError if its settings are wrong."""
    return OperatorAccess(keys, local_http(config))


def make_chooser(
    config: CacheConfig,
    mode: LoadMode,
    spec: ArenaSpec,
    cache: CacheClient | None,
    *,
    on_cores: bool = False,
    steps_behind: int = 1,
) -> LoadChooser:
    """Make the object that decides which hits of an engine are loaded, and how. `cache` is the
    engine's, borrowed; None on a rank that decides nothing."""
    return LoadChooser(
        mode,
        config.min_load_tokens,
        config.always_load,
        sum(spec.format.shard_bytes),
        spec.ranks,
        on_cores=on_cores,
        loading=lambda: 0 if cache is None else cache.status.loading_blocks,
        state_of=lambda fetch: FetchState(0.0) if cache is None else cache.fetch_state(fetch),
        steps_behind=steps_behind,
    )


def make_recorder(
    config: CacheConfig, engine: str, block_tokens: int, block_bytes: int, chooser: LoadChooser
) -> Recorder | None:
    """See `open_recorder`; `chooser` measures the cost of computing, and is borrowed."""
    return open_recorder(config, engine, block_tokens, block_bytes, lambda: chooser.prefill_cost)
