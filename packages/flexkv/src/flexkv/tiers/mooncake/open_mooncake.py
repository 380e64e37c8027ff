# SPDX-License-Identifier: Apache-2.0
"""Opens the blocks and the records of a Mooncake Store."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from functools import partial

from mooncake.store import ReplicateConfig

from flexkv.settings import GIB, CacheConfig
from flexkv.tiers.epochs import EpochRecord
from flexkv.tiers.link import most_jobs
from flexkv.tiers.mooncake.join import join
from flexkv.tiers.mooncake.member import Client, Member
from flexkv.tiers.mooncake.metadata_record import HTTP, MetadataRecord
from flexkv.tiers.mooncake.mooncake_store import MooncakeBlocks
from flexkv.tiers.mooncake.store_record import COPIES, StoreRecord
from flexkv.tiers.remote import RemoteLimits

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


def open_blocks(
    config: CacheConfig, fingerprint: str, slot_bytes: int, limits: RemoteLimits
) -> tuple[MooncakeBlocks, EpochRecord]:
    """The blocks, which own their client, and the record of a fingerprint's epoch. Once open, the
    client lends the store a segment of this process's memory."""
    _limit_calls(limits.timeout_seconds)
    replicated = ReplicateConfig()
    replicated.replica_num = config.mooncake_replicas
    segment_bytes = int(config.mooncake_segment_gb * GIB)
    member = Member(partial(join, config, segment_bytes))
    metadata = str(config.mooncake_metadata)
    record: EpochRecord
    if metadata.startswith(HTTP):
        record = MetadataRecord(metadata, fingerprint, limits.timeout_seconds)
    else:
        record = _store_record(lambda: member.client, fingerprint, lends=segment_bytes > 0)
    blocks = MooncakeBlocks(
        member,
        replicated,
        slot_bytes=slot_bytes,
        blocks=most_jobs(limits.threads) * max(1, limits.batch_bytes // slot_bytes),
        transfers=TRANSFERS[config.mooncake_protocol],
        timeout_seconds=limits.timeout_seconds,
    )
    return blocks, record


def open_record(config: CacheConfig, fingerprint: str) -> StoreRecord:
    """The record of the epoch in the store itself, for a process that reads and writes no blocks.
    Its first call joins the store, and lends it no memory."""
    _limit_calls(config.mooncake_timeout_seconds)
    client = functools.cache(partial(join, config, 0))
    return _store_record(client, fingerprint, lends=False)


def _store_record(client: Callable[[], Client], fingerprint: str, *, lends: bool) -> StoreRecord:
    kept = ReplicateConfig()
    kept.replica_num = COPIES
    kept.with_hard_pin = True
    return StoreRecord(client, kept, fingerprint, lends=lends)


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
