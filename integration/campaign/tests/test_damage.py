# SPDX-License-Identifier: Apache-2.0
"""Damage hits the files that a process holds open, whatever they are called by now."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from integration.campaign import damage
from integration.campaign.damage import OpenFiles
from integration.campaign.faults import IN_FILES, Kind

SLOT, SLOTS = 8192, 64
SLAB, TABLE = bytes(SLOT * SLOTS), bytes(4096 + 64 * SLOTS)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A cache directory whose files this process has open."""
    folder = tmp_path / "disk" / "fingerprint"
    folder.mkdir(parents=True)
    fds = []
    for name, content in (("slab-00000", b"\1" * len(SLAB)), ("table", b"\1" * len(TABLE))):
        (folder / name).write_bytes(content)
        fds.append(os.open(folder / name, os.O_RDWR))
    yield tmp_path / "disk"
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("kind", sorted(damage.AT_ONCE))
def test_each_kind_changes_its_file_and_no_other(root: Path, kind: Kind, removed: bool) -> None:
    files = OpenFiles(root, [os.getpid()], SLOT)
    (slab,), (table,) = files.slabs, files.tables
    if removed:
        shutil.rmtree(root)
    files = OpenFiles(root, [os.getpid()], SLOT)
    before = slab.read_bytes(), table.read_bytes()
    files.damage(kind, random.Random(1))
    after = slab.read_bytes(), table.read_bytes()
    of_slab = kind in (Kind.SLOTS_FLIPPED, Kind.SLOTS_ZEROED, Kind.SLAB_TRUNCATED)
    assert (before[0] != after[0]) is of_slab
    assert (before[1] != after[1]) is not of_slab
    assert after[1][:4096] == before[1][:4096], "the header stays"
    assert (len(after[0]) < len(before[0])) is (kind is Kind.SLAB_TRUNCATED)


def test_a_directory_that_is_gone_comes_back(root: Path) -> None:
    content = sorted(root.rglob("*"))
    with damage.gone(root):
        assert not root.exists()
    assert sorted(root.rglob("*")) == content


def test_a_directory_comes_back_although_a_cache_makes_it_anew(root: Path) -> None:
    content, ended = sorted(root.rglob("*")), threading.Event()

    def make() -> None:
        while not ended.is_set():
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                root.mkdir()
                (root / "anew").touch()

    with ThreadPoolExecutor() as threads:
        for _ in range(20):
            ended.clear()
            with damage.gone(root):
                making = threads.submit(make)
                while not (root / "anew").exists():
                    pass
            ended.set()
            making.result()
            (root / "anew").unlink(missing_ok=True)
            assert sorted(root.rglob("*")) == content
    assert sorted(root.parent.iterdir()) == [root]


def test_a_locked_directory_is_as_before_in_the_end(root: Path) -> None:
    paths = [root, *sorted(root.rglob("*"))]
    modes = [path.stat().st_mode for path in paths]
    with damage.locked(root):
        assert root.stat().st_mode & 0o777 == 0
    assert [path.stat().st_mode for path in paths] == modes


def test_a_directory_is_locked_while_files_in_it_are_replaced(root: Path) -> None:
    ledger, ended = root / "fingerprint" / "counters.json", threading.Event()

    def replace() -> None:
        while not ended.is_set():
            with contextlib.suppress(PermissionError):
                draft = ledger.with_suffix(".new")
                draft.touch()
                draft.rename(ledger)

    with ThreadPoolExecutor() as threads:
        replacing = threads.submit(replace)
        try:
            for _ in range(300):
                with damage.locked(root):
                    pass
        finally:
            ended.set()
        replacing.result()


def test_every_kind_of_damage_has_its_place() -> None:
    assert {Kind.DIRECTORY_GONE, Kind.DIRECTORY_LOCKED} == IN_FILES - damage.AT_ONCE
