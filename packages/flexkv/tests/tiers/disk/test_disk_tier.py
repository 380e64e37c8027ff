# SPDX-License-Identifier: Apache-2.0
"""The disk tier over real files, through what the cache calls."""

from __future__ import annotations

import contextlib
import os
import random
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from disk_blocks import (
    DEADLINE,
    FINGERPRINT,
    SLOT,
    Client,
    capacity_of,
    names,
    opened,
    unopened,
)
from faults.faulty_files import HangingFiles, NoDirectFiles
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv.tiers import device
from flexkv.tiers.disk import MAX_OWNERS, open_disk_tier, slabs
from flexkv.tiers.disk.drive import THREADS
from flexkv.tiers.disk.table import VERSION
from flexkv.tiers.job import Outcome, Priority, Urgency
from flexkv.types.errors import DiskError
from packages.conftest import Clock
from packages.inside_tiers import is_closing, running_jobs, store_of

DONE = Outcome.DONE
OTHER = "cd" * 32


def disk_use(root: Path) -> int:
    """Bytes on disk of all files and folders below `root`, as du counts. An open tier may replace
    files meanwhile."""
    total = 0
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    with opened(tmp_path) as client:
        keys = names(50)
        assert client.tier.contains(keys) == [False] * 50
        assert client.write(keys) == [DONE] * 50
        assert client.tier.contains(keys) == [True] * 50
        for priority in (Priority.LOAD, Priority.PREFETCH):
            assert client.read(keys, priority) == [DONE] * 50
        assert client.tier.poll() == []


def test_an_absent_block_is_missing_and_the_others_are_read(tmp_path: Path) -> None:
    with opened(tmp_path) as client:
        client.write(names(2))
        outcomes = client.read([b"absent", *names(2), b"absent too"])
        assert outcomes == [Outcome.MISSING, DONE, DONE, Outcome.MISSING]


def test_an_empty_batch_has_no_results(tmp_path: Path) -> None:
    with opened(tmp_path) as client:
        tickets = {client.tier.write([], []), client.tier.read([], [], Priority.LOAD)}
        assert len(tickets) == 2
        client.settle()
        assert client.results == {}
        for ticket in tickets:
            client.tier.cancel(ticket)
            client.tier.raise_priority(ticket, Urgency(Priority.LOAD))


def test_a_block_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    with opened(tmp_path) as client:
        client.write(names(5))
        (ledger,) = [store_of(d).ledger for d in client.tier.drives]
        assert client.write(names(6)) == [DONE] * 6
        assert ledger.written_blocks == 6
        assert client.write([b"twice"] * 3) == [DONE] * 3
        assert ledger.written_blocks == 7


def test_keys_of_any_length_are_kept_apart(tmp_path: Path) -> None:
    keys = [b"x" * length for length in (1, 31, 32, 33, 64, 96)]
    with opened(tmp_path) as client:
        assert client.write(keys) == [DONE] * 6
    with opened(tmp_path) as client:
        assert client.read(keys) == [DONE] * 6
        client.tier.touch(keys)
        client.delete(keys)
        assert client.found(keys) == []


def test_a_full_tier_lets_the_blocks_go_that_were_used_longest_ago(tmp_path: Path) -> None:
    keys = names(8)
    with opened(tmp_path, slots=8) as client:
        for key in keys:
            client.write([key])
        client.read(keys[:2])
        client.tier.touch(keys[2:4])
        assert client.write(names(4, first=100)) == [DONE] * 4
        assert client.found(keys) == keys[:4]
        assert client.read(names(4, first=100)) == [DONE] * 4


def test_batches_go_over_the_ends_of_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SLAB_BYTES", 10 * SLOT)
    with opened(tmp_path) as client:
        assert client.write(names(64)) == [DONE] * 64
        assert client.read(names(64)) == [DONE] * 64
        assert client.read(names(64)[::-1]) == [DONE] * 64
        assert len(list((tmp_path / FINGERPRINT).glob("slab-*"))) == 7


