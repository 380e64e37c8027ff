# SPDX-License-Identifier: Apache-2.0
"""What a tier does while nobody polls it: no test here calls `poll` where the tier is to act."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from disk_blocks import DEADLINE, FINGERPRINT, SLOT, names, opened, unopened

from flexkv.tiers.disk import OsFiles, ledger, table, upkeep
from flexkv.tiers.disk.folder import RESET
from flexkv.tiers.job import Outcome
from packages.conftest import Clock
from packages.inside_tiers import store_of
from packages.patience import wait_until

DONE = Outcome.DONE
KEYS = names(20)


class ResetFiles(OsFiles):
    """The real files, until something befalls what a reset writes.

    Attributes:
        header: befalls a write of the table's header, all copies of it.
        marker: befalls the file beside the table as it is made.
    """

    def __init__(self) -> None:
        self.header: Callable[[], None] = lambda: None
        self.marker: Callable[[], None] = lambda: None
        self._failure: Exception | None = None

    def open(self, folder: int, name: str, flags: int) -> int:
        if name == RESET:
            self.marker()
        return super().open(folder, name, flags)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if table.has_magic(bytes(buffers[0][:8])):
            if offset == 0:
                self._failure = None
                try:
                    self.header()
                except (OSError, MemoryError, ValueError) as error:
                    self._failure = error
            if self._failure is not None:
                raise self._failure
        return super().pwritev(fd, buffers, offset)


class Failing:
    """Fails so many times.

    Attributes:
        calls: so far.
    """

    def __init__(self, times: int, error: Exception | None = None) -> None:
        self._times = times
        self._error = error or OSError(errno.EIO, os.strerror(errno.EIO))
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= self._times:
            raise self._error


FOREVER = 1 << 60


def found_after_a_kill(root: Path) -> list[bytes]:
    """What the next process would find if this one were killed now."""
    copy = root.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    try:
        shutil.copytree(root, copy)
    except shutil.Error:  # a file is gone since the folder was listed
        return found_after_a_kill(root)
    with opened(copy) as client:
        return client.found(names(100))


def epoch_of(root: Path) -> int:
    header = table.Header.decode((root / FINGERPRINT / "table").read_bytes()[: table.HEADER_BYTES])
    assert header is not None
    return header.epoch


@pytest.mark.parametrize("error", [None, MemoryError(), ValueError()], ids=["EIO", "memory", "bug"])
def test_a_reset_is_retried_until_it_is_written(tmp_path: Path, error: Exception | None) -> None:
    files = ResetFiles()
    with opened(tmp_path / "a", files=files) as client:
        client.write(KEYS)
        before = epoch_of(tmp_path / "a")
        files.header, files.marker = Failing(3, error), Failing(3)
        client.tier.clear()
        wait_until(lambda: epoch_of(tmp_path / "a") != before)
        assert files.header.calls == 4
        assert found_after_a_kill(tmp_path / "a") == []
        files.header, files.marker = Failing(2), Failing(2)
        before = epoch_of(tmp_path / "a")
        client.tier.clear()  # another one is retried as the first was
        wait_until(lambda: epoch_of(tmp_path / "a") != before)


def test_a_reset_whose_header_cannot_be_written_is_marked_beside_it(tmp_path: Path) -> None:
    files = ResetFiles()
    with opened(tmp_path / "a", files=files) as client:
        client.write(KEYS)
        files.header = failing = Failing(FOREVER)
        client.tier.clear()
        wait_until(lambda: failing.calls > 2)
        client.salt = b"new weights"
        assert client.write(KEYS[10:]) == [DONE] * 10
        assert client.read(KEYS[10:]) == [DONE] * 10
        assert found_after_a_kill(tmp_path / "a") == []
    with opened(tmp_path / "a", salt=b"new weights") as client:
        assert client.found(KEYS) == []
        assert client.write(KEYS) == [DONE] * 20
    with opened(tmp_path / "a", salt=b"new weights") as client:  # the mark is gone with the epoch
        assert client.read(KEYS) == [DONE] * 20


def test_a_reset_is_marked_before_a_write_of_the_header_that_hangs(tmp_path: Path) -> None:
    files = ResetFiles()
    hangs, free = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        assert free.wait(DEADLINE)

    with opened(tmp_path / "a", files=files) as client:
        client.write(KEYS)
        files.header = hang
        client.tier.clear()
        assert hangs.wait(DEADLINE)
        assert found_after_a_kill(tmp_path / "a") == []
        free.set()
        client.settle()
        assert not (tmp_path / "a" / FINGERPRINT / RESET).exists()


def test_a_reset_that_the_disk_refuses_altogether_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = ResetFiles()
    with opened(tmp_path, files=files) as client:
        client.write(KEYS)
        files.header = files.marker = failing = Failing(FOREVER)
        client.tier.clear()
        wait_until(lambda: failing.calls >= 6)
        assert [r.levelname for r in caplog.records] == ["ERROR"]
        assert "nothing on disk records it); FlexKV retries" in caplog.text
        assert "remove that folder" in caplog.text
        assert client.write(KEYS) == [DONE] * 20  # of the new meaning, for this process
        assert client.read(KEYS) == [DONE] * 20
        files.header = files.marker = Failing(0)
        client.settle()
    with opened(tmp_path) as client:
        assert client.found(KEYS) == []


def test_the_marker_is_no_more_than_a_name(tmp_path: Path) -> None:
    """What it stands for is bound to be true though the disk is full."""
    files = ResetFiles()
    with opened(tmp_path, files=files) as client:
        client.write(KEYS)
        files.header = Failing(FOREVER)
        client.tier.clear()
        wait_until((tmp_path / FINGERPRINT / RESET).exists)
        assert (tmp_path / FINGERPRINT / RESET).stat().st_blocks == 0


@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_counters_are_saved_while_nobody_polls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    monkeypatch.setattr(upkeep, "SAVE_SECONDS", pause)
    path = tmp_path / FINGERPRINT / ledger.FILE

    def saved() -> tuple[int, int]:
        content = json.loads(path.read_bytes()) if path.exists() else {}
        return content.get("hit_blocks", 0), sum(content.get("written_bytes", {}).values())

    with opened(tmp_path) as client:
        client.write(KEYS)
        wait_until(lambda: saved() == (0, 20 * SLOT))
        client.write(names(5, first=50))
        client.read(KEYS)
        wait_until(lambda: saved() == (20, 25 * SLOT))


def test_jobs_that_ended_last_are_in_the_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the upkeep saves them as soon as it is told to, and nobody polls afterwards."""
    monkeypatch.setattr(upkeep, "SAVE_SECONDS", 0.0)
    real = upkeep.Upkeep.count

    def count(self: upkeep.Upkeep) -> None:
        real(self)
        wait_until(lambda: not (self._save.wanted or self._save.running))

    monkeypatch.setattr(upkeep.Upkeep, "count", count)
    with opened(tmp_path) as client:
        client.write(KEYS[:1])
        client.read(KEYS[:1])
        saved = json.loads((tmp_path / FINGERPRINT / ledger.FILE).read_bytes())
        assert (saved["written_blocks"], saved["hit_blocks"]) == (1, 1)


