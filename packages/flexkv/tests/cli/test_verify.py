# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from flexkv.tiers.disk import folder_check, slabs, table
from flexkv.tiers.disk.files import OsFiles
from flexkv.tiers.disk.slabs import is_slab
from flexkv.tiers.disk.table_reader import Record
from flexkv.tiers.envelope import checksum_of
from packages.flexkv.tests.cli import engine
from packages.flexkv.tests.cli.stores import Cache, Flexkv, FlexkvOnTerminal

NOT_WRITTEN = "its bytes do not match its checksum"


def check(cache: Cache, files: OsFiles | None = None) -> folder_check.Report:
    return folder_check.check_folder(
        files or OsFiles(), str(cache.folder), lambda _: None, lambda _: None
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What seems bad is looked at again at once: nothing changes but by the test."""
    monkeypatch.setattr(folder_check, "RECHECK_SECONDS", 0.0)


def test_intact_blocks_pass(flexkv: Flexkv, cache: Cache) -> None:
    cache.fill(7)
    ended = flexkv("verify", cache.root, "--json")
    assert ended.code == 0
    assert ended.json == {
        "folders": [
            {
                "folder": str(cache.folder),
                "blocks": 7,
                "bytes": 7 * cache.block_bytes,
                "read_bytes": 7 * cache.block_bytes,
                "replaced_blocks": 0,
            }
        ],
        "bad": [],
    }
    assert "all intact; read 448.00 KiB" in flexkv("verify", cache.root).out


def test_flipped_bytes_are_found(flexkv: Flexkv, cache: Cache) -> None:
    cache.fill(5)
    flipped = cache.records()[1:4:2]
    for record in flipped:
        cache.flip(record.slot)
    ended = flexkv("verify", cache.root, "--json")
    assert ended.code == 1
    assert ended.json["bad"] == [
        {
            "folder": str(cache.folder),
            "slot": record.slot,
            "key": record.key.hex(),
            "reason": NOT_WRITTEN,
        }
        for record in flipped
    ]
    shown = flexkv("verify", cache.root).out
    for record in flipped:
        assert f"bad: slot {record.slot}  key {record.key.hex()}  {NOT_WRITTEN}\n" in shown
    assert "2 bad; " in shown


def test_a_truncated_slab_is_found(flexkv: Flexkv, cache: Cache) -> None:
    cache.fill(4)
    slots = [record.slot for record in cache.records()]
    os.truncate(cache.slab, slots[2] * cache.block_bytes + 4096)
    ended = flexkv("verify", cache.root, "--json")
    assert ended.code == 1
    assert [bad["slot"] for bad in ended.json["bad"]] == slots[2:]
    assert {bad["reason"] for bad in ended.json["bad"]} == {"slab-00000 ends before this block"}


def test_a_missing_slab_is_found(flexkv: Flexkv, cache: Cache) -> None:
    cache.fill(1)
    cache.slab.unlink()
    ended = flexkv("verify", cache.root, "--json")
    assert ended.code == 1
    assert [bad["reason"] for bad in ended.json["bad"]] == ["slab-00000 is missing"]
    assert ended.json["folders"][0]["read_bytes"] == 0
    assert "1 bad; read 0 bytes" in flexkv("verify", cache.root).out


def test_many_bad_blocks_of_one_cause_are_one_line(flexkv: Flexkv, cache: Cache) -> None:
    cache.fill(40)
    cache.slab.unlink()
    ended = flexkv("verify", cache.root)
    assert ended.code == 1
    assert [line for line in ended.out.splitlines() if "bad: " in line] == [
        "  bad: 40 blocks, slots 0 to 39  slab-00000 is missing"
    ]
    assert len(flexkv("verify", cache.root, "--json").json["bad"]) == 40


def test_a_damaged_header_is_found(flexkv: Flexkv, cache: Cache) -> None:
    cache.fill(1)
    cache.damage_headers()
    ended = flexkv("verify", cache.root, "--json")
    assert ended.code == 1
    assert [(bad["slot"], bad["key"]) for bad in ended.json["bad"]] == [(None, "")]
    assert "bad: table  the header of the table is damaged" in flexkv("verify", cache.root).out


def test_a_table_of_a_newer_format_is_not_called_damaged(flexkv: Flexkv, cache: Cache) -> None:
    cache.fill(1)
    cache.make_newer()
    ended = flexkv("verify", cache.root)
    assert ended.code == 1
    assert f"table  the table is of format {table.VERSION + 1}, written by a newer" in ended.out
    assert "lost" not in ended.out


def test_a_torn_record_is_an_empty_slot(flexkv: Flexkv, cache: Cache) -> None:
    cache.fill(3)
    with open(cache.folder / "table", "r+b") as file:
        file.seek(table.record_offset(cache.records()[0].slot))
        file.write(b"XX")
    ended = flexkv("verify", cache.root, "--json")
    assert ended.code == 0
    assert ended.json["folders"][0]["blocks"] == 2


def test_flipped_bytes_are_found_beside_an_engine(flexkv: Flexkv, cache: Cache) -> None:
    cache.fill(3)
    record = cache.records()[0]
    with cache.owned():
        cache.flip(record.slot)
        ended = flexkv("verify", cache.root, "--json")
    assert ended.code == 1
    assert [bad["key"] for bad in ended.json["bad"]] == [record.key.hex()]


def test_blocks_that_an_engine_replaces_meanwhile_are_not_bad(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newest() -> int:
        return max(record.generation for record in cache.records())

    def until_written(_seconds: float) -> None:
        """Until what the engine was writing has ended, instead of a time: it is in the next batch
        but one."""
        wanted = newest() + 2 * engine.BATCH
        end = time.monotonic() + 120
        while newest() < wanted:
            assert time.monotonic() < end, "the engine replaces nothing"
            time.sleep(0.01)

    monkeypatch.setattr(folder_check, "time", SimpleNamespace(sleep=until_written))
    with cache.owned("write"):
        first = {record.generation for record in cache.records()}
        replaced = 0
        while not replaced or not first.isdisjoint(r.generation for r in cache.records()):
            report = check(cache)
            assert report.bad == []
            assert report.blocks > 0
            replaced += report.replaced_blocks


def test_a_folder_that_is_removed_meanwhile_is_not_bad(quick: None, cache: Cache) -> None:
    cache.fill(3)

    class Removing(OsFiles):
        def open(self, folder: int, name: str, flags: int) -> int:
            if is_slab(name):
                shutil.rmtree(cache.folder, ignore_errors=True)
            return super().open(folder, name, flags)

    report = check(cache, Removing())
    assert report.bad == []
    assert report.replaced_blocks == 3


class Replacing(OsFiles):
    """Replaces the block of a slot as an engine does: its bytes before the first read of them,
    its record after the read, or never."""

    def __init__(self, cache: Cache, slot: int, finish: bool) -> None:
        self._cache = cache
        self._slot = slot
        self._finish = finish
        self._done = False

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        size = self._cache.block_bytes
        if self._done or (len(buffers[0]), offset) != (size, self._slot * size):
            return super().preadv(fd, buffers, offset)
        self._done = True
        data = b"new" + bytes(self._cache.block_bytes - 3)
        slab = os.open(self._cache.slab, os.O_WRONLY)
        os.pwrite(slab, data, offset)
        os.fsync(slab)
        os.close(slab)
        count = super().preadv(fd, buffers, offset)
        if self._finish:
            header = self._cache.table().header
            assert header is not None
            checksum = checksum_of(data, header.seal, b"new")
            record = table.encode_record(self._slot, header.seal, b"new", checksum, 1000)
            with open(self._cache.folder / "table", "r+b") as file:
                file.seek(table.record_offset(self._slot))
                file.write(record)
        return count


def test_a_block_is_not_bad_while_its_record_is_still_to_come(quick: None, cache: Cache) -> None:
    cache.fill(3)
    slot = cache.records()[0].slot
    report = check(cache, Replacing(cache, slot, finish=True))
    assert report.bad == []
    assert report.replaced_blocks == 1


def test_a_block_whose_bytes_still_change_is_not_bad(quick: None, cache: Cache) -> None:
    cache.fill(3)
    slot = cache.records()[0].slot

    class Writing(OsFiles):
        """A write into the slot that gets on with every read of it, and never ends."""

        written = 0

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset == slot * cache.block_bytes:
                self.written += 4096
                slab = os.open(cache.slab, os.O_WRONLY)
                os.pwrite(slab, b"new " * (self.written // 4), offset)
                os.fsync(slab)
                os.close(slab)
            return super().preadv(fd, buffers, offset)

    report = check(cache, Writing())
    assert report.bad == []
    assert report.replaced_blocks == 1


def test_a_write_that_was_never_finished_left_a_bad_block(quick: None, cache: Cache) -> None:
    cache.fill(3)
    record = cache.records()[0]
    report = check(cache, Replacing(cache, record.slot, finish=False))
    assert [bad.key for bad in report.bad] == [record.key.hex()]
    assert report.replaced_blocks == 0


def test_a_bad_block_of_which_there_is_a_later_one_is_not_bad(quick: None, cache: Cache) -> None:
    cache.fill(2)
    older, newer = cache.records()
    header = cache.table().header
    assert header is not None
    data = cache.slab.read_bytes()[newer.slot * cache.block_bytes :][: cache.block_bytes]
    checksum = checksum_of(data, header.seal, older.key)
    later = newer._replace(key=older.key, checksum=checksum, generation=1000)
    same = replace_record(cache, header.seal, later)
    cache.flip(older.slot)
    assert check(cache).bad == []
    cache.flip(same.slot)
    assert [bad.slot for bad in check(cache).bad] == [same.slot]


def replace_record(cache: Cache, seal: int, record: Record) -> Record:
    with open(cache.folder / "table", "r+b") as file:
        file.seek(table.record_offset(record.slot))
        slot, key, checksum, generation, stored = record
        file.write(table.encode_record(slot, seal, key, checksum, generation, stored=stored))
    return record


def test_all_slabs_are_read(quick: None, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SLAB_BYTES", 3 * cache.block_bytes)
    cache.fill(10)
    assert check(cache).bad == []
    (cache.folder / "slab-00002").unlink()
    lost = [record.slot for record in cache.records() if record.slot // 3 == 2]
    report = check(cache)
    assert [bad.slot for bad in report.bad] == lost
    assert {bad.reason for bad in report.bad} == {"slab-00002 is missing"}


def test_a_block_larger_than_the_buffers_together_is_read_by_one_thread(
    quick: None, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_check, "MEMORY", cache.block_bytes // 2)
    cache.fill(3)
    cache.flip(cache.records()[0].slot)
    assert len(check(cache).bad) == 1


def test_where_o_direct_does_not_exist_blocks_are_read_without(quick: None, cache: Cache) -> None:
    cache.fill(3)
    refused = []

    class NoDirect(OsFiles):
        def open(self, folder: int, name: str, flags: int) -> int:
            if flags & os.O_DIRECT:
                refused.append(name)
                raise OSError(22, "Invalid argument")
            return super().open(folder, name, flags)

    report = check(cache, NoDirect())
    assert refused
    assert (report.blocks, report.bad) == (3, [])


def test_progress_is_shown_on_a_terminal_only(
    flexkv: Flexkv, flexkv_on_terminal: FlexkvOnTerminal, cache: Cache
) -> None:
    cache.fill(3)
    assert flexkv("verify", cache.root).err == ""
    shown = flexkv_on_terminal("verify", cache.root)
    assert shown.code == 0
    assert cache.folder.name in shown.out.split("all intact")[0].replace(str(cache.folder), "")
