# SPDX-License-Identifier: Apache-2.0
"""A start with cache directories that really hang, come late or fail; and their use afterwards."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from disk_blocks import FINGERPRINT, SLOT, Client, capacity_of, names, opened, unopened
from hung_calls import wait_for_all_but_one
from policy_checks import CheckedPolicy, UseOrderPolicy

from flexkv import KVLayout, TensorView, open_cache
from flexkv.tiers import disk
from flexkv.tiers.circuit import CircuitState
from flexkv.tiers.disk import OsFiles, open_disk_tier, opening, table, table_reader, tier
from flexkv.tiers.disk.folder import Folder, claim
from flexkv.tiers.disk.opening import check_apart, places_of
from flexkv.tiers.job import Outcome
from flexkv.types.deadline import HANGS
from flexkv.types.errors import DiskError
from packages.conftest import PATIENCE_SECONDS, StillClock
from packages.flexkv.tests.cli.hung_mount import hung
from packages.inside_tiers import await_opening
from packages.patience import wait_until

DONE, DROPPED = Outcome.DONE, Outcome.DROPPED
SLOTS = 8
KEYS = names(SLOTS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that hangs until the test ends."""
    monkeypatch.setattr(disk, "OPEN_SECONDS", 0.2)
    wait_for_all_but_one(monkeypatch, alone=False)
    folder = tmp_path / "hung"
    folder.mkdir()
    with hung(folder):
        yield folder


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]


class States:
    """Keeps what a directory reports to other processes; None before and afterwards."""

    def __init__(self) -> None:
        self.shown: Mapping[str, str] | None = None

    def begin(self, read: Callable[[], Mapping[str, str]]) -> None:
        self.shown = read()

    def close(self) -> None:
        self.shown = None


def test_a_hung_mount_is_used_once_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk, "OPEN_SECONDS", 0.2)
    bad, good = tmp_path / "bad", tmp_path / "good"
    bad.mkdir()
    states = {str(root): States() for root in (bad, good)}
    with contextlib.ExitStack() as hang:
        hang.enter_context(hung(bad))
        with opened(bad, good, slots=SLOTS, states=states.__getitem__) as client:
            client.adopt(but=1)
            assert client.write(KEYS) == [DONE] * SLOTS
            (drive,) = client.tier.drives
            assert drive.path == str(good / FINGERPRINT)
            assert drive.index.num_slots == SLOTS  # not the part of the other, too
            figures = client.tier.figures
            assert (
                figures.reads
                == figures.writes
                == {
                    CircuitState.CONNECTING: 1,
                    CircuitState.CLOSED: 1,
                }
            )
            assert states[str(bad)].shown == {"reads": "connecting", "writes": "connecting"}
            assert states[str(good)].shown is None
            error = errors(caplog)[0]
            assert f"{bad} from ssd_cache_dir has not answered for " in error
            hang.close()
            client.adopt()
            assert states[str(bad)].shown is None
            assert [each.path for each in client.tier.drives][1:] == [str(bad / FINGERPRINT)]
            assert client.tier.figures.reads == {CircuitState.CLOSED: 2}
            assert client.tier.figures.slots == 2 * SLOTS
            more = names(SLOTS, first=SLOTS)
            assert client.write(more) == [DONE] * SLOTS
            found = client.found(KEYS + more)
            assert set(more) <= set(found)
            assert client.read(found) == [DONE] * len(found)


class SteppedReads(OsFiles):
    """The real files; each read of a table's records waits for a step."""

    def __init__(self) -> None:
        self._waiting = threading.Semaphore(0)
        self._steps = threading.Semaphore(0)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset >= table.HEADER_BYTES and os.readlink(f"/proc/self/fd/{fd}").endswith("/table"):
            self._waiting.release()
            assert self._steps.acquire(timeout=PATIENCE_SECONDS)
        return super().preadv(fd, buffers, offset)

    def step(self) -> None:
        """Let a read go on, and wait until the next one begins."""
        self.step_to_end(1)
        self.await_read()

    def await_read(self) -> None:
        assert self._waiting.acquire(timeout=PATIENCE_SECONDS)

    def step_to_end(self, reads: int) -> None:
        self._steps.release(reads)


