# SPDX-License-Identifier: Apache-2.0
"""Directories that go away, or that the process may not use any more."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disk_blocks import FINGERPRINT, names, opened

from flexkv.tiers.disk import upkeep
from flexkv.tiers.job import Outcome
from flexkv.types.errors import DiskError

SLOTS = 40
KEYS = names(SLOTS)
DONE = Outcome.DONE
NOBODY = 65534


@pytest.fixture
def user(tmp_path: Path) -> Iterator[Path]:
    """A directory of a user whom permissions bind; this process is that user meanwhile."""
    if os.geteuid() != 0:
        yield tmp_path
        return
    root = Path(tempfile.mkdtemp())
    os.chown(root, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield root
    finally:
        os.seteuid(0)
        shutil.rmtree(root)


@pytest.mark.parametrize("below", ["", FINGERPRINT])
def test_a_directory_removed_while_in_use_is_used_to_the_end(
    tmp_path: Path, faults: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    monkeypatch.setattr(upkeep, "SAVE_SECONDS", 0.0)
    root = tmp_path / "cache"
    with opened(root, slots=SLOTS) as client:
        client.write(KEYS)
        client.settle()
        while (root / below).exists():  # counters may come as it is emptied
            shutil.rmtree(root / below, ignore_errors=True)
        assert client.read(KEYS) == [DONE] * SLOTS
        client.settle()  # slots whose records are written again are in use
        assert client.write(names(20, first=100)) == [DONE] * 20
        client.delete(KEYS[:5])
        client.tier.clear()
        client.settle()
        assert client.write(KEYS) == [DONE] * SLOTS
        assert client.read(KEYS) == [DONE] * SLOTS
    with opened(root, slots=SLOTS) as client:
        assert client.found(KEYS) == []
        assert client.write(KEYS) == [DONE] * SLOTS
    faults(1)


@pytest.mark.parametrize("name", ["slab-00000", "table", "lock", "counters.json"])
def test_a_file_removed_while_in_use_is_used_to_the_end(
    tmp_path: Path, faults: Callable[[int], None], name: str
) -> None:
    with opened(tmp_path, slots=SLOTS) as client:
        client.write(KEYS)
    with opened(tmp_path, slots=SLOTS) as client:
        (tmp_path / FINGERPRINT / name).unlink()
        assert client.read(KEYS) == [DONE] * SLOTS
        client.settle()  # slots whose records are written again are in use
        assert client.write(names(20, first=100)) == [DONE] * 20
    with opened(tmp_path, slots=SLOTS) as client:
        outcomes = client.read([*KEYS, *names(20, first=100)])
        assert outcomes.count(DONE) == (SLOTS if name in {"lock", "counters.json"} else 0)
    faults(1)


@pytest.mark.parametrize("name", [".", "slab-00000", "table", "lock", "counters.json"])
def test_permissions_lost_while_in_use_change_nothing_until_the_next_start(
    user: Path, faults: Callable[[int], None], name: str
) -> None:
    with opened(user, slots=SLOTS) as client:
        client.write(KEYS)
    path = user / FINGERPRINT / name
    mode = path.stat().st_mode & 0o777
    with opened(user, slots=SLOTS) as client:
        path.chmod(0)
        assert client.read(KEYS) == [DONE] * SLOTS
        client.settle()  # slots whose records are written again are in use
        assert client.write(names(20, first=100)) == [DONE] * 20
        found = client.found(names(120))
    if name != "counters.json":
        with (
            pytest.raises(DiskError, match=r"Permission denied.*; allowed: "),
            opened(user, slots=SLOTS),
        ):
            pass
        path.chmod(mode)
        faults(1)
    with opened(user, slots=SLOTS) as client:
        assert client.found(names(120)) == found
        assert client.read(found) == [DONE] * SLOTS
    faults(1)


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o400, 0o500])
def test_a_directory_that_may_not_be_used_is_refused_and_not_held(
    user: Path, faults: Callable[[int], None], mode: int
) -> None:
    root = user / "cache"
    with opened(root, slots=SLOTS) as client:
        client.write(KEYS)
    (root / FINGERPRINT / "table").chmod(mode & 0o400)
    root.chmod(mode)
    with (
        pytest.raises(DiskError, match=r"Permission denied.*; allowed: "),
        opened(root, slots=SLOTS),
    ):
        pass
    root.chmod(0o700)
    (root / FINGERPRINT / "table").chmod(0o600)
    with opened(root, slots=SLOTS) as client:
        assert client.read(KEYS) == [DONE] * SLOTS
    faults(1)