def test_counters_that_could_not_be_saved_are_saved_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "SAVE_SECONDS", DEADLINE)  # saved once while the test looks
    failing, real = Failing(3), os.replace

    def replace(*args: object, **kwargs: object) -> None:
        failing()
        real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", replace)
    with opened(tmp_path) as client:
        client.write(KEYS)
        wait_until((tmp_path / FINGERPRINT / ledger.FILE).exists)
        assert failing.calls == 4


def test_a_disk_that_saves_counters_slowly_is_read_from_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    saving, free, real = threading.Event(), threading.Event(), os.replace

    def replace(*args: object, **kwargs: object) -> None:
        saving.set()
        assert free.wait(DEADLINE)
        real(*args, **kwargs)  # type: ignore[arg-type]

    with opened(tmp_path) as client:
        client.write(KEYS)
        monkeypatch.setattr(os, "replace", replace)
        client.write(names(1, first=50))
        assert saving.wait(DEADLINE)
        clock.skip(10 * DEADLINE)
        assert client.tier.drives[0].readable
        assert client.read(KEYS) == [DONE] * 20
        assert client.write(names(5, first=60)) == [DONE] * 5
        free.set()


def test_a_slot_whose_erasure_hangs_is_not_used_and_all_others_are(
    tmp_path: Path, clock: Clock
) -> None:
    hangs, free = threading.Event(), threading.Event()

    class Files(OsFiles):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if buffers[0] == table.EMPTY_RECORD:
                hangs.set()
                assert free.wait(DEADLINE)
            return super().pwritev(fd, buffers, offset)

    with opened(tmp_path, slots=8, files=Files()) as client:
        client.write(names(8))
        slot = client.slots_of(names(1))[names(1)[0]]
        client.delete(names(1))
        assert hangs.wait(DEADLINE)
        clock.skip(10 * DEADLINE)
        more = names(20, first=100)
        assert [client.write([key]) for key in more] == [[DONE]] * 20
        left = client.found(more)
        assert len(left) == 7
        assert slot not in client.slots_of(left).values()
        free.set()
        client.settle()
        client.write([b"one more"])
        assert client.slots_of([b"one more"]) == {b"one more": slot}


def test_an_erasure_that_raises_anything_gives_its_slot_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, slots=8) as client:
        client.write(names(8))
        (one,) = client.tier.drives
        real = store_of(one).write_record

        def erase(slot: int, record: bytes) -> None:
            monkeypatch.setattr(store_of(one), "write_record", real)
            raise MemoryError

        monkeypatch.setattr(store_of(one), "write_record", erase)
        client.delete(names(2))
        wait_until(lambda: one.index.free_slots == 2, client.pump)
    with opened(tmp_path, slots=8) as client:
        assert client.found(names(8)) == names(6, first=2)


