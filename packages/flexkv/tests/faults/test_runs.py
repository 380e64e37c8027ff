# SPDX-License-Identifier: Apache-2.0
"""Faults in calls that move several blocks: only the blocks that they concern are lost."""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk_blocks import FINGERPRINT, SLOT, Client, names, opened

from flexkv.tiers.disk import OsFiles, table
from flexkv.tiers.job import Outcome
from packages.inside_tiers import store_of

SLOTS = 40
RUN = 20
KEYS = names(RUN)
DONE, FAILED, DAMAGED = Outcome.DONE, Outcome.FAILED, Outcome.DAMAGED
PLACES = pytest.mark.parametrize("place", [0, 7, RUN - 1])


class Limit(enum.Enum):
    """What calls do that come to a bad place."""

    EIO = "fail, all of the call"
    SHORT = "end before it, and fail if it comes first"
    NOTHING = "end before it, and transfer nothing if it comes first"


class BadPlaces(OsFiles):
    """Files on a disk of which some places are bad.

    Attributes:
        bad: name of the file, first byte and length of what is bad.
        limit: what happens there.
        once: whether a place is good again after a call came to it.
        calls: buffers of each call for data, reads and writes, since it was cleared.
        hits: calls that came to a bad place, by how many buffers they had.
    """

    def __init__(self) -> None:
        self.bad: tuple[str, int, int] | None = None
        self.limit = Limit.EIO
        self.once = False
        self.calls: list[int] = []
        self.hits: list[int] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._within(super().preadv, fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._within(super().pwritev, fd, buffers, offset)

    def _within(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        fd: int,
        buffers: Sequence[memoryview],
        offset: int,
    ) -> int:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if name.startswith("slab"):
            self.calls.append(len(buffers))
        size = sum(map(len, buffers))
        if self.bad is None or name != self.bad[0]:
            return call(fd, buffers, offset)
        _, start, length = self.bad
        if offset >= start + length or offset + size <= start:
            return call(fd, buffers, offset)
        self.hits.append(len(buffers))
        if self.once:
            self.bad = None
        good = max(0, start - offset) if self.limit is not Limit.EIO else 0
        if good:
            return call(fd, _first(buffers, good), offset)
        if self.limit is Limit.NOTHING:
            return 0
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def _first(buffers: Sequence[memoryview], size: int) -> list[memoryview]:
    """The first `size` bytes of `buffers`."""
    parts = []
    for buffer in buffers:
        parts.append(buffer[:size])
        size -= len(parts[-1])
    return [part for part in parts if len(part)]


@contextmanager
def store(root: Path) -> Iterator[tuple[Client, BadPlaces]]:
    """One with room for two runs."""
    files = BadPlaces()
    with opened(root, slots=SLOTS, files=files) as client:
        yield client, files


def all_but(place: int, outcome: Outcome) -> list[Outcome]:
    """The outcomes of `KEYS` if one is special."""
    return [outcome if i == place else DONE for i in range(RUN)]


def test_a_batch_is_written_and_read_in_one_call(tmp_path: Path) -> None:
    with store(tmp_path) as (client, files):
        assert client.write(KEYS) == [DONE] * RUN
        assert files.calls == [RUN]
        files.calls.clear()
        assert client.read(KEYS) == [DONE] * RUN
        assert files.calls == [RUN]
        files.calls.clear()
        backwards = KEYS[::-1]
        assert client.read(backwards) == [DONE] * RUN
        assert files.calls == [RUN]


@PLACES
@pytest.mark.parametrize("limit", Limit)
def test_one_bad_block_of_a_run_that_is_read_is_a_miss_and_no_other(
    tmp_path: Path, faults: Callable[[int], None], place: int, limit: Limit
) -> None:
    with store(tmp_path) as (client, files):
        client.write(KEYS)
        # In the middle of the block, so that a short call ends within it.
        start = client.slots_of(KEYS)[KEYS[place]] * SLOT + SLOT // 2
        files.bad, files.limit = ("slab-00000", start, 1), limit
        expected = DAMAGED if limit is Limit.NOTHING else FAILED
        assert client.read(KEYS) == all_but(place, expected)
        assert RUN in files.hits
        assert 1 in files.hits
        (ledger,) = [store_of(drive).ledger for drive in client.tier.drives]
        assert ledger.hit_blocks == RUN - 1
        assert ledger.damaged_blocks == (limit is Limit.NOTHING)
        client.settle()
        left = [key for key in KEYS if key != KEYS[place]]
        assert client.found(KEYS) == left
    with opened(tmp_path, slots=SLOTS) as client:
        assert client.found(KEYS) == left
        assert client.read(left) == [DONE] * len(left)
    faults(len(files.hits))


@PLACES
@pytest.mark.parametrize("limit", Limit)
@pytest.mark.parametrize("what", ["block", "record", "block written over", "record written over"])
def test_one_bad_place_in_a_run_that_is_written_fails_one_block_and_no_other(
    tmp_path: Path, faults: Callable[[int], None], place: int, limit: Limit, what: str
) -> None:
    part, *full = what.split(maxsplit=1)
    old = names(SLOTS, first=100)
    with store(tmp_path) as (client, files):
        if full:
            assert client.write(old) == [DONE] * SLOTS
        # The first batch takes the first slots; the next one those of its end, the last one first.
        slot = place if not full else client.slots_of(old)[old[-1]] - place
        files.limit = limit
        if part == "block":
            files.bad = ("slab-00000", slot * SLOT + SLOT // 2, 1)
        else:
            files.bad = ("table", table.record_offset(slot) + 30, 1)
        assert client.write(KEYS) == all_but(place, FAILED)
        assert files.hits[:1] == [RUN if part == "block" else 1]
        left = [key for key in KEYS if key != KEYS[place]]
        assert client.found(KEYS) == left
        assert client.read(left) == [DONE] * (RUN - 1)
        (ledger,) = [store_of(drive).ledger for drive in client.tier.drives]
        assert ledger.written_blocks == RUN - 1 + (SLOTS if full else 0)
        files.bad = None
    with opened(tmp_path, slots=SLOTS) as client:
        found = client.found([*KEYS, *old])
        assert found == [*left, *(old[:RUN] if full else [])]
        assert client.read(found) == [DONE] * len(found)
    faults(len(files.hits))


@pytest.mark.parametrize("limit", Limit)
@pytest.mark.parametrize("act", ["read", "write"])
def test_a_call_for_a_run_that_goes_wrong_once_loses_nothing(
    tmp_path: Path, faults: Callable[[int], None], limit: Limit, act: str
) -> None:
    with store(tmp_path) as (client, files):
        if act == "read":
            client.write(KEYS)
        files.bad, files.limit, files.once = ("slab-00000", 7 * SLOT + 100, 1), limit, True
        assert (client.write if act == "write" else client.read)(KEYS) == [DONE] * RUN
        assert files.hits == [RUN]
        assert client.read(KEYS) == [DONE] * RUN
    with opened(tmp_path, slots=SLOTS) as client:
        assert client.read(KEYS) == [DONE] * RUN
    faults(1)


@PLACES
def test_a_flipped_bit_of_a_run_is_one_miss(
    tmp_path: Path, faults: Callable[[int], None], place: int
) -> None:
    with store(tmp_path) as (client, files):
        client.write(KEYS)
        offset = client.slots_of(KEYS)[KEYS[place]] * SLOT + 4321
        with (tmp_path / FINGERPRINT / "slab-00000").open("r+b") as file:
            byte = os.pread(file.fileno(), 1, offset)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 4]), offset)
        files.calls.clear()
        assert client.read(KEYS) == all_but(place, DAMAGED)
        assert files.calls == [RUN]
    faults(1)


def test_a_file_that_ends_in_the_middle_of_a_run_loses_what_was_behind(
    tmp_path: Path, faults: Callable[[int], None]
) -> None:
    with store(tmp_path) as (client, _):
        client.write(KEYS)
        slots = client.slots_of(KEYS)
        os.truncate(tmp_path / FINGERPRINT / "slab-00000", 12 * SLOT + 4096)
        expected = [DONE if slots[key] < 12 else DAMAGED for key in KEYS]
        assert expected.count(DONE) == 12
        assert client.read(KEYS) == expected
    faults(1)