@pytest.fixture
def large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Client, SteppedReads, StillClock]]:
    """A client that starts while its directory is read: two slots are, and the next two come with
    the next step. Its clock says what hangs."""
    with opened(tmp_path, slots=SLOTS) as client:
        client.adopt()
        client.write(KEYS)
    files, clock = SteppedReads(), StillClock()
    monkeypatch.setattr(table_reader, "_PART_BYTES", 2 * table.RECORD_BYTES)
    monkeypatch.setattr(table_reader, "_PART_RECORDS", 2)
    monkeypatch.setattr(opening, "time", clock)

    def await_two(*_: object) -> None:
        files.await_read()
        files.step()

    monkeypatch.setattr(opening.Opening, "await_try", await_two)
    with opened(tmp_path, slots=SLOTS, files=files) as client:
        try:
            yield client, files, clock
        finally:
            files.step_to_end(SLOTS)


def test_a_large_directory_is_not_called_hung_while_it_is_read(
    large: tuple[Client, SteppedReads, StillClock], caplog: pytest.LogCaptureFixture
) -> None:
    client, files, clock = large
    caplog.set_level(logging.INFO)
    (warning,) = caplog.get_records("setup")
    assert "(2 of 8 slots are read); FlexKV starts without it" in warning.getMessage()
    for _ in range(2):
        clock.skip(opening.HANG_SECONDS - 1)
        client.pump()
        files.step()
    clock.skip(opening.HANG_SECONDS - 1)
    client.pump()
    files.step_to_end(1)
    client.adopt()
    assert client.read(KEYS) == [DONE] * SLOTS
    assert errors(caplog) == []
    said = [each.getMessage() for each in caplog.records if " slots are read" in each.message]
    assert [each.partition(": ")[2] for each in said] == [
        f"{read} of 8 slots are read" for read in (4, 6, 8)
    ]


def test_a_directory_that_hangs_while_it_is_read_is_said_once_each_time(
    large: tuple[Client, SteppedReads, StillClock], caplog: pytest.LogCaptureFixture
) -> None:
    client, files, clock = large
    for hangs in (1, 2):
        clock.skip(opening.HANG_SECONDS)
        client.pump()
        client.pump()
        assert [HANGS in each for each in errors(caplog)] == [True] * hangs
        files.step()
    files.step_to_end(1)
    client.adopt()
    assert client.read(KEYS) == [DONE] * SLOTS


def test_blocks_of_a_directory_that_comes_late_reach_the_policy_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step must not wait for all of them."""
    monkeypatch.setattr(disk, "OPEN_SECONDS", 0.2)
    monkeypatch.setattr(tier, "_REPORTED_BLOCKS", 3)
    bad, good = tmp_path / "bad", tmp_path / "good"
    with opened(bad, slots=SLOTS) as client:
        client.adopt()  # a busy machine opens it later than a start waits
        for key in KEYS:
            assert client.write([key]) == [DONE]
    checked = CheckedPolicy(UseOrderPolicy())
    with contextlib.ExitStack() as hang:
        hang.enter_context(hung(bad))
        with opened(bad, good, slots=SLOTS, policy=lambda slots: checked) as client:
            client.adopt(but=1)
            more = names(SLOTS, first=SLOTS)
            assert client.write(more) == [DONE] * SLOTS
            hang.close()
            client.adopt()
            known = [len(checked.evictable)]
            while client.tier.has_news:
                client.pump()
                known.append(len(checked.evictable))
            assert known == [SLOTS + 3, SLOTS + 6, SLOTS + 8]
            assert client.found(KEYS + more) == KEYS + more
            assert list(checked.evictable)[SLOTS:] == KEYS


def test_a_start_with_nothing_but_hung_mounts_has_an_empty_disk(folder: Path) -> None:
    with opened(folder, slots=SLOTS) as client:
        assert client.tier.drives == []
        assert client.found(KEYS) == []
        assert client.write(KEYS) == [DROPPED] * SLOTS
        assert client.read(KEYS[:1]) == [Outcome.MISSING]
        assert client.tier.drain()


class Failing(OsFiles):
    """Every open fails until `code` is 0; `tried` is set by each."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.tried = threading.Event()

    def open(self, folder: int, name: str, flags: int) -> int:
        self.tried.set()
        if self.code:
            raise OSError(self.code, os.strerror(self.code))
        return super().open(folder, name, flags)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE])
