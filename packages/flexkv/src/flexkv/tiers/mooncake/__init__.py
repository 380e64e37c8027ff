# SPDX-License-Identifier: Apache-2.0
"""Blocks in Mooncake Store: host memory of many nodes, over RDMA or TCP."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

from flexkv.settings import CacheConfig
from flexkv.tiers.epochs import EpochRecord
from flexkv.tiers.mooncake.metadata_record import HTTP, MetadataRecord
from flexkv.tiers.remote import OpenStore
from flexkv.tiers.shared_store import SharedStore
from flexkv.types.changes import Medium

_THREADS = 4
"""Reads and writes that run at once. Not tuned."""
_BATCH_BYTES = 8 << 20
"""Bytes of a call. Each call costs a request to the master. Tuned over TCP on two cores: blocks of
512 KiB arrived at 1.1 GB/s in calls of 4 MiB and at 1.5 GB/s in calls of 8 MiB. Calls of 32 MiB
took a quarter less time for many blocks, but delay the first block of a fetch."""

_NOBODY = "0" * 32
"""A fingerprint that no blocks have."""


class _Mooncake(SharedStore):
    def open(
        self, config: CacheConfig, fingerprint: str, slot_bytes: int, queue_bytes: int
    ) -> OpenStore:
        self.import_client(config)
        from flexkv.tiers.mooncake.open_mooncake import open_blocks

        limits = dataclasses.replace(
            self.limits(config, queue_bytes), threads=_THREADS, batch_bytes=_BATCH_BYTES
        )
        name = (
            f"mooncake_master {config.mooncake_master} or mooncake_metadata "
            f"{config.mooncake_metadata}, by protocol {config.mooncake_protocol!r} with device "
            f"{config.mooncake_device!r},"
        )
        blocks, record = open_blocks(config, fingerprint, slot_bytes, limits)
        return OpenStore(blocks, record, limits, name)

    def refuse(self, config: CacheConfig) -> None:
        """Does not import the client: that starts threads, and an engine may fork this process."""
        if find_spec("mooncake") is None:
            raise self.lacks_client(config, "no module named 'mooncake'")

    def import_client(self, config: CacheConfig) -> None:
        """Set a variable of the environment that the first import reads. Without it, nodes that
        find each other without a metadata server know no IPv6. A name that leads to an IPv6 address
        is not noticed."""
        if "[" in str(config.mooncake_master):
            os.environ.setdefault("MC_USE_IPV6", "1")
        super().import_client(config)

    def probes(self, config: CacheConfig) -> Iterator[tuple[str, Callable[[], object]]]:
        self.import_client(config)
        from flexkv.tiers.mooncake.join import own_address

        master, metadata = str(config.mooncake_master), str(config.mooncake_metadata)
        yield f"mooncake_master {master}", lambda: own_address(master)
        if metadata.startswith(HTTP):
            record = MetadataRecord(metadata, _NOBODY, config.mooncake_timeout_seconds)
            yield f"mooncake_metadata {metadata}", record.read

    def records(self, config: CacheConfig, fingerprints: Sequence[str]) -> list[EpochRecord]:
        metadata, seconds = str(config.mooncake_metadata), config.mooncake_timeout_seconds
        if metadata.startswith(HTTP):
            return [MetadataRecord(metadata, each, seconds) for each in fingerprints]
        self.import_client(config)
        from flexkv.tiers.mooncake.open_mooncake import open_record

        return [open_record(config, each) for each in fingerprints]


STORE = _Mooncake(Medium.MOONCAKE, "flexkv.tiers.mooncake.open_mooncake")