def test_more_blocks_than_slots_are_dropped_and_nothing_is_lost(tmp_path: Path) -> None:
    with opened(tmp_path, slots=4) as client:
        outcomes = client.write(names(20))
        assert set(outcomes) <= {DONE, Outcome.DROPPED}
        found = client.found(names(20))
        assert 0 < len(found) <= 4
        assert client.read(found) == [DONE] * len(found)


def test_a_reopened_tier_is_warm(tmp_path: Path) -> None:
    with opened(tmp_path, slots=32) as client:
        client.write(names(100))
        found = client.found(names(100))
        assert len(found) == 32
    with opened(tmp_path, slots=32) as client:
        assert client.found(names(100)) == found
        assert client.read(found) == [DONE] * 32
        assert client.write(names(10, first=200)) == [DONE] * 10
        assert client.read(names(10, first=200)) == [DONE] * 10


def test_a_closed_tier_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    tier = open_disk_tier([str(tmp_path)], FINGERPRINT, SLOT, capacity_of(64))
    assert set(threading.enumerate()) > before
    assert tier.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("allowed", [0.0, 3 * DEADLINE])
def test_what_waits_is_written_as_long_as_the_engine_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, allowed: float
) -> None:
    tier = open_disk_tier([str(tmp_path)], FINGERPRINT, SLOT, capacity_of(64))
    client = Client(tier)
    client.write(names(64, first=100))  # of which most make room
    (drive,) = tier.drives
    gate, write = threading.Event(), store_of(drive).write

    def waiting(*args: Any, **named: Any) -> Any:
        gate.wait()
        return write(*args, **named)

    monkeypatch.setattr(store_of(drive), "write", waiting)
    monkeypatch.setattr(drive, "_runs", lambda slots, size: [[i] for i in range(len(slots))])
    client.begin_write(names(40))
    while running_jobs(drive.link) < THREADS:
        time.sleep(0)
    # By itself it begins writes for `DEADLINE`, and waits as long again for their ends.
    monkeypatch.setattr(device, "CLOSE_SECONDS", 2 * DEADLINE)
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(tier.close, allowed)
        while not is_closing(drive.link):
            time.sleep(0)
        clock.skip(1.5 * DEADLINE)
        gate.set()
        assert closed.result()
    with opened(tmp_path) as again:
        kept = names(24, first=100)
        assert again.found(names(164)) == [*names(40 if allowed else THREADS), *kept]


@pytest.mark.parametrize("slots", [1, 20, 63, 65, 300])
def test_another_capacity_keeps_what_fits(tmp_path: Path, slots: int) -> None:
    with opened(tmp_path, slots=64) as client:
        client.write(names(64))
    with opened(tmp_path, slots=slots) as client:
        found = client.found(names(64))
        assert len(found) == min(64, slots)
        assert client.read(found) == [DONE] * len(found)
        assert len(client.write(names(30, first=100))) == 30
        assert disk_use(tmp_path) <= capacity_of(slots)
    with opened(tmp_path, slots=64) as client:
        again = client.found(names(130))
        assert set(client.read(again)) == {DONE}


def test_blocks_of_another_size_begin_anew(tmp_path: Path) -> None:
    with opened(tmp_path) as client:
        client.write(names(10))
    tier = open_disk_tier([str(tmp_path)], FINGERPRINT, 2 * SLOT, capacity_of(64))
    assert tier.contains(names(10)) == [False] * 10
    assert tier.close()


@pytest.mark.parametrize("capacity", [0, SLOT, capacity_of(1) - 1])
def test_a_capacity_without_room_for_a_block_is_refused(tmp_path: Path, capacity: int) -> None:
    with pytest.raises(DiskError, match=r"less than one block of 8192 bytes; allowed"):
        open_disk_tier([str(tmp_path)], FINGERPRINT, SLOT, capacity)
    with opened(tmp_path):  # nobody owns it
        pass