def test_a_directory_that_fails_is_used_with_its_blocks_once_it_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    with opened(tmp_path, slots=SLOTS) as client:
        client.write(KEYS)
    files = Failing(code)
    with unopened(tmp_path, slots=SLOTS, files=files, why=os.strerror(code)) as client:
        assert len(errors(caplog)) == 1
        claim(str(tmp_path), FINGERPRINT, 1).release()  # others may have it meanwhile
        files.code = 0
        client.adopt()
        assert client.read(KEYS) == [DONE] * SLOTS


def test_a_mount_that_comes_late_is_used(tmp_path: Path) -> None:
    with opened(tmp_path / "drive", slots=SLOTS) as client:
        client.write(KEYS)
    (tmp_path / "link").symlink_to(tmp_path / "mount")
    with unopened(tmp_path / "link", slots=SLOTS, why="No such file") as client:
        (tmp_path / "drive").rename(tmp_path / "mount")
        client.adopt()
        assert client.read(KEYS) == [DONE] * SLOTS


def test_the_folder_of_an_engine_that_ends_is_taken_over(tmp_path: Path) -> None:
    with contextlib.ExitStack() as before:
        dying = before.enter_context(opened(tmp_path, slots=SLOTS))
        dying.write(KEYS)
        with unopened(tmp_path, slots=SLOTS, why=f"in use by process {os.getpid()}") as client:
            before.close()
            client.adopt()
            assert client.read(KEYS) == [DONE] * SLOTS


def hold_back(monkeypatch: pytest.MonkeyPatch, root: Path) -> tuple[threading.Event, list[Folder]]:
    """Let claims of a directory take until the event. Returns the folders that came."""
    answers = threading.Event()
    claimed: list[Folder] = []

    def slow_claim(path: str, fingerprint: str, owners: int) -> Folder:
        if path == str(root):
            assert answers.wait(PATIENCE_SECONDS)
        folder = claim(path, fingerprint, owners)
        if path == str(root):
            claimed.append(folder)
        return folder

    monkeypatch.setattr(opening, "claim", slow_claim)
    monkeypatch.setattr(disk, "OPEN_SECONDS", 0.2)
    return answers, claimed


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("when", ["before it is open", "before it is used"])
def test_no_block_from_before_a_reset_is_served_by_a_drive_that_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, watched: bool
) -> None:
    with opened(tmp_path, slots=SLOTS) as client:
        client.write(KEYS)
    answers, _ = hold_back(monkeypatch, tmp_path)
    with opened(tmp_path, slots=SLOTS) as client:
        (late,) = client.tier.connecting
        if watched:
            client.tier.watch()
        if when == "before it is open":
            client.tier.clear()
        answers.set()
        wait_until(lambda: late.drive is not None)
        client.tier.clear()
        client.adopt()
        assert client.found(KEYS) == []
        assert client.tier.drain_changes(99) == {}
        assert client.write(KEYS) == [DONE] * SLOTS
        assert client.read(KEYS) == [DONE] * SLOTS
    with opened(tmp_path, slots=SLOTS) as client:
        assert client.found(KEYS) == [], "blocks of a reset engine"


def test_the_blocks_of_a_drive_that_comes_later_are_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, slots=SLOTS) as client:
        client.write(KEYS)
    answers, _ = hold_back(monkeypatch, tmp_path)
    with opened(tmp_path, slots=SLOTS) as client:
        client.tier.watch()
        answers.set()
        client.adopt()
        assert client.tier.drain_changes(99) == dict.fromkeys(KEYS, True)


@pytest.mark.parametrize("reset", [False, True])
def test_a_directory_that_answers_after_the_end_is_free_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reset: bool
) -> None:
    late, good = tmp_path / "late", tmp_path / "good"
    with opened(late, slots=SLOTS) as client:
        client.write(KEYS)
    answers, claimed = hold_back(monkeypatch, late)
    monkeypatch.setattr(opening, "CLOSE_SECONDS", 0.0)
    with opened(good, late, slots=SLOTS) as client:
        client.adopt(but=1)
        assert [drive.path for drive in client.tier.drives] == [str(good / FINGERPRINT)]
        if reset:
            client.tier.clear()
    answers.set()
    wait_until(lambda: bool(claimed) and claimed[0].lock < 0)
    claim(str(late), FINGERPRINT, 1).release()


