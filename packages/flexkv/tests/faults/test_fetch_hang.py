# SPDX-License-Identifier: Apache-2.0
"""Fetches of a cache over real drives of which one hangs, or is too busy to begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from disk_blocks import DEADLINE, FINGERPRINT, SLOT, capacity_of, names
from faults.faulty_files import HangingFiles

from flexkv import KVCache
from flexkv.eviction import LRUPolicy
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.tiers.base import AttachedTier
from flexkv.tiers.disk import DiskTier, open_disk_tier
from flexkv.types.admission import ADMISSIONS
from flexkv.types.mover import Status
from packages.conftest import Clock
from packages.inside import below_of
from packages.inside_tiers import assume_write_rate, living_threads
from packages.patience import wait_until
from packages.seen_fetch import SeenFetch, see

KEYS = names(40)


class Node:
    """A cache over two drives, which have `KEYS`; host memory has the last of them."""

    def __init__(self, roots: Sequence[Path], files: HangingFiles) -> None:
        self.arena = Arena.create(ArenaSpec(BlockFormat(1, (SLOT,)), 16), threads=1)
        self.disk: DiskTier = open_disk_tier(
            [str(root) for root in roots],
            FINGERPRINT,
            SLOT,
            capacity_of(len(KEYS), 2),
            stall_seconds=DEADLINE,
            files=files,
        )
        tier = AttachedTier(self.disk, ADMISSIONS["write_through"], DEADLINE)
        self.cache = KVCache(self.arena, LRUPolicy(), [tier])
        for start in range(0, len(KEYS), 8):
            for drive in self.disk.drives:
                assume_write_rate(drive, 1.0)  # each gets half, whatever was measured
            store = self.cache.store(KEYS[start : start + 8], range(8))
            assert store is not None
            self.arena.board.report(store.cell, 0, Status.DONE)
            self.wait(lambda: not self.cache.busy)

    def wait(self, until: Callable[[], bool]) -> None:
        wait_until(until, self.cache.poll)

    def on_drive(self, number: int) -> list[bytes]:
        """Keys of blocks that only this drive has."""
        index = self.disk.drives[number].index
        return [key for key in KEYS if key in index and not self.cache.lookup([key])]

    def fetch(self, keys: Sequence[bytes]) -> SeenFetch:
        fetch = see(self.cache, keys)
        assert fetch is not None
        return fetch


@pytest.fixture
def files() -> Iterator[HangingFiles]:
    with HangingFiles() as made:
        yield made


@pytest.fixture
def node(tmp_path: Path, files: HangingFiles) -> Iterator[Node]:
    made = Node((tmp_path / "a", tmp_path / "b"), files)
    yield made
    files.release()
    assert made.cache.close()
    made.arena.close()


def test_a_fetch_over_a_hung_drive_ends_at_the_gap(
    node: Node, files: HangingFiles, tmp_path: Path, clock: Clock, faults: Callable[[int], None]
) -> None:
    good, bad = node.on_drive(0), node.on_drive(1)
    files.hang(tmp_path / "b")
    victim = node.fetch([good[0], bad[0], good[1]])
    node.wait(lambda: victim.arrived == 1 and len(below_of(node.cache).fetcher.reads.by_key) == 1)
    assert files.hanging.wait(DEADLINE)
    clock.skip(DEADLINE + 1)
    other = node.fetch([good[2]])
    node.wait(lambda: other.done)
    assert (victim.arrived, victim.done) == (1, True)
    assert other.arrived == 1
    for fetch in (victim, other):
        node.cache.end_fetch(fetch)
    files.release()
    node.wait(lambda: not node.cache.busy)
    assert node.cache.lookup([good[0], bad[0], good[1], good[2]]) == 4
    faults(1)


def test_a_retry_before_the_next_poll_gets_what_was_cancelled(
    node: Node, files: HangingFiles, tmp_path: Path, faults: Callable[[int], None]
) -> None:
    wanted, busy = node.on_drive(0)[:4], node.on_drive(0)[4:]
    threads = living_threads(node.disk.drives[0].link)
    assert len(busy) >= threads
    files.hang(tmp_path / "a")
    others = [node.fetch([key]) for key in busy[:threads]]
    node.wait(lambda: node.disk.drives[0].link.queued_bytes == 0)
    first = node.fetch(wanted)
    node.cache.end_fetch(first)
    again = node.fetch(wanted)
    node.cache.poll()
    assert not again.done
    files.release()
    node.wait(lambda: again.done)
    assert again.arrived == 4
    for fetch in (again, *others):
        node.cache.end_fetch(fetch)
    node.wait(lambda: not node.cache.busy)
    faults(1)
