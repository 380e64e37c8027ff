# SPDX-License-Identifier: Apache-2.0
"""Blocks whose bytes follow from their keys, and a client that compares all that it reads."""

from __future__ import annotations

import bisect
import hashlib
import mmap
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flexkv.tiers.disk import DiskTier, open_disk_tier
from flexkv.tiers.disk.disk_store import slots_within
from flexkv.tiers.disk.drive import THREADS
from flexkv.tiers.job import Outcome, Priority
from packages.inside_tiers import erase_slot, is_drained, is_kept_up, running_jobs, why_unopened
from packages.patience import wait_until

SLOT = 8192
FINGERPRINT = "ab" * 32
DEADLINE = 60.0
"""Seconds after which a result counts as lost, or a drive as hanging: longer than a busy machine
stands still."""


def bytes_of(key: bytes, salt: bytes = b"", size: int = SLOT) -> bytes:
    """What the block of `key` holds; another `salt` is another model."""
    return hashlib.shake_128(salt + key).digest(size)


def names(count: int, first: int = 0) -> list[bytes]:
    """Keys of 32 bytes."""
    return [f"block {number:026d}".encode() for number in range(first, first + count)]


def capacity_of(slots: int, parts: int = 1) -> int:
    """The bytes that `parts` directories with `slots` slots each need."""
    sizes = range(2 * slots * SLOT + (1 << 20))
    return parts * bisect.bisect_left(sizes, slots, key=lambda size: slots_within(size, SLOT))


def buffers(count: int, slot_bytes: int = SLOT) -> list[memoryview]:
    """One block each, aligned to 4 KiB."""
    memory = memoryview(mmap.mmap(-1, count * slot_bytes))
    return [memory[i * slot_bytes : (i + 1) * slot_bytes] for i in range(count)]


class Client:
    """Writes and reads blocks of known bytes, and fails at the first wrong byte."""

    def __init__(self, tier: DiskTier, salt: bytes = b"", window: int = 64) -> None:
        self.tier = tier
        self.salt = salt
        self.buffers = buffers(window)
        self.results: dict[int, dict[int, Outcome]] = {}

    def write(self, keys: Sequence[bytes]) -> list[Outcome]:
        """The outcome of each block."""
        outcomes = []
        for start in range(0, len(keys), len(self.buffers)):
            part = keys[start : start + len(self.buffers)]
            outcomes += self.wait(self.begin_write(part), len(part))
        return outcomes

    def begin_write(
        self, keys: Sequence[bytes], after: Sequence[bytes | None] | None = None
    ) -> int:
        """The ticket of one batch, in the first buffers. `after`: what each block builds on."""
        for key, buffer in zip(keys, self.buffers, strict=False):
            buffer[:] = bytes_of(key, self.salt)
        return self.tier.write(keys, self.buffers[: len(keys)], after)

    def read(self, keys: Sequence[bytes], priority: Priority = Priority.LOAD) -> list[Outcome]:
        """The outcome of each block; the bytes of all that are DONE were right."""
        outcomes = []
        for start in range(0, len(keys), len(self.buffers)):
            part = keys[start : start + len(self.buffers)]
            ticket = self.tier.read(part, self.buffers[: len(part)], priority)
            outcomes += self.check(part, self.wait(ticket, len(part)))
        return outcomes

    def check(self, keys: Sequence[bytes], outcomes: list[Outcome]) -> list[Outcome]:
        """`outcomes`, once the first buffers hold what they say."""
        for key, buffer, outcome in zip(keys, self.buffers, outcomes, strict=False):
            if outcome is Outcome.DONE:
                assert buffer == bytes_of(key, self.salt), f"wrong bytes for {key!r}"
        return outcomes

    def found(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of `keys` that the tier says it has."""
        return [key for key, has in zip(keys, self.tier.contains(keys), strict=True) if has]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget those of `keys` that the tier has, as if a read had found each damaged."""
        for key in keys:
            for drive in self.tier.drives:
                slot = drive.index.lease(key)
                if slot is not None:
                    erase_slot(drive, slot)

    def slots_of(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Where the blocks of `keys`, all there, lie in the only directory."""
        (drive,) = self.tier.drives
        slots = {}
        for key in keys:
            slot = drive.index.lease(key)
            assert slot is not None
            drive.index.release(slot)
            slots[key] = slot
        return slots

    def refill(self, keys: Sequence[bytes]) -> None:
        """Write `keys`, of which some may be lost, and read them back."""
        self.settle()
        assert self.write(keys) == [Outcome.DONE] * len(keys)
        assert self.read(keys) == [Outcome.DONE] * len(keys)

    def wait(self, ticket: int, count: int) -> list[Outcome]:
        """The outcomes of a batch, in its order."""
        wait_until(lambda: len(self.pump().get(ticket, {})) >= count)
        outcomes = self.results.pop(ticket, {})
        assert sorted(outcomes) == list(range(count))
        return [outcomes[position] for position in range(count)]

    def pump(self) -> dict[int, dict[int, Outcome]]:
        """Results so far, by ticket and position."""
        for result in self.tier.poll():
            batch = self.results.setdefault(result.ticket, {})
            assert result.position not in batch, "a block has two results"
            batch[result.position] = result.outcome
        return self.results

    def begin_reads(self, number: int, keys: Sequence[bytes]) -> list[int]:
        """Read blocks of one directory in a batch each. Returns their tickets, once half of the
        directory's threads have a job."""
        assert len(keys) >= THREADS // 2
        free = self.buffers[-len(keys) :]
        batches = zip(keys, free, strict=True)
        tickets = [self.tier.read([key], [buffer], Priority.LOAD) for key, buffer in batches]
        wait_until(lambda: running_jobs(self.tier.drives[number].link) >= THREADS // 2)
        return tickets

    def adopt(self, but: int = 0) -> None:
        """Wait until all directories are in use, but for so many that hang."""
        wait_until(lambda: len(self.tier.connecting) <= but, self.pump)

    def settle(self) -> None:
        """Wait until nothing is to be done."""
        drives = self.tier.drives
        wait_until(lambda: all(is_drained(d.link) and is_kept_up(d) for d in drives), self.pump)


@contextmanager
def opened(
    *roots: object,
    slots: int = 64,
    salt: bytes = b"",
    fingerprint: str = FINGERPRINT,
    **options: Any,
) -> Iterator[Client]:
    """A client of a tier with `slots` slots in each of `roots`; closed at the end."""
    capacity = capacity_of(slots, len(roots))
    options = {"stall_seconds": DEADLINE} | options
    tier = open_disk_tier([str(root) for root in roots], fingerprint, SLOT, capacity, **options)
    try:
        yield Client(tier, salt)
    finally:
        assert tier.close()


@contextmanager
def unopened(*roots: object, why: str, **options: Any) -> Iterator[Client]:
    """`opened`, with a directory that is not open for a reason that the pattern `why` fits."""
    with opened(*roots, **options) as client:
        problems = [why_unopened(each) for each in client.tier.connecting]
        assert any(re.search(why, each) for each in problems), problems
        yield client
