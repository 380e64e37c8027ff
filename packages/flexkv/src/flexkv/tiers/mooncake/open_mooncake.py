# SPDX-License-Identifier: Apache-2.0
"""Opens the tier of a Mooncake Store."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from functools import partial

from mooncake.store import ReplicateConfig

from flexkv.tiers.base import States
from flexkv.tiers.epochs import EpochRecord, Epochs
from flexkv.tiers.link import most_jobs
from flexkv.tiers.mooncake.join import MooncakeSettings, join
from flexkv.tiers.mooncake.member import Client, Member
from flexkv.tiers.mooncake.metadata_record import HTTP, MetadataRecord
from flexkv.tiers.mooncake.mooncake_store import MooncakeBlocks
from flexkv.tiers.mooncake.store_record import COPIES, StoreRecord
from flexkv.tiers.remote import RemoteLimits, RemoteTier
from flexkv.types.changes import Medium

TRANSFERS = {"tcp": 1, "rdma": 4}
"""Calls that move bytes at the same time, by protocol. Over TCP, calls slow each other down: on two
busy cores, reading 64 MiB in blocks of 2 MiB reached 0.5 to 0.8 GB/s with one call at a time, 0.2
to 0.6 with two and 0.1 to 0.2 with eight, whatever the blocks per call. RDMA was not measured."""

_CALL_LIMITS_MS = ("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS")
_CALL_LIMITS_SECONDS = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
"""Environment variables that Mooncake's client reads: the most time of a request to the master, and
the time without progress after which a transfer by TCP fails."""

_LEAST_LIMIT_SECONDS = 5.0
"""A client joins the store by the same requests, and its master may be busy then. Not tuned."""


def open_mooncake_tier(
    settings: MooncakeSettings,
    fingerprint: str,
    slot_bytes: int,
    limits: RemoteLimits,
    states: States | None = None,
) -> RemoteTier:
    """Open the tier of a Mooncake Store and lend the store a segment of this process's memory.

    If a server of the store does not answer, the tier reads and writes nothing until it does; see
    `RemoteTier`. The error is logged.

    Args:
        settings: of the store.
        fingerprint: digest of all that the blocks' bytes depend on apart from their keys.
        slot_bytes: bytes of a block.
        limits: of the tier.
        states: reports the tier's circuits to other processes; the tier owns it. None if
            nothing is reported.

    Returns:
        The tier, which owns its client.
    """
    _limit_calls(limits.timeout_seconds)
    config = ReplicateConfig()
    config.replica_num = settings.replicas
    member = Member(partial(join, settings))
    record: EpochRecord
    if settings.metadata.startswith(HTTP):
        record = MetadataRecord(settings.metadata, fingerprint, limits.timeout_seconds)
    else:
        record = _store_record(lambda: member.client, fingerprint, lends=settings.segment_bytes > 0)
    together = most_jobs(limits.threads) * max(1, limits.batch_bytes // slot_bytes)
    blocks = MooncakeBlocks(
        member,
        config,
        Epochs(record),
        fingerprint,
        slot_bytes=slot_bytes,
        blocks=together,
        transfers=TRANSFERS[settings.protocol],
        timeout_seconds=limits.timeout_seconds,
    )
    name = (
        f"mooncake_master {settings.master} or mooncake_metadata {settings.metadata}, by protocol "
        f"{settings.protocol!r} with device {settings.device!r},"
    )
    return RemoteTier(Medium.MOONCAKE, blocks, slot_bytes, limits, store_name=name, states=states)


def open_store_record(settings: MooncakeSettings, fingerprint: str, seconds: float) -> StoreRecord:
    """The record of the epoch in the store itself, for a process that reads and writes no blocks.

    Args:
        settings: of the store. No memory is lent, whatever `segment_bytes` is.
        fingerprint: of the blocks.
        seconds: longest wait for each call but the first, which joins the store; see `join`.
    """
    _limit_calls(seconds)
    client = functools.cache(partial(join, dataclasses.replace(settings, segment_bytes=0)))
    return _store_record(client, fingerprint, lends=False)


def _store_record(client: Callable[[], Client], fingerprint: str, *, lends: bool) -> StoreRecord:
    config = ReplicateConfig()
    config.replica_num = COPIES
    config.with_hard_pin = True
    return StoreRecord(client, config, fingerprint, lends=lends)


def _limit_calls(seconds: float) -> None:
    """Give each later call of Mooncake's clients in this process an upper time, where the operator
    has set none. A client whose master or peer hangs otherwise waits for 30 s.

    Transfers by RDMA keep Mooncake's own limit: a shorter one (`MC_SLICE_TIMEOUT`) reports a
    transfer as failed while it may still write to the arena.
    """
    seconds = max(seconds, _LEAST_LIMIT_SECONDS)
    for name in _CALL_LIMITS_MS:
        os.environ.setdefault(name, str(math.ceil(seconds * 1000)))
    for name in _CALL_LIMITS_SECONDS:
        os.environ.setdefault(name, str(math.ceil(seconds)))
