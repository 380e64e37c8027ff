# SPDX-License-Identifier: Apache-2.0
"""Opens the tiers below an arena that the settings name, and makes the policies that they name."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from flexkv.eviction import POLICIES, AnyPolicy, OnePolicy, TenantPolicies, choose_policy
from flexkv.index.ages import BlockAges
from flexkv.session.state_reports import StateReport
from flexkv.session.wire import SessionInfo
from flexkv.settings import GIB, CacheConfig
from flexkv.tiers.base import AttachedTier
from flexkv.tiers.disk import MAX_OWNERS, MakePolicy, open_disk_tier
from flexkv.tiers.remote import RemoteTier
from flexkv.tiers.shared_store import shared_stores
from flexkv.types.admission import ADMISSIONS
from flexkv.types.changes import Medium

logger = logging.getLogger(__name__)

_QUEUE_SHARE = 2
"""Writes that wait for a tier hold at most half of the arena. Waiting blocks cannot be evicted, and
new blocks need room. Not tuned."""


def policy_maker(config: CacheConfig, follows_requests: bool) -> Callable[[int], OnePolicy]:
    """What makes the eviction policy that the settings name, for a tier of a number of slots."""

    def make(slots: int) -> OnePolicy:
        name = choose_policy(config.eviction_policy, slots, follows_requests=follows_requests)
        return POLICIES[name](slots)

    return make


def host_policy(
    config: CacheConfig, slots: int, *, follows_requests: bool
) -> tuple[str, AnyPolicy]:
    """The name of the eviction policy of host memory with so many slots, and the policy, or one for
    each tenant that has a share."""
    name = choose_policy(config.eviction_policy, slots, follows_requests=follows_requests)
    if not config.tenant_shares:
        return name, POLICIES[name](slots)
    shares = {tenant: percent / 100 for tenant, percent in config.tenant_shares}
    return name, TenantPolicies(shares, slots, POLICIES[name])


def open_tiers(
    config: CacheConfig,
    info: SessionInfo,
    policy: MakePolicy,
    engines: int = 1,
    ages: BlockAges | None = None,
) -> list[AttachedTier]:
    """Open the tiers below the memory that `info` describes, which need be no arena. Returns them,
    the fastest first; the caller closes them. `policy` makes the eviction policy of a disk. Each of
    the `engines` of a server with these settings has a folder of its own on a disk.

    Raises DiskError if a cache directory is refused (see `open_disk_tier`); ConfigError if the
    client of a shared store is not installed; StoreSettingError if a shared store cannot be used
    with these settings.
    """
    spec, fingerprint = info.spec, info.fingerprint
    slot_bytes = spec.format.slot_bytes
    queue_bytes = spec.num_slots * slot_bytes // _QUEUE_SHARE
    tiers: list[AttachedTier] = []
    with closed_on_error(tiers):
        if config.ssd_cache_gb is not None:
            disk = _open_disk(
                config, info, policy, queue_bytes=queue_bytes, engines=engines, ages=ages
            )
            tiers.append(disk)
        for store in shared_stores(config):
            opened = store.open(config, fingerprint, slot_bytes, queue_bytes)
            states = _states(config, store.medium, str(store.address(config)), fingerprint)
            tier = RemoteTier(store.medium, opened, fingerprint, slot_bytes, states)
            tiers.append(AttachedTier(tier, store.admission(config), opened.limits.timeout_seconds))
    return tiers


@contextlib.contextmanager
def closed_on_error(tiers: Sequence[AttachedTier]) -> Iterator[None]:
    """Close `tiers` if the block raises, because no cache owns them yet."""
    try:
        yield
    except BaseException:
        for each in tiers:
            each.tier.close()
        raise


def ages_of(config: CacheConfig, num_slots: int) -> BlockAges | None:
    """The ages of the blocks of a cache with so many slots; None if blocks have no greatest age."""
    seconds = config.max_age_seconds
    return None if seconds is None else BlockAges(seconds, num_slots)


def _open_disk(
    config: CacheConfig,
    info: SessionInfo,
    policy: MakePolicy,
    *,
    queue_bytes: int,
    engines: int,
    ages: BlockAges | None,
) -> AttachedTier:
    assert config.ssd_cache_gb is not None
    day_gb = config.ssd_write_gb_per_day
    tier = open_disk_tier(
        config.ssd_cache_dir,
        info.fingerprint,
        info.spec.format.slot_bytes,
        int(config.ssd_cache_gb * GIB),
        owners=MAX_OWNERS if config.ssd_in_use == "own" else engines,
        keep_others=config.ssd_other_models == "keep",
        day_bytes=None if day_gb is None else int(day_gb * GIB),
        queue_bytes=queue_bytes,
        stall_seconds=config.ssd_timeout_seconds,
        policy=policy,
        identity=info.identity,
        states=lambda root: _states(config, Medium.DISK, root, info.fingerprint),
        ages=ages,
    )
    for drive in tier.drives:
        index = drive.index
        logger.info(
            "FlexKV keeps blocks in %s: %d of %d slots are warm; it evicts by %s",
            drive.path,
            len(index),
            index.num_slots,
            tier.figures.policy,
        )
    return AttachedTier(tier, ADMISSIONS[config.ssd_admission], config.ssd_timeout_seconds)


def _states(config: CacheConfig, medium: Medium, store: str, fingerprint: str) -> StateReport:
    about = {"tier": medium.value, "store": store, "fingerprint": fingerprint}
    return StateReport(config.session_root, about)
