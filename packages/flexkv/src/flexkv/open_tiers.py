# SPDX-License-Identifier: Apache-2.0
"""Opens the tiers below an arena that the settings name, and makes the policies that they name."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module

from flexkv.eviction import POLICIES, AnyPolicy, OnePolicy, TenantPolicies, choose_policy
from flexkv.host.arena import ArenaSpec
from flexkv.session import Session
from flexkv.session.state_reports import StateReport
from flexkv.settings import GIB, CacheConfig
from flexkv.tiers.base import AttachedTier
from flexkv.tiers.disk import MAX_OWNERS, MakePolicy, open_disk_tier
from flexkv.tiers.mooncake.member import prepare_import
from flexkv.tiers.remote import RemoteLimits
from flexkv.types.admission import ADMISSIONS
from flexkv.types.ages import BlockAges
from flexkv.types.changes import Medium
from flexkv.types.errors import ConfigError

logger = logging.getLogger(__name__)

_MOONCAKE_THREADS = 4
"""Reads and writes of Mooncake Store that run at once. Not tuned."""
_MOONCAKE_BATCH_BYTES = 8 << 20
"""Bytes of a call. Each call costs a request to the master. Tuned over TCP on two cores: blocks of
512 KiB arrived at 1.1 GB/s in calls of 4 MiB and at 1.5 GB/s in calls of 8 MiB. Calls of 32 MiB
took a quarter less time for many blocks, but delay the first block of a fetch."""

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
    session: Session,
    policy: MakePolicy,
    engines: int = 1,
    ages: BlockAges | None = None,
) -> list[AttachedTier]:
    """Open the tiers below the arena that the settings name.

    Args:
        config: FlexKV's settings.
        session: the session of the arena; borrowed.
        policy: makes the eviction policy of a disk.
        engines: of a server with these settings, each of which has a folder of its own on a disk.
        ages: of the cache's blocks; see `ages_of`.

    Returns:
        The tiers, the fastest first. The caller closes them.

    Raises:
        DiskError: a cache directory is refused; see `open_disk_tier`.
        ConfigError: the client of a shared store is not installed.
        StoreSettingError: a shared store cannot be used with these settings.
    """
    tiers = []
    if config.ssd_cache_gb is not None:
        tiers.append(_open_disk(config, session, config.ssd_cache_gb, policy, engines, ages=ages))
    with closed_on_error(tiers):
        return tiers + open_shared_tiers(config, session.info.fingerprint, session.arena.spec)


def open_shared_tiers(config: CacheConfig, fingerprint: str, spec: ArenaSpec) -> list[AttachedTier]:
    """Open the tiers that engines share.

    Args:
        config: FlexKV's settings.
        fingerprint: fingerprint of the blocks.
        spec: sizes of the arena.

    Returns:
        The tiers, the fastest first. The caller closes them.

    Raises:
        ConfigError: the client of a store is not installed.
        StoreSettingError: a store cannot be used with these settings.
    """
    tiers: list[AttachedTier] = []
    with closed_on_error(tiers):
        if config.mooncake_master is not None and config.mooncake_metadata is not None:
            tiers.append(
                _open_mooncake(
                    config, config.mooncake_master, config.mooncake_metadata, fingerprint, spec
                )
            )
        if config.objects_url is not None:
            tiers.append(_open_objects(config, config.objects_url, fingerprint, spec))
    return tiers


def import_mooncake(master: str) -> None:
    """Import the client of a Mooncake Store, which starts threads.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    prepare_import(master)
    try:
        import_module("flexkv.tiers.mooncake.open_mooncake")
    except ImportError as error:
        raise lacks_client("mooncake_master", master, "mooncake", str(error)) from None


def import_objects(url: str) -> None:
    """Import the client of buckets.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    try:
        import_module("flexkv.tiers.objects.open_objects")
    except ImportError as error:
        raise lacks_client("objects_url", url, "objects", str(error)) from None


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
    session: Session,
    size_gb: float,
    policy: MakePolicy,
    engines: int,
    *,
    ages: BlockAges | None,
) -> AttachedTier:
    spec = session.arena.spec
    day_gb = config.ssd_write_gb_per_day
    tier = open_disk_tier(
        config.ssd_cache_dir,
        session.info.fingerprint,
        spec.format.slot_bytes,
        int(size_gb * GIB),
        owners=MAX_OWNERS if config.ssd_in_use == "own" else engines,
        keep_others=config.ssd_other_models == "keep",
        day_bytes=None if day_gb is None else int(day_gb * GIB),
        queue_bytes=_queue_bytes(spec),
        stall_seconds=config.ssd_timeout_seconds,
        policy=policy,
        identity=session.info.identity,
        states=lambda root: _states(config, Medium.DISK, root, session.info.fingerprint),
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


def _open_mooncake(
    config: CacheConfig, master: str, metadata: str, fingerprint: str, spec: ArenaSpec
) -> AttachedTier:
    import_mooncake(master)
    from flexkv.tiers.mooncake.join import MooncakeSettings
    from flexkv.tiers.mooncake.open_mooncake import open_mooncake_tier

    settings = MooncakeSettings(
        master,
        metadata,
        config.mooncake_protocol,
        config.mooncake_device,
        int(config.mooncake_segment_gb * GIB),
        config.mooncake_replicas,
    )
    limits = RemoteLimits(
        config.mooncake_question_seconds,
        config.mooncake_timeout_seconds,
        threads=_MOONCAKE_THREADS,
        batch_bytes=_MOONCAKE_BATCH_BYTES,
        queue_bytes=_queue_bytes(spec),
    )
    states = _states(config, Medium.MOONCAKE, master, fingerprint)
    tier = open_mooncake_tier(settings, fingerprint, spec.format.slot_bytes, limits, states)
    admission = ADMISSIONS[config.mooncake_admission]
    return AttachedTier(tier, admission, config.mooncake_timeout_seconds)


def _open_objects(config: CacheConfig, url: str, fingerprint: str, spec: ArenaSpec) -> AttachedTier:
    import_objects(url)
    from flexkv.tiers.objects.open_objects import open_object_tier

    limits = RemoteLimits(
        config.objects_question_seconds,
        config.objects_timeout_seconds,
        queue_bytes=_queue_bytes(spec),
    )
    states = _states(config, Medium.OBJECTS, url, fingerprint)
    tier = open_object_tier(url, fingerprint, spec.format.slot_bytes, limits, states)
    admission = ADMISSIONS[config.objects_admission]
    return AttachedTier(tier, admission, config.objects_timeout_seconds)


def _states(config: CacheConfig, medium: Medium, store: str, fingerprint: str) -> StateReport:
    about = {"tier": medium.value, "store": store, "fingerprint": fingerprint}
    return StateReport(config.session_root, about)


def lacks_client(setting: str, value: str, extra: str, why: str) -> ConfigError:
    """The error of a setting whose store has no client here, with the reason."""
    return ConfigError(
        f"{setting} is {value!r}, but its client cannot be imported ({why}); allowed: none, or "
        f"what `pip install 'flexkv[{extra}]'` installs"
    )


def _queue_bytes(spec: ArenaSpec) -> int:
    return spec.num_slots * spec.format.slot_bytes // _QUEUE_SHARE
