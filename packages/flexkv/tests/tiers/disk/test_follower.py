# SPDX-License-Identifier: Apache-2.0
"""A follower beside the engine that owns the folder, over real files."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk_blocks import FINGERPRINT, SLOT, buffers, bytes_of, names, opened
from faults.faulty_files import Fault, FaultyFiles

from flexkv.tiers.disk import follower
from flexkv.tiers.disk.cache_directory import MAX_OWNERS, claim
from flexkv.tiers.disk.files import Files
from flexkv.tiers.disk.followed import FollowedFolder
from flexkv.tiers.disk.follower import FollowerTier
from flexkv.tiers.disk.table import record_offset
from flexkv.tiers.job import Outcome, Priority
from packages.flexkv.tests.cli.hung_mount import hung

PATIENCE = 60.0


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "LOOK_SECONDS", 0.0)


@contextmanager
def following(
    *roots: Path, slot_bytes: int = SLOT, files: Files | None = None
) -> Iterator[FollowerTier]:
    paths = [str(root) for root in roots]
    tier = FollowerTier(paths, FINGERPRINT, slot_bytes, stall_seconds=PATIENCE, files=files)
    yield tier
    assert tier.close()


def read(tier: FollowerTier, keys: list[bytes]) -> list[Outcome]:
    """The outcome of each block; the bytes of all that are DONE were right."""
    into = buffers(len(keys))
    ticket = tier.read(keys, into, Priority.LOAD)
    outcomes: dict[int, Outcome] = {}
    end = time.monotonic() + PATIENCE
    while len(outcomes) < len(keys):
        assert time.monotonic() < end, "a block has no result"
        for result in tier.poll():
            assert result.ticket == ticket
            outcomes[result.position] = result.outcome
    for position, key in enumerate(keys):
        if outcomes[position] is Outcome.DONE:
            assert into[position] == bytes_of(key)
    return [outcomes[position] for position in range(len(keys))]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.001)


def folder_of(root: Path) -> Path:
    (path,) = root.iterdir()
    return path


def test_it_reads_what_the_owner_writes_and_while_it_writes(tmp_path: Path) -> None:
    keys = names(40)
    with following(tmp_path) as tier:
        assert tier.contains(keys) == [False] * 40
        with opened(tmp_path) as owner:
            owner.write(keys[:30])
            assert tier.contains(keys) == [True] * 30 + [False] * 10
            assert read(tier, keys) == [Outcome.DONE] * 30 + [Outcome.MISSING] * 10
            owner.write(keys)
            assert tier.contains(keys) == [True] * 40
        assert read(tier, keys) == [Outcome.DONE] * 40  # the owner has ended
        assert tier.figures.blocks == 40


def test_it_looks_again_only_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as owner, following(tmp_path) as tier:
        owner.write(names(1))
        assert tier.contains(names(2)) == [True, False]
        monkeypatch.setattr(follower, "LOOK_SECONDS", PATIENCE)
        assert tier.contains(names(2)) == [True, False]
        owner.write(names(2))
        assert tier.contains(names(2)) == [True, False]


def test_a_block_that_was_replaced_is_missing(tmp_path: Path) -> None:
    with opened(tmp_path, slots=8) as owner, following(tmp_path) as tier:
        owner.write(names(8))
        assert tier.contains(names(8)) == [True] * 8
        owner.write(names(8, first=8))
        assert read(tier, names(8)) == [Outcome.MISSING] * 8
        assert tier.contains(names(16)) == [False] * 8 + [True] * 8


def test_a_block_that_moves_is_found_where_it_is(tmp_path: Path) -> None:
    keys = names(8)
    with opened(tmp_path, slots=8) as owner, following(tmp_path) as tier:
        owner.write(keys)
        assert tier.contains(keys) == [True] * 8
        owner.write(names(4, first=8))
        owner.write(keys)
        owner.settle()
        found = tier.contains([*keys, b"look"])[:8]
        wanted = [key for key, there in zip(keys, found, strict=True) if there]
        assert read(tier, wanted) == [Outcome.DONE] * len(wanted)
        assert found == owner.tier.contains(keys)


@pytest.mark.parametrize("damage", ["data", "record"])
def test_a_damaged_block_is_missing_and_the_owner_keeps_it_to_find_out(
    tmp_path: Path, damage: str
) -> None:
    keys = names(4)
    with opened(tmp_path) as owner, following(tmp_path) as tier:
        owner.write(keys)
        slot = owner.slots_of(keys)[keys[1]]
        name, place = (
            ("slab-00000", slot * SLOT) if damage == "data" else ("table", record_offset(slot))
        )
        path = folder_of(tmp_path) / name
        before = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(place + 5)
            file.write(bytes([before[place + 5] ^ 1]))
        assert tier.contains([*keys, b"look"])[:4] == [True, damage == "data", True, True]
        outcomes = read(tier, keys)
        assert outcomes == [Outcome.DONE, Outcome.MISSING, Outcome.DONE, Outcome.DONE]
        assert tier.contains(keys)[1] is False
        assert owner.tier.contains(keys) == [True] * 4


def test_what_the_owner_has_cleared_is_missing(tmp_path: Path) -> None:
    keys = names(4)
    with opened(tmp_path) as owner, following(tmp_path) as tier:
        owner.write(keys)
        assert tier.contains(keys) == [True] * 4
        tier.clear()
        owner.tier.clear()
        owner.settle()
        assert read(tier, keys) == [Outcome.MISSING] * 4
        assert tier.contains(keys) == [False] * 4


def test_a_table_that_is_marked_as_worthless_is_not_followed(tmp_path: Path) -> None:
    with opened(tmp_path) as owner, following(tmp_path) as tier:
        owner.write(names(2))
        (folder_of(tmp_path) / "reset").touch()
        assert tier.contains(names(2)) == [False, False]


def test_a_table_that_is_replaced_is_followed(tmp_path: Path) -> None:
    """An owner removes the table if others could write to it, and keeps the folder."""
    with following(tmp_path) as tier:
        with opened(tmp_path) as owner:
            owner.write(names(2))
            assert tier.contains(names(3)) == [True, True, False]
        (folder_of(tmp_path) / "table").unlink()
        with opened(tmp_path) as owner:
            owner.write(names(1, first=2))
            assert tier.contains(names(3)) == [False, False, True]
            assert read(tier, names(3)[2:]) == [Outcome.DONE]


def test_blocks_behind_the_end_of_a_table_are_not_found(tmp_path: Path) -> None:
    keys = names(2000)
    with following(tmp_path) as tier:
        with opened(tmp_path, slots=2000) as owner:
            owner.write(keys)
            assert tier.contains(keys) == [True] * 2000
        with opened(tmp_path, slots=500) as owner:
            found = tier.contains([*keys, b"look"])[:2000]
            assert found == owner.tier.contains(keys)
            assert sum(found) == 500


def test_all_folders_of_a_kind_are_read(tmp_path: Path) -> None:
    with (
        opened(tmp_path, owners=MAX_OWNERS) as one,
        opened(tmp_path, owners=MAX_OWNERS) as two,
        following(tmp_path) as tier,
    ):
        one.write(names(2))
        two.write(names(2, first=2))
        assert read(tier, names(4)) == [Outcome.MISSING] * 4
        assert tier.contains(names(4)) == [True] * 4
        assert read(tier, names(4)) == [Outcome.DONE] * 4


def test_a_later_folder_is_read_when_the_first_was_removed(tmp_path: Path) -> None:
    first = claim(str(tmp_path), FINGERPRINT, 1)
    with opened(tmp_path, owners=MAX_OWNERS) as owner, following(tmp_path) as tier:
        first.release()
        shutil.rmtree(first.path)
        owner.write(names(2))
        assert tier.contains(names(2)) == [True, True]


def test_a_folder_that_is_made_anew_is_followed(tmp_path: Path) -> None:
    with following(tmp_path) as tier:
        with opened(tmp_path) as owner:
            owner.write(names(2))
            assert tier.contains(names(2)) == [True, True]
        shutil.rmtree(folder_of(tmp_path))
        assert tier.contains(names(3)) == [False] * 3
        with opened(tmp_path) as owner:
            owner.write(names(1, first=2))
            until(lambda: tier.contains(names(3)) == [False, False, True])


def test_room_of_a_folder_that_is_removed_is_free_at_once(tmp_path: Path) -> None:
    """Also while the follower is idle, and does not look."""
    keys = names(3)
    with following(tmp_path) as tier:
        with opened(tmp_path) as owner:
            owner.write(keys)
            assert tier.contains(keys) == [True] * 3
            assert read(tier, keys) == [Outcome.DONE] * 3
        shutil.rmtree(folder_of(tmp_path))
        open_files = [
            os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
        ]
        assert not [name for name in open_files if f"{tmp_path}/" in name and "slab" in name]


def test_blocks_of_another_size_are_not_found(tmp_path: Path) -> None:
    with opened(tmp_path) as owner, following(tmp_path, slot_bytes=2 * SLOT) as tier:
        owner.write(names(2))
        assert tier.contains(names(2)) == [False] * 2


def test_it_writes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as owner, following(tmp_path) as tier:
        tier.write(names(2), buffers(2))
        assert [result.outcome for result in tier.poll()] == [Outcome.DROPPED] * 2
        assert owner.tier.contains(names(2)) == [False] * 2


def test_what_cannot_be_read_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / FINGERPRINT).symlink_to(tmp_path / "elsewhere")
    with following(tmp_path) as tier:
        for _ in range(3):
            assert tier.contains(names(1)) == [False]
    assert caplog.text.count("cannot read") == 1


def test_the_error_of_the_system_reaches_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, files = names(3), FaultyFiles(1, 0.0, Fault.EIO)
    with opened(tmp_path) as owner, following(tmp_path, files=files) as tier:
        owner.write(keys)
        assert tier.contains(keys) == [True] * 3
        files.rate = 1.0
        assert read(tier, keys) == [Outcome.FAILED] * 3
    assert caplog.text.count("failed: Input/output error (EIO);") == 1


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path):
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        path = folder_of(tmp_path)
        if path.stat().st_uid == 0:
            os.chown(path, 54321, -1)
        with pytest.raises(PermissionError, match="another user"):
            FollowedFolder(str(path), SLOT, follower.OsFiles())


def test_a_folder_that_hangs_holds_up_one_lookup_for_the_time_of_a_read(tmp_path: Path) -> None:
    """Other callers, such as a reset, wait for the lookup."""
    bad, good = tmp_path / "bad", tmp_path / "good"
    bad.mkdir()
    keys = names(4)
    tier = FollowerTier([str(good), str(bad)], FINGERPRINT, SLOT, stall_seconds=0.2)
    with opened(good) as owner:
        owner.write(keys[:2])
        with hung(bad):
            until(lambda: tier.contains(keys) == [True, True, False, False])
            owner.write(keys)
            assert tier.contains(keys) == [True, True, False, False], "the look has not ended"
        until(lambda: tier.contains(keys) == [True] * 4)
        assert tier.close()