@settings(max_examples=15)
@given(
    st.sampled_from([4096, 8192, 65536]),
    st.integers(1, 400),
    st.integers(0, 4095),
    st.sampled_from(["in order", "every other", "shuffled"]),
)
def test_files_never_take_more_than_the_capacity(
    tmp_path_factory: pytest.TempPathFactory, slot: int, slots: int, extra: int, order: str
) -> None:
    """Every slot that is written may cost the file system an entry in the file's map."""
    root = tmp_path_factory.mktemp("bound")
    capacity = capacity_of(1) + slots * slot + extra
    tier = open_disk_tier([str(root)], FINGERPRINT, slot, capacity)
    (store,) = [store_of(drive) for drive in tier.drives]
    client = Client(tier)
    memory = client.buffers[0].obj
    buffer = memoryview(memory)[:slot]
    places = list(range(store.index.num_slots))
    if order == "every other":
        places = places[::2]
    elif order == "shuffled":
        random.Random(slots).shuffle(places)
    assert disk_use(root) <= capacity
    for place in places:
        store.write(place, [b"key"], [1], store.seal, [buffer])
    assert tier.close()
    assert disk_use(root) <= capacity


def test_files_and_folders_are_for_their_owner_only(tmp_path: Path) -> None:
    with opened(tmp_path / "a" / "b") as client:
        client.write(names(3))
    folder = tmp_path / "a" / "b" / FINGERPRINT
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == dict.fromkeys(["lock", "table", "slab-00000", "counters.json"], 0o600)
    for path in (folder, folder.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_file_system_without_direct_io_works_too(tmp_path: Path) -> None:
    with opened(tmp_path) as client:
        client.write(names(5))
    with opened(tmp_path, files=NoDirectFiles()) as client:
        assert not store_of(client.tier.drives[0]).direct
        assert client.read(names(5)) == [DONE] * 5
        assert client.write(names(5, first=5)) == [DONE] * 5
    with opened(tmp_path) as client:
        assert client.read(names(10)) == [DONE] * 10


# Owners


def test_a_second_owner_is_refused_with_one_clear_message(tmp_path: Path) -> None:
    with opened(tmp_path) as client:
        client.write(names(3))
        with unopened(tmp_path, why=rf"in use by process {os.getpid()}; allowed: .*own") as second:
            assert second.tier.drives == []
        assert client.read(names(3)) == [DONE] * 3
    with opened(tmp_path) as client:
        assert client.read(names(3)) == [DONE] * 3


def test_a_refused_directory_leaves_no_other_open(tmp_path: Path) -> None:
    (tmp_path / "b").touch()
    with pytest.raises(DiskError), opened(tmp_path / "a", tmp_path / "b"):
        pass
    (tmp_path / "b").unlink()
    with opened(tmp_path / "a", tmp_path / "b"):
        pass


def test_a_second_owner_may_have_a_folder_of_its_own(tmp_path: Path) -> None:
    with (
        opened(tmp_path, owners=MAX_OWNERS) as first,
        opened(tmp_path, owners=MAX_OWNERS, salt=b"2") as second,
    ):
        first.write(names(20))
        assert second.found(names(20)) == []
        second.write(names(20))
        assert first.read(names(20)) == second.read(names(20)) == [DONE] * 20
    # Which of the two a later one gets, it gets whole.
    with (
        opened(tmp_path, owners=MAX_OWNERS) as first,
        opened(tmp_path, owners=MAX_OWNERS, salt=b"2") as second,
    ):
        assert first.read(names(20)) == second.read(names(20)) == [DONE] * 20


@pytest.mark.parametrize("keep", [True, False])
def test_blocks_of_another_model_are_kept_or_make_room(tmp_path: Path, keep: bool) -> None:
    with opened(tmp_path) as client:
        client.write(names(20))
    with opened(tmp_path, fingerprint=OTHER, salt=b"other", keep_others=keep) as client:
        assert client.found(names(20)) == []
        client.write(names(64))
        assert disk_use(tmp_path / OTHER) <= capacity_of(64)
        assert keep or disk_use(tmp_path) <= capacity_of(64)
    with opened(tmp_path) as client:
        assert client.read(client.found(names(64))) == [DONE] * (20 if keep else 0)


@pytest.mark.parametrize("why", ["no room", "newer format", "not a table", "a file"])
def test_a_start_that_fails_removes_and_changes_nothing(tmp_path: Path, why: str) -> None:
    """In the second directory, when all would be well in the first."""
    roots = tmp_path / "a", tmp_path / "b"
    for root in roots:
        with opened(root, fingerprint=OTHER, slots=8) as client:
            client.write(names(8))
    slots = 8
    if why == "no room":
        slots = 1 << 36
    else:
        (roots[1] / FINGERPRINT).mkdir()
        table_path = roots[1] / FINGERPRINT / "table"
        if why == "newer format":
            table_path.write_bytes(b"FLEXKVTB" + bytes([VERSION + 1]) + bytes(9000))
        elif why == "not a table":
            table_path.write_bytes(b"my thesis")
        else:
            table_path.mkdir()
    before = table_path.read_bytes() if why in ("newer format", "not a table") else None
    capacity = 2 * (slots * SLOT + (1 << 20))
    with pytest.raises(DiskError, match="; allowed: ") as caught:
        open_disk_tier(
            [str(root) for root in roots], FINGERPRINT, SLOT, capacity, keep_others=False
        )
    expected = {
        "no room": "GiB left",
        "newer format": f"of format {VERSION + 1}, written by a newer FlexKV",
        "not a table": "is not a table of FlexKV",
        "a file": "is not a regular file",
    }
    assert expected[why] in str(caught.value)
    assert before is None or table_path.read_bytes() == before
    assert not (roots[0] / FINGERPRINT / "slab-00000").exists()
    for root in roots:
        with opened(root, fingerprint=OTHER, slots=8) as client:
            assert client.read(names(8)) == [DONE] * 8


@pytest.mark.parametrize("name", ["table", "slab-00000", "counters.json", "reset", "lock"])
@pytest.mark.parametrize("kind", ["link", "fifo", "/dev/zero"])
def test_what_is_no_regular_file_is_neither_followed_nor_waited_for(
    tmp_path: Path, name: str, kind: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("my thesis\n" * 1000)
    before = victim.read_bytes()
    root = tmp_path / "cache"
    with opened(root) as client:
        client.write(names(8))
    path = root / FINGERPRINT / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(kind if kind.startswith("/") else victim)
    if name in ("counters.json", "reset"):  # do without
        with opened(root) as client:
            assert client.read(names(8)) == [DONE] * 8
            client.tier.clear()
        with opened(root) as client:
            assert client.found(names(8)) == []
    else:
        with (
            pytest.raises(DiskError, match=r"is not a regular file|is a symbolic link"),
            opened(root),
        ):
            pass
        assert path.is_symlink() == (kind != "fifo")
    assert victim.read_bytes() == before


# Several directories


def test_blocks_are_spread_over_the_directories(tmp_path: Path) -> None:
    roots = tmp_path / "a", tmp_path / "b"
    with opened(*roots, slots=40) as client:
        assert client.write(names(60)) == [DONE] * 60
        assert all(len(drive.index) > 0 for drive in client.tier.drives)
        assert client.read(names(60)) == [DONE] * 60
        for root in roots:
            assert disk_use(root) <= capacity_of(40)
    with opened(*reversed(roots), slots=40) as client:
        assert client.read(names(60)) == [DONE] * 60
        client.delete(names(60))
        assert client.found(names(60)) == []


def test_a_block_is_read_from_the_directory_that_does_not_hang(
    tmp_path: Path, clock: Clock
) -> None:
    roots = tmp_path / "a", tmp_path / "b"
    for root in roots:
        with opened(root) as client:
            client.write(names(10))
    files = HangingFiles()
    with opened(*roots, files=files) as client, files:
        files.hang(roots[0])
        client.begin_reads(0, names(10))
        clock.skip(2 * DEADLINE)
        client.pump()
        assert not client.tier.drives[0].readable
        assert client.found(names(10)) == names(10)
        assert client.read(names(10)) == [DONE] * 10
        files.release()
