# SPDX-License-Identifier: Apache-2.0
"""The record of the epoch as an object of the store, where no metadata server keeps one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flexkv.tiers.mooncake.member import NO_SPACE, Client, MooncakeError, error_of

COPIES = 3
"""Nodes that get a new record, if the store has as many. Not tuned."""

_READS = 20
_PAUSE_SECONDS = 0.02
"""Reads of a record that is there and cannot be read, and seconds between them: another process
may be writing it. Not tuned."""


class StoreRecord:
    """A `flexkv.tiers.epochs.EpochRecord`. The master lets one of several processes create it.

    Each node that lends memory asks for a copy of the record that it reads, so that the record
    lives as long as one of these nodes does.

    The methods raise `OSError` if the store fails, or if no node lends memory to keep the record.

    Args:
        client: returns the client. Raises OSError if it has not joined the store.
        config: Mooncake's `ReplicateConfig` of the record. It must keep the record from eviction.
        lends: whether this process lends memory to the store.
    """

    def __init__(
        self, client: Callable[[], Client], config: Any, fingerprint: str, *, lends: bool
    ) -> None:
        self._client = client
        self._config = config
        self._lends = lends
        self._held = b""
        self._name = f"flexkv/epochs/{fingerprint}"

    def read(self) -> bytes | None:
        client = self._client()
        for _ in range(_READS):
            # Empty if it is not there, and if the call fails.
            if data := bytes(client.get(self._name)):
                self._hold(client, data)
                return data
            (code,) = client.batch_is_exist([self._name])
            if code == 0:
                return None
            if code < 0:
                raise error_of("a question to the master", code)
            time.sleep(_PAUSE_SECONDS)
        raise MooncakeError("the record of the epoch cannot be read from the nodes that keep it")

    def create(self, record: bytes) -> None:
        # It also ends with 0 if there is a record, which it does not replace.
        self._check(self._client().put(self._name, record, self._config))

    def replace(self, record: bytes) -> None:
        self._check(self._client().upsert(self._name, record, self._config))

    def _hold(self, client: Client, data: bytes) -> None:
        """Have this node keep a copy. If the master refuses, the next read asks again."""
        if self._lends and data != self._held:
            _, code = client.create_copy_task(self._name, [client.get_hostname()])
            if code == 0:
                self._held = data

    def _check(self, code: int) -> None:
        if code == NO_SPACE:
            raise MooncakeError(
                "no node of the Mooncake Store lends memory for the record of the epoch; an engine "
                "with mooncake_segment_gb above 0, or a node of Mooncake's own, must lend some"
            )
        if code:
            raise error_of("a write of the record of the epoch", code)
