# SPDX-License-Identifier: Apache-2.0
"""Directories that go away, or that the process may not use any more."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disk_blocks import FINGERPRINT, SLOT, Client, names, opened
from faults.faulty_files import HangingFiles

from flexkv.tiers.circuit import CircuitState
from flexkv.tiers.disk import upkeep
from flexkv.tiers.disk.folder import claim
from flexkv.tiers.job import Outcome, Priority
from flexkv.types.errors import DiskError
from packages.conftest import PATIENCE_SECONDS
from packages.patience import wait_until

SLOTS = 40
KEYS = names(SLOTS)
DONE = Outcome.DONE
NOBODY = 65534


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are looked at more often than in use."""
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.02)


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


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("..", "it was removed or replaced"),
        (".", "it was removed or replaced"),
        ("lock", "its file lock was removed"),
        ("table", "its file table was removed"),
        ("slab-00000", "its file slab-00000 was removed"),
    ],
)
def test_what_is_removed_while_in_use_is_noticed_and_made_again(
    tmp_path: Path,
    faults: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
    name: str,
    why: str,
) -> None:
    root = tmp_path / "cache"
    path = root / FINGERPRINT
    with opened(root, slots=SLOTS) as client:
        client.write(KEYS)
        client.settle()
        client.tier.watch()
        client.tier.drain_changes(SLOTS)
        if name.startswith("."):
            (path / name).resolve().rename(tmp_path / "gone")  # else it is noticed half removed
            shutil.rmtree(tmp_path / "gone", ignore_errors=True)
        else:
            (path / name).unlink()
        await_lost(client)
        assert f"{path} is not used any more, and its blocks are lost: {why}; " in caplog.text
        figures = client.tier.figures
        connecting = {CircuitState.CONNECTING: 1}
        assert (figures.reads, figures.writes) == (connecting, connecting)
        assert client.found(KEYS) == []
        assert client.tier.drives[0].room == 0
        client.tier.remove(KEYS[:5])
        await_open(client)
        assert client.tier.drain_changes(SLOTS) == dict.fromkeys(KEYS, False)
        assert client.tier.figures.reads == {CircuitState.CLOSED: 1}
        assert client.write(KEYS[5:]) == [DONE] * (SLOTS - 5)
        assert client.read(KEYS[5:]) == [DONE] * (SLOTS - 5)
        # A save of counters may have met a folder that was removed.
        assert [each.levelname for each in caplog.records][-2:] == ["ERROR", "WARNING"]
    with opened(root, slots=SLOTS) as client:
        assert client.read(KEYS) == [Outcome.MISSING] * 5 + [DONE] * (SLOTS - 5)
    faults(1)


def test_files_that_are_cut_or_replaced_or_of_another_user_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / FINGERPRINT

    def cut(name: str) -> Callable[[], None]:
        return lambda: os.truncate(path / name, 4096)

    def replace() -> None:
        shutil.copy(path / "table", path / "other")
        os.replace(path / "other", path / "table")

    harms = [cut("slab-00000"), cut("table"), replace]
    if os.geteuid() == 0:
        harms.append(lambda: os.chown(path, NOBODY, NOBODY))
    with opened(tmp_path, slots=SLOTS) as client:
        for harm in harms:
            assert client.write(KEYS) == [DONE] * SLOTS
            harm()
            await_lost(client)
            if path.stat().st_uid == NOBODY:
                os.chown(path, 0, 0)
            await_open(client)
            assert client.found(KEYS) == []
            assert client.read(KEYS) == [Outcome.MISSING] * SLOTS


def test_a_read_under_way_ends_before_the_files_are_opened_again(tmp_path: Path) -> None:
    files = HangingFiles()
    with opened(tmp_path, slots=SLOTS, files=files) as client, files:
        client.write(KEYS)
        files.hang(tmp_path)
        ticket = client.tier.read(KEYS[:1], client.buffers[:1], Priority.LOAD)
        assert files.hanging.wait(PATIENCE_SECONDS)
        (tmp_path / FINGERPRINT / "slab-00000").unlink()
        await_lost(client)
        client.pump()
        assert client.tier.drives[0].is_lost
        files.release()
        assert client.check(KEYS[:1], client.wait(ticket, 1)) == [DONE]
        await_open(client)
        assert client.write(KEYS) == [DONE] * SLOTS


def test_a_folder_that_another_process_took_meanwhile_is_left_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / FINGERPRINT
    with opened(tmp_path, slots=SLOTS) as client:
        client.write(KEYS)
        (path / "lock").unlink()
        other = claim(str(tmp_path), FINGERPRINT, 1)
        await_lost(client)
        until(client, lambda: "cannot be opened again" in caplog.text)
        assert client.found(KEYS) == []
        other.release()
        await_open(client)
        assert client.write(KEYS) == [DONE] * SLOTS


def test_a_reset_of_lost_files_holds_for_those_that_follow(tmp_path: Path) -> None:
    with opened(tmp_path, slots=SLOTS) as client:
        client.write(KEYS)
        (tmp_path / FINGERPRINT / "slab-00000").unlink()
        await_lost(client)
        client.tier.clear()
        client.salt = b"new weights"
        await_open(client)
        assert client.write(KEYS) == [DONE] * SLOTS
        assert client.read(KEYS) == [DONE] * SLOTS
    with opened(tmp_path, slots=SLOTS) as client:
        assert client.found(KEYS) == []


@pytest.mark.parametrize("harm", ["removed", "cut"])
def test_a_start_does_not_count_slots_that_no_file_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    with opened(tmp_path, slots=SLOTS) as client:
        client.write(KEYS)
        slots = client.slots_of(KEYS)
    slab = tmp_path / FINGERPRINT / "slab-00000"
    kept = [] if harm == "removed" else [key for key in KEYS if slots[key] < 10]
    if harm == "removed":
        slab.unlink()
    else:
        os.truncate(slab, 10 * SLOT + 4096)
    for _ in range(2):
        with opened(tmp_path, slots=SLOTS) as client:
            assert client.found(KEYS) == kept
            assert client.read(kept) == [DONE] * len(kept)
    assert caplog.text.count("were removed or cut") == 1
    assert f"the {SLOTS - len(kept)} blocks that they had are lost" in caplog.text


def until(client: Client, condition: Callable[[], object]) -> None:
    wait_until(condition, client.pump)


def await_lost(client: Client) -> None:
    """Wait for the upkeep alone, as in an engine at rest."""
    wait_until(lambda: client.tier.drives[0].is_lost)


def await_open(client: Client) -> None:
    until(client, lambda: not client.tier.drives[0].is_lost)
    client.settle()


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