class SyncedFiles(ResetFiles):
    """The real files, and a copy of them as the drive has them for certain.

    Attributes:
        sync_call: befalls a sync.
        erasure: befalls the write of an erased record.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.sync_call: Callable[[], None] = lambda: None
        self.erasure: Callable[[], None] = lambda: None
        self._root = root
        self.kept = root.with_name("kept")

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if buffers[0] == table.EMPTY_RECORD:
            self.erasure()
        return super().pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self.sync_call()
        super().sync(fd)
        shutil.rmtree(self.kept, ignore_errors=True)
        shutil.copytree(self._root, self.kept)

    def found_after_a_power_failure(self) -> list[bytes]:
        """What the next process would find if the machine lost its power now."""
        copy = self._root.with_name("copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.kept, copy)
        with opened(copy) as client:
            return client.found(KEYS)


@pytest.mark.parametrize("all_blocks", [False, True], ids=["some", "all"])
def test_removed_blocks_stay_removed_over_a_power_failure(tmp_path: Path, all_blocks: bool) -> None:
    files = SyncedFiles(tmp_path / "a")
    with opened(tmp_path / "a", files=files) as client:
        client.write(KEYS)
        assert [each.result(DEADLINE) for each in client.tier.sync()] == ["", ""]
        assert files.found_after_a_power_failure() == KEYS
        if all_blocks:
            client.tier.empty()
        else:
            client.tier.remove(KEYS[:15])
        assert [each.result(DEADLINE) for each in client.tier.sync()] == ["", ""]
        assert files.found_after_a_power_failure() == ([] if all_blocks else KEYS[15:])


def test_a_sync_waits_for_the_reset_and_the_erasures_before_it(tmp_path: Path) -> None:
    files, free = SyncedFiles(tmp_path / "a"), threading.Event()
    with opened(tmp_path / "a", files=files) as client:
        client.write(KEYS)
        hangs = threading.Event()

        def hang() -> None:
            hangs.set()
            assert free.wait(DEADLINE)

        files.erasure = hang
        client.tier.remove(KEYS)
        (_, asked) = client.tier.sync()
        assert hangs.wait(DEADLINE)
        assert not asked.done()
        assert client.write(names(3, first=100)) == [DONE] * 3  # nobody else waits
        free.set()
        assert asked.result(DEADLINE) == ""
        assert files.found_after_a_power_failure() == []


def test_erasures_that_the_drive_refuses_are_named_and_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = SyncedFiles(tmp_path / "a")
    with opened(tmp_path / "a", files=files) as client:
        client.write(KEYS)
        files.erasure = failing = Failing(FOREVER)
        client.tier.remove(KEYS[:5])
        path = tmp_path / "a" / FINGERPRINT
        left = f"5 records in {path} cannot be erased ([Errno 5] Input/output error)"
        assert client.tier.sync()[1].result(DEADLINE) == left
        assert found_after_a_kill(tmp_path / "a") == KEYS
        client.tier.remove(KEYS[:5])  # the index has them no more
        assert client.tier.sync()[1].result(DEADLINE) == left
        assert client.found(KEYS) == KEYS[5:]
        assert [r.levelname for r in caplog.records] == ["ERROR"]
        assert "the next start finds these blocks" in caplog.text
        calls = failing.calls
        wait_until(lambda: failing.calls > calls)  # nobody asks for that
        files.erasure = Failing(0)
        assert client.tier.sync()[1].result(DEADLINE) == ""
        assert found_after_a_kill(tmp_path / "a") == KEYS[5:]
        client.settle()
        assert client.tier.drives[0].index.free_slots == 64 - 15


def test_a_sync_that_failed_is_doubt_until_a_reset(tmp_path: Path) -> None:
    """The kernel takes pages that it could not write for clean."""
    files = SyncedFiles(tmp_path / "a")
    with opened(tmp_path / "a", files=files) as client:
        client.write(KEYS)
        client.tier.remove(KEYS[:5])
        files.sync_call = Failing(1)
        for _ in range(2):
            doubt = client.tier.sync()[1].result(DEADLINE)
            assert doubt.startswith("a power failure may undo removals in ")
        client.tier.empty()
        assert client.tier.sync()[1].result(DEADLINE) == ""


def test_a_reset_that_the_drive_refuses_is_named(tmp_path: Path) -> None:
    files = SyncedFiles(tmp_path / "a")
    with opened(tmp_path / "a", files=files) as client:
        client.write(KEYS)
        files.header = files.marker = Failing(FOREVER)
        client.tier.empty()
        doubt = client.tier.sync()[1].result(DEADLINE)
        assert doubt.startswith(f"the reset of {tmp_path / 'a' / FINGERPRINT} cannot be written (")
        files.header = files.marker = Failing(0)
        assert client.tier.sync()[1].result(DEADLINE) == ""
        assert files.found_after_a_power_failure() == []


def test_a_directory_that_is_not_open_yet_keeps_its_blocks(tmp_path: Path) -> None:
    (tmp_path / "b").symlink_to(tmp_path / "nowhere" / "b")
    with unopened(tmp_path / "a", tmp_path / "b", why="") as client:
        client.tier.empty()
        unopened_says, asked = client.tier.sync()
        assert (
            unopened_says.result()
            == f"{tmp_path / 'b'} cannot be reached now, and keeps its blocks"
        )
        assert asked.result(DEADLINE) == ""
