# SPDX-License-Identifier: Apache-2.0
"""Opens the tier of a Mooncake Store."""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass
from functools import partial

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from flexkv.tiers.base import States
from flexkv.tiers.epochs import Epochs
from flexkv.tiers.link import most_jobs
from flexkv.tiers.mooncake.mooncake_store import MetadataRecord, MooncakeBlocks, MooncakeError
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

_REACH_SECONDS = 5.0
"""Seconds that the master may take to accept a connection. Not tuned."""

_LOCAL_BYTES = 16 << 20
"""Bytes that Mooncake registers for calls that FlexKV does not use. Not tuned."""


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """The settings `mooncake_...`, each without that prefix; `segment_bytes` is in bytes."""

    master: str
    metadata: str
    protocol: str
    device: str
    segment_bytes: int
    replicas: int


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
    record = MetadataRecord(settings.metadata, fingerprint, limits.timeout_seconds)
    together = most_jobs(limits.threads) * max(1, limits.batch_bytes // slot_bytes)
    blocks = MooncakeBlocks(
        partial(_join, settings),
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


def _join(settings: MooncakeSettings) -> MooncakeDistributedStore:
    """Join the store. Mooncake waits for a master that hangs for ever.

    Raises:
        OSError: the master cannot be reached, or Mooncake refuses.
    """
    # First, because Mooncake tries for 90 s to reach a master that is not there, and notices no
    # master that comes meanwhile.
    own = own_address(settings.master)
    client = MooncakeDistributedStore()
    code = client.setup(
        own,
        settings.metadata,
        settings.segment_bytes,
        _LOCAL_BYTES,
        settings.protocol,
        settings.device,
        settings.master,
    )
    if code:
        client.close()
        raise MooncakeError(f"code {code} of Mooncake's client")
    return client


def own_address(master: str) -> str:
    """This machine's address on the route to the master, by which other nodes reach it; an IPv6
    address is in brackets.

    Raises:
        OSError: the master cannot be reached.
    """
    host, _, port = master.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS) as probe:
        own = str(probe.getsockname()[0])
    return f"[{own}]" if ":" in own else own
