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
"""Longest wait for Mooncake at an engine's start. Mooncake itself waits for its master for ever.
Not tuned."""

TRANSFERS = {"tcp": 1, "rdma": 4}
"""Calls that move bytes at the same time, by protocol. Over TCP, calls slow each other down: on two
busy cores, reading 64 MiB in blocks of 2 MiB reached 0.5 to 0.8 GB/s with one call at a time, 0.2
to 0.6 with two and 0.1 to 0.2 with eight, whatever the blocks per call. RDMA was not measured."""

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
) -> RemoteTier | None:
    """Open the tier of a Mooncake Store and lend the store a segment of this process's memory.

    The call takes up to `SETUP_SECONDS`, and the time of some requests to the metadata server. If
    that server fails, the tier shares blocks with no other engine.

    Args:
        settings: of the store.
        fingerprint: digest of all that the blocks' bytes depend on apart from their keys.
        slot_bytes: bytes of a block.
        limits: of the tier.
        states: reports the tier's circuits to other processes; the tier owns it. None if
            nothing is reported.

    Returns:
        The tier, which owns its client; None if the store cannot be reached. The error is logged
        then, and the engine runs without the store.
    """
    client = _set_up(settings)
    if isinstance(client, str):
        logger.error(
            "mooncake_master %s or mooncake_metadata %s cannot be used (%s); the engine runs "
            "without Mooncake until it is restarted; check that both servers run, that this "
            "machine reaches them, and protocol %r with device %r",
            settings.master,
            settings.metadata,
            client,
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


def _set_up(settings: MooncakeSettings) -> MooncakeDistributedStore | str:
    """Join the store. If that fails or takes longer than `SETUP_SECONDS`, returns the reason."""
    client = MooncakeDistributedStore()
    lock = threading.Lock()
    ended: list[str] = []
    abandoned = threading.Event()

    def set_up() -> str:
        """Why the client cannot be used; empty if it can be."""
        try:
            own = _own_address(settings.master)
        except OSError as error:
            return str(error)
        code = client.setup(
            own,
            settings.metadata,
            settings.segment_bytes,
            _LOCAL_BYTES,
            settings.protocol,
            settings.device,
            settings.master,
        )
        return f"code {code} of Mooncake's client" if code else ""

    def run() -> None:
        problem = set_up()
        with lock:
            ended.append(problem)
            late = abandoned.is_set()
        if late:
            client.close()

    # A daemon: it may wait for the master as long as the process lives.
    thread = threading.Thread(target=run, name="flexkv-mooncake-setup", daemon=True)
    thread.start()
    thread.join(SETUP_SECONDS)
    with lock:
        abandoned.set()
        if not ended:
            return f"no answer within {SETUP_SECONDS:g} s"
        return ended[0] or client


def _own_address(master: str) -> str:
    """This machine's address on the route to the master, by which other nodes reach it. Sends
    nothing.

    Raises:
        OSError: the master's name cannot be resolved, or there is no route to it.
    """
    host, _, port = master.rpartition(":")
    family, kind, *_, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
