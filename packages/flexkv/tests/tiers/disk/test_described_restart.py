# SPDX-License-Identifier: Apache-2.0
"""After a restart, blocks are reported with their descriptions, few at once; a file of descriptions
that fails costs the descriptions only."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from disk_blocks import DEADLINE, FINGERPRINT, Client, names, opened

from flexkv.tiers.disk import OsFiles
from flexkv.tiers.disk.descriptions import FILE
from flexkv.tiers.job import Outcome

KEYS = names(40)
TEXTS = {key: key * 50 for key in KEYS}


class FailingDescriptions(OsFiles):
    """The real files, but reads or writes of descriptions fail.

    Args:
        reads: whether reads fail, else writes.
        passed: calls that succeed before.
    """

    def __init__(self, reads: bool, passed: int = 0) -> None:
        self._reads, self._left = reads, passed
        self._fds: set[int] = set()

    def open(self, folder: int, name: str, flags: int) -> int:
        fd = super().open(folder, name, flags)
        (self._fds.add if name == FILE else self._fds.discard)(fd)
        return fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._fail(fd, reads=True)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._fail(fd, reads=False)
        return super().pwritev(fd, buffers, offset)

    def _fail(self, fd: int, reads: bool) -> None:
        if fd in self._fds and reads == self._reads:
            self._left -= 1
            if self._left < 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))


def fill(root: Path, **options: OsFiles) -> None:
    with opened(root, **options) as client:
        assert client.write(KEYS) == [Outcome.DONE] * len(KEYS)
        client.tier.describe(TEXTS)


def drain(client: Client) -> list[dict[bytes, bytes | None]]:
    """The blocks of each drain that returns some, with their descriptions."""
    drains: list[dict[bytes, bytes | None]] = []
    (drive,) = client.tier.drives
    end = time.monotonic() + DEADLINE
    while drive.index.has_changes:
        assert time.monotonic() < end, "a block is not reported"
        changes = client.tier.drain_changes(2048)
        texts = client.tier.take_descriptions(list(changes))
        assert all(changes.values())
        if changes:
            drains.append({key: texts.get(key) for key in changes})
    assert not client.tier.has_changes
    return drains


def test_a_drain_returns_few_blocks_with_descriptions(tmp_path: Path) -> None:
    fill(tmp_path)
    with opened(tmp_path) as client:
        client.tier.watch()
        drains = drain(client)
    # 16 KiB of texts of 1,600 bytes, or fewer while the table is being read.
    assert max(len(each) for each in drains) == 10
    assert [key for each in drains for key in each] == KEYS, "in the order of their slots"
    assert {key: text for each in drains for key, text in each.items()} == TEXTS


def test_blocks_wait_for_the_part_that_describes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    monkeypatch.setattr("flexkv.tiers.disk.descriptions._READ_BYTES", 3 * 1792)
    with opened(tmp_path) as client:
        client.tier.watch()
        drains = drain(client)
    assert max(map(len, drains)) <= 6, "two parts of three slots each"
    assert {key: text for each in drains for key, text in each.items()} == TEXTS


def test_a_reset_ends_the_reports_of_earlier_blocks(tmp_path: Path) -> None:
    fill(tmp_path)
    with opened(tmp_path) as client:
        client.tier.watch()
        client.tier.clear()
        assert drain(client) == []


@pytest.mark.parametrize("passed", [0, 1, 2])
def test_a_failed_read_of_descriptions_costs_only_descriptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, passed: int
) -> None:
    fill(tmp_path)
    monkeypatch.setattr("flexkv.tiers.disk.descriptions._READ_BYTES", 8 * 1792)
    with opened(tmp_path, files=FailingDescriptions(True, passed)) as client:
        client.tier.watch()
        found = {key: text for each in drain(client) for key, text in each.items()}
        described = max(0, 8 * (passed - 1))  # one read is for the header
        assert found == dict.fromkeys(KEYS) | {key: TEXTS[key] for key in KEYS[:described]}
        assert client.read(KEYS) == [Outcome.DONE] * len(KEYS)
    assert caplog.text.count("cannot be read") == 1


def test_a_failed_write_of_descriptions_costs_only_descriptions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, files=FailingDescriptions(False, passed=5))
    assert caplog.text.count("cannot be written") == 1
    with opened(tmp_path) as client:
        client.tier.watch()
        found = {key: text for each in drain(client) for key, text in each.items()}
        assert list(found) == KEYS
        # One of the five writes is the header.
        assert {key: text for key, text in found.items() if text} == {
            key: TEXTS[key] for key in KEYS[:4]
        }
        assert client.read(KEYS) == [Outcome.DONE] * len(KEYS)


def test_a_lost_file_of_descriptions_costs_only_descriptions(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / FINGERPRINT / FILE).unlink()
    with opened(tmp_path) as client:
        client.tier.watch()
        # Without a wait for a thread.
        assert client.tier.drain_changes(2048) == dict.fromkeys(KEYS, True)
        assert client.tier.take_descriptions(KEYS) == {}
