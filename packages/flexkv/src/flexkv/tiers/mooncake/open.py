# SPDX-License-Identifier: Apache-2.0
"""Opens the tier of a Mooncake Store."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from dataclasses import dataclass

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from flexkv.changes import Medium
from flexkv.tiers.epochs import Epochs
from flexkv.tiers.mooncake.store import MetadataRecord, MooncakeBlocks
from flexkv.tiers.remote import RemoteLimits, RemoteTier, States

logger = logging.getLogger(__name__)

SETUP_SECONDS = 15.0
"""How long the start of an engine waits for Mooncake, which itself waits for its master forever."""

TRANSFERS = {"tcp": 1, "rdma": 4}
"""Calls that move bytes at once. Over TCP several disturb each other: on two busy cores one call
after another got 64 MiB, in blocks of 2 MiB, at 0.5 to 0.8 GB/s, two at a time at 0.2 to 0.6, eight
at 0.1 to 0.2, however many blocks a call had. RDMA was not measured."""

_LOCAL_BYTES = 16 << 20
"""Memory that Mooncake registers for calls that FlexKV does not use."""


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """The settings `mooncake_...`."""

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
) -> RemoteTier | None:
    """The tier of a Mooncake Store, to which this process lends a segment of memory.

    Args:
        settings: see there.
        fingerprint: of the blocks.
        slot_bytes: of a block.
        limits: of the tier.
        states: see `RemoteTier`.

    Returns:
        None if the store cannot be reached: then the engine runs without it.
    """
    client = _set_up(settings)
    if client is None:
        logger.error(
            "mooncake_master %s or mooncake_metadata %s cannot be used; the engine runs without "
            "Mooncake until it is restarted; check that both servers run, that this machine "
            "reaches them, and protocol %r with device %r",
            settings.master,
            settings.metadata,
            settings.protocol,
            settings.device,
        )
        return None
    config = ReplicateConfig()
    config.replica_num = settings.replicas
    record = MetadataRecord(settings.metadata, fingerprint, limits.timeout_seconds)
    epochs = Epochs(record)
    try:
        epoch = epochs.open()
        logger.info("FlexKV shares blocks in Mooncake Store at %s", settings.master)
    except OSError as error:
        epoch = secrets.token_hex(16)
        logger.error(
            "mooncake_metadata %s: %s; blocks are shared with no other engine until this one is "
            "restarted; check the metadata server",
            settings.metadata,
            error,
        )
    together = limits.threads * max(1, limits.batch_bytes // slot_bytes)
    blocks = MooncakeBlocks(
        client,
        config,
        epochs,
        fingerprint,
        slot_bytes=slot_bytes,
        blocks=together,
        transfers=TRANSFERS[settings.protocol],
    )
    return RemoteTier(Medium.MOONCAKE, blocks, epoch, slot_bytes, limits, states=states)


def _set_up(settings: MooncakeSettings) -> MooncakeDistributedStore | None:
    """A client that has joined the store; None if that fails or takes too long."""
    client = MooncakeDistributedStore()
    lock = threading.Lock()
    codes: list[int] = []
    abandoned = threading.Event()

    def run() -> None:
        code = client.setup(
            _own_address(settings.master),
            settings.metadata,
            settings.segment_bytes,
            _LOCAL_BYTES,
            settings.protocol,
            settings.device,
            settings.master,
        )
        with lock:
            codes.append(code)
            late = abandoned.is_set()
        if late:
            client.close()

    # A daemon: it may wait for the master as long as the process lives.
    thread = threading.Thread(target=run, name="flexkv-mooncake-setup", daemon=True)
    thread.start()
    thread.join(SETUP_SECONDS)
    with lock:
        abandoned.set()
        return client if codes == [0] else None


def _own_address(master: str) -> str:
    """The address of this machine on the way to the master, where other nodes reach it. Sends
    nothing."""
    host, _, port = master.rpartition(":")
    family, kind, *_, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
