# SPDX-License-Identifier: Apache-2.0
"""A KVCache over a real arena and a real disk, and the one rank that moves its bytes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexkv import KVCache
from flexkv.client import FetchId, Transfer
from flexkv.eviction import POLICIES, AnyPolicy
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.tiers.base import AttachedTier
from flexkv.tiers.disk import open_disk_tier
from flexkv.types.admission import ADMISSIONS
from flexkv.types.mover import Direction, Status
from packages.inside_tiers import store_of

FORMAT = BlockFormat(1, (4096,))
FINGERPRINT = "0123456789abcdef" * 2
STALL_SECONDS = 60.0


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def content(key: bytes) -> bytes:
    return hashlib.blake2b(key).digest() * (FORMAT.slot_bytes // 64)


class Engine:
    """A cache of `slots` blocks over disks of `disk_slots` each, and the one rank that copies."""

    def __init__(
        self,
        *roots: Path,
        slots: int = 8,
        disk_slots: int = 64,
        admission: str = "write_through",
        policy: str | Callable[[int], AnyPolicy] = "lru",
    ) -> None:
        make_policy = policy if callable(policy) else POLICIES[policy]
        self._gate = threading.Event()
        self.arena = Arena.create(ArenaSpec(FORMAT, slots), threads=1)
        capacity = len(roots) * (disk_slots * (FORMAT.slot_bytes + 64) + 40960)
        self.disk = open_disk_tier(
            [*map(str, roots)],
            FINGERPRINT,
            FORMAT.slot_bytes,
            capacity,
            stall_seconds=STALL_SECONDS,
            policy=make_policy,
        )
        tier = AttachedTier(self.disk, ADMISSIONS[admission], STALL_SECONDS)
        self.cache = KVCache(self.arena, make_policy(slots), [tier])

    def finish(self, transfer: Transfer) -> None:
        """Copy, as the rank would: a load must find its own bytes."""
        for key, slot in zip(transfer.keys, transfer.slots, strict=True):
            with self.arena.slot_view(slot) as view:
                if transfer.direction is Direction.STORE:
                    view[:] = content(key)
                else:
                    assert bytes(view) == content(key)
        self.report(transfer, Status.DONE)

    def report(self, transfer: Transfer, status: Status) -> None:
        """Report the end of a copy, as the rank would."""
        self.arena.board.report(transfer.cell, 0, status)
        self.cache.poll()

    def settle(self) -> None:
        while self.cache.busy:
            self.cache.poll()
            time.sleep(0)

    def store(self, *names: str) -> None:
        prefix = keys(*names)
        transfer = self.cache.store(prefix, self.cache.missing(prefix))
        assert transfer is not None
        self.finish(transfer)
        self.settle()

    def wait(self, fetch: FetchId) -> None:
        while not self.cache.fetch_state(fetch).done:
            self.cache.poll()
            time.sleep(0)

    def fetched(self, *names: str) -> int:
        """Blocks of a prefix that can be loaded once the disk was asked; loads them."""
        fetch = self.cache.fetch(keys(*names))
        if fetch is not None:
            self.wait(fetch)
        hits = self.cache.lookup(keys(*names))
        if hits:
            transfer = self.cache.load(keys(*names)[:hits])
            assert transfer is not None
            self.finish(transfer)
        if fetch is not None:
            self.cache.end_fetch(fetch)
        self.settle()
        return hits

    def hang(self, reached: threading.Event | None = None) -> Callable[[], None]:
        """Reads wait until the returned function is called; `reached` is set once one does."""
        store: Any = store_of(self.disk.drives[0])
        self._gate = gate = threading.Event()
        read = store.read

        def waiting(*args: Any) -> Any:
            if reached is not None:
                reached.set()
            gate.wait()
            return read(*args)

        store.read = waiting
        return gate.set

    def close(self) -> None:
        self._gate.set()
        assert self.cache.close()
        self.arena.close()