def test_a_drive_that_opens_after_the_end_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answers = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        begun.set()
        assert answers.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(opening, "save_identity", hang)
    monkeypatch.setattr(opening, "CLOSE_SECONDS", 0.0)
    monkeypatch.setattr(disk, "OPEN_SECONDS", 0.2)
    with opened(tmp_path, slots=SLOTS) as client:
        (late,) = client.tier.connecting
        assert begun.wait(PATIENCE_SECONDS)
    answers.set()
    assert await_opening(late, PATIENCE_SECONDS)
    claim(str(tmp_path), FINGERPRINT, 1).release()


def test_a_drive_that_is_open_and_not_used_yet_is_closed_and_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, slots=SLOTS) as client:
        client.write(KEYS)
    answers, _ = hold_back(monkeypatch, tmp_path)
    with opened(tmp_path, slots=SLOTS) as client:
        client.tier.clear()
        answers.set()
        (late,) = client.tier.connecting
        wait_until(lambda: late.drive is not None)
        assert client.tier.has_news
    with opened(tmp_path, slots=SLOTS) as client:
        assert client.found(KEYS) == []


def test_a_reset_that_no_disk_records_is_named_at_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opening, "CLOSE_SECONDS", 0.0)
    with opened(folder, slots=SLOTS) as client:
        client.tier.clear()
    assert f"the reset of the caches in {folder} is recorded nowhere" in errors(caplog)[-1]


def test_a_program_opens_its_cache_beside_a_hung_drive(folder: Path, tmp_path: Path) -> None:
    """From the settings on, which compare the directories with each other."""
    pages = np.zeros((4, 16, 64), np.uint8)
    config = {
        "cpu_cache_gb": 0.001,
        "ssd_cache_dir": f"{folder};{tmp_path / 'good'}",
        "ssd_cache_gb": 0.002,
    }
    layout = KVLayout.from_tensors([TensorView.of("layer", pages)], 4)
    with open_cache(config, layout, identity=["model"]):
        assert len(list((tmp_path / "good").iterdir())) == 1


def test_directories_that_answer_are_compared_beside_one_that_hangs(
    folder: Path, tmp_path: Path
) -> None:
    good = tmp_path / "good"
    (tmp_path / "link").symlink_to(good)
    paths = [str(folder), str(good)]
    assert list(places_of(paths)) == [str(good)]
    with pytest.raises(DiskError, match="is the same directory as"):
        check_apart(places_of([*paths, str(tmp_path / "link")]))


def test_folders_beside_one_that_is_refused_are_given_back(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for paths in (["good", "file"], ["file", "good"]):
        with pytest.raises(DiskError, match="cannot use the cache directory"):
            opened(*(tmp_path / name for name in paths)).__enter__()
        claim(str(tmp_path / "good"), FINGERPRINT, 1).release()


def test_an_error_that_nobody_expects_keeps_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(folder: Folder) -> NoReturn:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(opening, "check_table", no_memory)
        tier = open_disk_tier([str(tmp_path)], FINGERPRINT, SLOT, capacity_of(SLOTS))
        assert "MemoryError" in errors(caplog)[0]
    wait_until(lambda: tier.has_news)
    assert tier.close()
    claim(str(tmp_path), FINGERPRINT, 1).release()


def test_ctrl_c_while_a_drive_hangs_keeps_no_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook, for instance, lives on."""
    good = str(tmp_path / "good")

    await_check = opening.Opening.await_check

    def interrupted(each: opening.Opening, seconds: float) -> None:
        if each.root == str(folder):
            raise KeyboardInterrupt
        await_check(each, PATIENCE_SECONDS)

    monkeypatch.setattr(opening.Opening, "await_check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_disk_tier([good, str(folder)], FINGERPRINT, SLOT, capacity_of(SLOTS, 2))
    claim(good, FINGERPRINT, 1).release()
