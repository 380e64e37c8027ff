# SPDX-License-Identifier: Apache-2.0
"""A cache over a real disk and a store that other engines fill; the test plays the workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import memory_store
from memory_store import MemoryStore

from flexkv import KVCache
from flexkv.eviction import LRUPolicy
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.tiers.base import AttachedTier
from flexkv.tiers.disk import open_disk_tier
from flexkv.tiers.remote import RemoteLimits, RemoteTier
from flexkv.types.admission import ADMISSIONS
from flexkv.types.changes import Medium
from flexkv.types.mover import Status
from packages.inside import assert_no_lease, assert_no_read, demoters_of, index_of, leaving_of
from packages.patience import wait_until
from packages.seen_fetch import SeenFetch, see
from packages.tier_blocks import ready_blocks

SLOT = 4096
FINGERPRINT = "fe" * 16
LONG = 60.0
"""Seconds that no test waits for: no deadline passes unless the clock is put forward."""


def names(text: str) -> list[bytes]:
    return [each.encode() for each in text]


def content(key: bytes) -> bytes:
    return (key * SLOT)[:SLOT]


class Node:
    """An engine with `slots` blocks in host memory, a disk and a share of `store`."""

    def __init__(
        self,
        root: Path,
        store: MemoryStore,
        *,
        slots: int = 8,
        disk: str | None = "second_hit",
        remote: str = "second_hit",
        question_seconds: float = LONG,
        stall_seconds: float = LONG,
        threads: int = 8,
    ) -> None:
        self.store = store
        self.arena = Arena.create(ArenaSpec(BlockFormat(1, (SLOT,)), slots), threads=1)
        limits = RemoteLimits(question_seconds, LONG, threads, batch_bytes=SLOT)
        opened = store.opened(limits, "mooncake")
        self.remote = RemoteTier(Medium.MOONCAKE, opened, memory_store.FINGERPRINT, SLOT)
        tiers = [AttachedTier(self.remote, ADMISSIONS[remote], stall_seconds)]
        if disk is not None:
            self.disk = open_disk_tier(
                [str(root)], FINGERPRINT, SLOT, 64 * (SLOT + 64) + 32768, stall_seconds=LONG
            )
            tiers.insert(0, AttachedTier(self.disk, ADMISSIONS[disk], stall_seconds))
        self.cache = KVCache(self.arena, LRUPolicy(), tiers)

    def until(self, done: Callable[[], bool]) -> None:
        wait_until(done, self.cache.poll)

    def settle(self) -> None:
        self.until(lambda: not self.cache.busy)

    def begin_store(self, text: str) -> None:
        """The engine's blocks have been copied, and nobody has polled since."""
        prefix = names(text)
        transfer = self.cache.store(prefix, self.cache.missing(prefix))
        assert transfer is not None
        for key, slot in zip(transfer.keys, transfer.slots, strict=True):
            with self.arena.slot_view(slot) as view:
                view[:] = content(key)
        self.arena.board.report(transfer.cell, 0, Status.DONE)

    def store_blocks(self, text: str) -> None:
        self.begin_store(text)
        self.settle()

    def put_on_disk(self, text: str) -> None:
        """Have blocks on disk, and not in host memory."""
        self.store_blocks(text)
        demoters_of(self.cache)[0].offer(names(text))
        self.settle()
        index = index_of(self.cache)
        for key in reversed(names(text)):
            found = index.lease([key])
            assert found is not None
            index.drop(found)
            index.release(found)
        assert self.on_disk(text) == text

    def on_disk(self, text: str) -> str:
        there = self.disk.contains(names(text))
        return "".join(name for name, has in zip(text, there, strict=True) if has)

    def begin(self, text: str, *, queued: bool = False) -> SeenFetch:
        fetch = see(self.cache, names(text), queued=queued)
        assert fetch is not None
        return fetch

    def fetched(self, text: str) -> str:
        """What of a prefix has come once a fetch ended, each block with its own bytes."""
        fetch = see(self.cache, names(text))
        if fetch is not None:
            self.until(lambda: fetch.done)
        hits = self.cache.lookup(names(text))
        if fetch is not None:
            self.cache.end_fetch(fetch)
        self.assert_own_bytes()
        return text[:hits]

    def assert_own_bytes(self) -> None:
        for key, block in ready_blocks(index_of(self.cache)).items():
            with self.arena.slot_view(block.slot) as view:
                assert bytes(view) == content(key)

    def assert_at_rest(self) -> None:
        """Nothing is under way, leased or lost."""
        self.settle()
        index = index_of(self.cache)
        assert_no_read(self.cache)
        assert not leaving_of(self.cache)
        assert_no_lease(self.cache)
        assert index.free_slots + len(index) == index.num_slots

    def close(self) -> None:
        self.store.release()
        self.settle()
        assert self.cache.close()
        self.arena.close()
