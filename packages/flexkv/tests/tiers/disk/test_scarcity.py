# SPDX-License-Identifier: Apache-2.0
"""Where not all of a prefix finds room on disk, its beginning does, and stays longest."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from disk_blocks import SLOT, names, opened
from faults.faulty_files import HangingFiles

from flexkv.tiers.disk import drive
from flexkv.tiers.job import Outcome
from packages.conftest import Clock
from packages.inside_tiers import assume_write_rate, write_rate

DONE, DROPPED = Outcome.DONE, Outcome.DROPPED
KEYS = names(24)


class SlowFiles(HangingFiles):
    """Writes wait until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.go.wait()
        return super().pwritev(fd, buffers, offset)


def test_too_few_slots_keep_the_beginning(tmp_path: Path) -> None:
    with opened(tmp_path, slots=10) as client:
        assert client.write(KEYS) == [DONE] * 10 + [DROPPED] * 14
        assert client.found(KEYS) == KEYS[:10]


def test_slots_that_are_being_written_are_not_free(tmp_path: Path) -> None:
    files = SlowFiles()
    files.go.set()
    with opened(tmp_path, slots=10, files=files) as client:
        files.go.clear()
        first = client.begin_write(KEYS[:6])
        second = client.tier.write(KEYS[6:14], client.buffers[6:14])
        files.go.set()
        assert client.wait(first, 6) == [DONE] * 6
        assert client.wait(second, 8) == [DONE] * 4 + [DROPPED] * 4


def test_a_spent_budget_keeps_the_beginning(tmp_path: Path) -> None:
    with opened(tmp_path, slots=64, day_bytes=10 * SLOT) as client:
        assert client.write(KEYS) == [DONE] * 10 + [DROPPED] * 14
        assert client.found(KEYS) == KEYS[:10]


@pytest.mark.parametrize("drives", [1, 2])
def test_a_full_queue_keeps_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drives: int
) -> None:
    monkeypatch.setattr(drive, "THREADS", 1)
    roots = [tmp_path / str(number) for number in range(drives)]
    files = SlowFiles()
    files.go.set()
    with opened(*roots, slots=64, queue_bytes=8 * SLOT, files=files) as client:
        files.go.clear()
        ticket = client.begin_write(KEYS)
        files.go.set()
        outcomes = client.wait(ticket, len(KEYS))
        done = outcomes.count(DONE)
        assert outcomes == [DONE] * done + [DROPPED] * (len(KEYS) - done)
        assert done == 8
        assert client.found(KEYS) == KEYS[:done]


@pytest.mark.parametrize("fast", [0, 1])
def test_a_drive_without_room_leaves_blocks_to_the_others(tmp_path: Path, fast: int) -> None:
    with opened(tmp_path / "a", tmp_path / "b", slots=8) as client:
        assume_write_rate(client.tier.drives[fast], 1e15)
        assert client.write(KEYS) == [DONE] * 16 + [DROPPED] * 8
        assert client.found(KEYS) == KEYS[:16]


def test_a_full_queue_leaves_blocks_to_other_drives(tmp_path: Path) -> None:
    files = SlowFiles()
    files.go.set()
    roots = tmp_path / "a", tmp_path / "b"
    with opened(*roots, slots=64, queue_bytes=8 * SLOT, files=files) as client:
        assume_write_rate(client.tier.drives[1], 1e15)
        files.go.clear()
        ticket = client.begin_write(KEYS)
        files.go.set()
        assert client.wait(ticket, len(KEYS)) == [DONE] * 8 + [DROPPED] * 16
        assert client.found(KEYS) == KEYS[:8]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("drives", [1, 2])
def test_the_end_leaves_first(tmp_path: Path, restart: bool, drives: int) -> None:
    roots = [tmp_path / str(number) for number in range(drives)]
    with opened(*roots, slots=20 // drives) as client:
        assert client.write(KEYS[:20]) == [DONE] * 20
        if not restart:
            assert client.write(names(8, first=100)) == [DONE] * 8
            assert client.found(KEYS) == KEYS[:12]
    if restart:
        with opened(*roots, slots=20 // drives) as client:
            assert client.write(names(8, first=100)) == [DONE] * 8
            assert client.found(KEYS) == KEYS[:12]


def test_a_drive_that_was_once_slow_is_measured_again(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At low load, where the other one takes all that comes."""
    monkeypatch.setattr(drive, "time", clock)
    with opened(tmp_path / "a", tmp_path / "b", slots=64) as client:
        slow, fast = client.tier.drives
        assume_write_rate(slow, 1.0)
        assume_write_rate(fast, 1e15)
        for key in KEYS[:8]:
            client.write([key])
        assert [key for key in KEYS[:8] if key in slow.index] == []
        clock.skip(61.0)
        client.write(KEYS[8:12])
        assert [key for key in KEYS[8:12] if key in slow.index] == KEYS[8:9]
        # The old rate, a byte a second, no longer counts at all.
        assert write_rate(slow) > 1000.0
