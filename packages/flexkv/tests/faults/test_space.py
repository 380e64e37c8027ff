# SPDX-License-Identifier: Apache-2.0
"""Disks that are full, and limits on the size of files."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from disk_blocks import FINGERPRINT, SLOT, names, opened, unopened

from flexkv.tiers.job import Outcome
from flexkv.types.errors import DiskError

DISK_BYTES = 8 << 20
FITS = DISK_BYTES // SLOT // 4
KEYS = names(FITS)
DONE = Outcome.DONE


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 8 MiB."""
    root = tmp_path / "disk"
    root.mkdir()
    if request.param == "tmpfs":
        commands = [["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(root)]]
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        commands = [
            ["mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", str(image)],
            ["mount", "-o", "loop", str(image), str(root)],
        ]
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no file system of its own for the test: {error}")
    yield root
    subprocess.run(["umount", str(root)], check=True, capture_output=True)


def fill_up(path: Path) -> None:
    """Leave no room."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    with suppress(OSError):
        for size in (1 << 16, 1 << 12, 1):
            with suppress(OSError):
                while os.write(fd, bytes(size)):
                    pass
    os.close(fd)


def test_a_disk_without_room_is_refused_and_nothing_is_left_on_it(
    disk: Path, faults: Callable[[int], None]
) -> None:
    for slots in (4 * FITS, 5 * FITS, 40 * FITS):
        with (
            pytest.raises(DiskError, match=r"GiB left.*; allowed: .*fits"),
            opened(disk, slots=slots),
        ):
            pass
        assert not (disk / FINGERPRINT / "slab-00000").exists()
        faults(1)
    with opened(disk, slots=FITS) as client:
        assert client.write(KEYS) == [DONE] * FITS
        assert client.read(KEYS) == [DONE] * FITS


def test_a_directory_without_room_is_used_once_there_is_room(disk: Path) -> None:
    fill_up(disk / "ballast")
    with unopened(disk, slots=FITS, why=r"GiB left.*; allowed: .*fits|No space") as client:
        assert client.write(KEYS[:2]) == [Outcome.DROPPED] * 2
        (disk / "ballast").unlink()
        client.adopt()
        assert client.write(KEYS) == [DONE] * FITS
        assert client.read(KEYS) == [DONE] * FITS


def test_a_store_that_cannot_grow_keeps_what_it_has(
    disk: Path, faults: Callable[[int], None]
) -> None:
    with opened(disk, slots=FITS) as client:
        client.write(KEYS)
    for slots in (5 * FITS, 40 * FITS):
        with pytest.raises(DiskError, match=r"GiB left"), opened(disk, slots=slots):
            pass
        faults(1)
    with opened(disk, slots=FITS) as client:
        assert client.read(KEYS) == [DONE] * FITS


def test_a_disk_that_fills_up_takes_nothing_from_an_open_store(
    disk: Path, faults: Callable[[int], None]
) -> None:
    """All bytes are the store's from the start; only the counters need more."""
    with opened(disk, slots=FITS) as client:
        client.write(KEYS[:10])
        fill_up(disk / "ballast")
        assert client.write(KEYS) == [DONE] * FITS
        assert client.write(names(FITS, first=1000)) == [DONE] * FITS
        found = client.found(names(2000))
        assert client.read(found) == [DONE] * FITS
    with opened(disk, slots=FITS) as client:
        assert client.read(found) == [DONE] * FITS
    faults(1)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_limit_on_the_size_of_files_is_named_at_start(
    tmp_path: Path, faults: Callable[[int], None]
) -> None:
    for size in (0, 100, 5000, 10 * SLOT):
        with (
            file_size_limit(size),
            pytest.raises(DiskError, match=r"File too large.*; allowed: "),
            opened(tmp_path, slots=FITS),
        ):
            pass
        faults(1)
    with opened(tmp_path, slots=FITS) as client:
        assert client.write(KEYS) == [DONE] * FITS


def test_writes_beyond_a_limit_fail_and_the_others_are_right(
    tmp_path: Path, faults: Callable[[int], None]
) -> None:
    with opened(tmp_path, slots=FITS) as client:
        with file_size_limit(FITS // 2 * SLOT + SLOT // 2):
            outcomes = client.write(KEYS)
            client.settle()
        assert Outcome.FAILED in outcomes
        written = [key for key, o in zip(KEYS, outcomes, strict=True) if o is DONE]
        assert client.found(KEYS) == written
        assert client.read(written) == [DONE] * len(written)
        faults(outcomes.count(Outcome.FAILED))
    with opened(tmp_path, slots=FITS) as client:
        assert client.read(client.found(KEYS)) == [DONE] * len(written)
