# SPDX-License-Identifier: Apache-2.0
"""Calls that fail, do half of what they should, or lie about what they did."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_blocks import Client, names, opened, unopened
from faults.faulty_files import Fault, FaultyFiles

from flexkv.tiers.circuit import FAILURES
from flexkv.tiers.disk import OsFiles
from flexkv.tiers.job import Outcome

SLOTS = 48
KEYS = names(100)
DONE = Outcome.DONE
RATE = 0.15  # no pause: that needs 16 failures in a row


def history(client: Client, chance: random.Random) -> Counter[Outcome]:
    """One random step; what was read is compared."""
    written = chance.sample(KEYS, 20)
    client.write(written)
    if chance.random() < 0.3:
        client.delete(chance.sample(KEYS, 3))
    # In the order in which they were written, or in none.
    return Counter(client.read(chance.choice([written, chance.sample(KEYS, 20)])))


@pytest.mark.parametrize("kind", Fault)
def test_no_fault_of_a_call_yields_a_wrong_byte(
    tmp_path: Path, faults: Callable[[int], None], kind: Fault
) -> None:
    chance = random.Random(kind.name)
    outcomes: Counter[Outcome] = Counter()
    files = FaultyFiles(1, 0.0, kind)
    while files.counts.total() < 60 or files.in_runs < 30:
        with opened(tmp_path, slots=SLOTS, files=files) as client:
            files.rate = RATE
            for _ in range(5):
                outcomes += history(client, chance)
            files.rate = 0.0
        with opened(tmp_path, slots=SLOTS) as client:
            outcomes += Counter(client.read(KEYS))
    assert outcomes[DONE] > 100
    faults(files.counts.total())


@pytest.mark.parametrize("count", [1, 4], ids=["single blocks", "runs"])
@pytest.mark.parametrize("writes", [False, True], ids=["reads", "writes"])
def test_the_error_of_the_system_reaches_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, writes: bool, count: int
) -> None:
    files = FaultyFiles(1, 0.0, Fault.EIO)
    with opened(tmp_path, slots=128, files=files) as client:
        if not writes:
            client.write(KEYS[: FAILURES * count])
        files.rate = 1.0
        for start in range(0, FAILURES * count, count):
            (client.write if writes else client.read)(KEYS[start : start + count])
        files.rate = 0.0
    what = "writes to" if writes else "reads from"
    first, opens = [each.getMessage() for each in caplog.records if what in each.getMessage()]
    assert f"{what} {tmp_path}" in first
    assert " failed: Input/output error (EIO);" in first
    assert f"{FAILURES} consecutive {what} " in opens
    assert "the last: Input/output error (EIO);" in opens


def test_all_faults_together_yield_no_wrong_byte(
    tmp_path: Path, faults: Callable[[int], None]
) -> None:
    chance = random.Random(0)
    files = FaultyFiles(2, RATE)
    roots = tmp_path / "a", tmp_path / "b"
    done = late = 0
    while files.counts.total() < 300 or (not late and files.counts.total() < 10_000):
        with opened(*roots, slots=SLOTS, files=files) as client:
            late += len(client.tier.connecting)
            for _ in range(5):
                done += history(client, chance)[DONE]
    with opened(*roots, slots=SLOTS) as client:
        client.read(KEYS)
        client.settle()
        client.write(KEYS[:40])
        assert set(client.read(KEYS[:40])) == {DONE}
    assert done > 100
    assert late > 0
    faults(files.counts.total())


class BrokenFiles(OsFiles):
    """Files of which one operation fails when the store is opened or closed."""

    def __init__(self, operation: str, code: int) -> None:
        self.operation = operation
        self.code = code

    def _check(self, operation: str) -> None:
        if operation == self.operation:
            raise OSError(self.code, os.strerror(self.code))

    def open(self, folder: int, name: str, flags: int) -> int:
        self._check("open")
        return super().open(folder, name, flags)

    def allocate(self, fd: int, length: int) -> None:
        self._check("allocate")
        super().allocate(fd, length)

    def truncate(self, fd: int, length: int) -> None:
        self._check("truncate")
        super().truncate(fd, length)

    def close(self, fd: int) -> None:
        super().close(fd)
        self._check("close")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EMFILE])
@pytest.mark.parametrize(
    ("operation", "slots"), [("open", SLOTS), ("allocate", 2 * SLOTS), ("truncate", SLOTS // 2)]
)
def test_a_store_that_cannot_be_opened_says_so_once_and_is_left_as_it_was(
    tmp_path: Path, faults: Callable[[int], None], operation: str, slots: int, code: int
) -> None:
    with opened(tmp_path, slots=SLOTS) as client:
        client.write(KEYS[:SLOTS])
    broken = BrokenFiles(operation, code)
    with unopened(
        tmp_path, slots=slots, files=broken, why=rf"{os.strerror(code)}; allowed: "
    ) as client:
        assert client.tier.drives == []
    with opened(tmp_path, slots=SLOTS) as client:
        assert client.read(KEYS[:SLOTS]) == [DONE] * SLOTS
    faults(1)


def test_a_file_that_fails_as_it_is_closed_changes_nothing(
    tmp_path: Path, faults: Callable[[int], None]
) -> None:
    with opened(tmp_path, slots=SLOTS, files=BrokenFiles("close", errno.EIO)) as client:
        client.write(KEYS[:SLOTS])
    with opened(tmp_path, slots=SLOTS) as client:
        assert client.read(KEYS[:SLOTS]) == [DONE] * SLOTS
    faults(2)
