# SPDX-License-Identifier: Apache-2.0
"""Blocks as objects of buckets in S3, GCS or Azure, or as files of a folder that nodes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from flexkv.settings import CacheConfig
from flexkv.tiers.epochs import EpochRecord
from flexkv.tiers.remote import OpenStore
from flexkv.tiers.shared_store import SharedStore
from flexkv.types.changes import Medium

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class _Objects(SharedStore):
    def open(
        self, config: CacheConfig, fingerprint: str, slot_bytes: int, queue_bytes: int
    ) -> OpenStore:
        store = self._connect(config)
        from flexkv.tiers.objects.object_store import ObjectBlocks, ObjectRecord, Requests
        from flexkv.tiers.objects.open_objects import report_unread

        report_unread(str(config.objects_url))
        requests = Requests(store, config.objects_timeout_seconds)
        record = ObjectRecord(requests, fingerprint)
        limits = self.limits(config, queue_bytes)
        return OpenStore(
            ObjectBlocks(requests), record, limits, f"objects_url {config.objects_url}"
        )

    def refuse(self, config: CacheConfig) -> None:
        self._connect(config)

    def advice(self, config: CacheConfig) -> list[tuple[str, str]]:
        self.import_client(config)
        from flexkv.tiers.objects.open_objects import unread_variables

        return unread_variables(str(config.objects_url))

    def probes(self, config: CacheConfig) -> Iterator[tuple[str, Callable[[], object]]]:
        store = self._connect(config)
        from flexkv.tiers.objects.object_store import reach

        yield "objects_url", lambda: reach(store)  # an address may hold a secret

    def fingerprints(self, config: CacheConfig) -> list[str]:
        store = self._connect(config)
        from flexkv.tiers.objects.object_store import fingerprints_in

        return fingerprints_in(store)

    def records(self, config: CacheConfig, fingerprints: Sequence[str]) -> list[EpochRecord]:
        store = self._connect(config)
        from flexkv.tiers.objects.object_store import ObjectRecord, Requests

        requests = Requests(store, config.objects_timeout_seconds)
        return [ObjectRecord(requests, each) for each in fingerprints]

    def _connect(self, config: CacheConfig) -> ObjectStore:
        self.import_client(config)
        from flexkv.tiers.objects.open_objects import connect

        return connect(str(config.objects_url), config.objects_timeout_seconds)


STORE = _Objects(Medium.OBJECTS, "flexkv.tiers.objects.open_objects")
