# SPDX-License-Identifier: Apache-2.0
"""HiCache over FlexKV's disk, in a real SGLang that computes on a CPU: two servers, one after the
other on the same directory.

The first one's first answers, for which nothing was cached, are the reference. It is killed. What
it has written is then damaged in two ways: bytes flipped, as a bad drive does, and bytes replaced
together with their checksums, which nobody can notice but a test. The latter must change the
tokens: else equal tokens would say nothing.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flexkv.tiers.disk import slabs, table
from flexkv.tiers.disk.files import OsFiles, open_folder
from flexkv.tiers.disk.folder import TABLE, fingerprint_of
from flexkv.tiers.disk.table_reader import FoundTable, Record, read_table
from flexkv.tiers.envelope import checksum_of
from integration.harness.checkpoint import TINY
from integration.harness.prompts import random_tokens
from integration.sglang.hicache import PAGE_TOKENS, hicache_config
from integration.sglang.server import Answer, SglangServer

LENGTH = 306  # an answer of 8 tokens fills no further page
WHOLE_PAGES = LENGTH // PAGE_TOKENS
NAMES = ("intact", "longer", "flipped", "forged", "tenant")
PROMPTS = {name: random_tokens(name, LENGTH, TINY.vocab) for name in NAMES}
TENANT: dict[str, Any] = {"extra_key": "tenant A"}
SECONDS = 120.0
"""Within which pages are on disk, on a machine that others use."""
SIGN_BIT = 0x80


@dataclass
class Folder:
    """What FlexKV keeps on disk."""

    path: Path

    def table(self) -> FoundTable:
        folder = open_folder(str(self.path))
        try:
            return read_table(OsFiles(), folder, fingerprint_of(str(self.path)))
        finally:
            os.close(folder)

    def records(self) -> dict[bytes, Record]:
        return {record.key: record for record in self.table().records()}

    def flip(self, record: Record) -> None:
        """Flip a bit of a block, as a bad drive does."""
        self._write(record, bytes([self.block(record)[100] ^ 1]), 100)

    def forge(self, record: Record) -> None:
        """Give a block other numbers, and a record that says that they are right."""
        header = self.table().header
        assert header is not None
        data = bytearray(self.block(record))
        data[3::4] = bytes(byte ^ SIGN_BIT for byte in data[3::4])
        self._write(record, bytes(data))
        checksum = checksum_of(bytes(data), header.seal, record.key)
        entry = table.encode_record(
            record.slot, header.seal, record.key, checksum, record.generation
        )
        with (self.path / TABLE).open("r+b") as file:
            file.seek(table.record_offset(record.slot))
            file.write(entry)

    def block(self, record: Record) -> bytes:
        path, start, size = self._place(record)
        with path.open("rb") as file:
            file.seek(start)
            return file.read(size)

    def _write(self, record: Record, data: bytes, offset: int = 0) -> None:
        path, start, _ = self._place(record)
        with path.open("r+b") as file:
            file.seek(start + offset)
            file.write(data)

    def _place(self, record: Record) -> tuple[Path, int, int]:
        header = self.table().header
        assert header is not None
        size = header.slot_bytes
        slab, place = divmod(record.slot, slabs.slots_per_slab(size))
        return self.path / slabs.slab_name(slab), place * size, size


@dataclass
class Restart:
    """Both servers.

    Attributes:
        expected: tokens that follow each prompt.
        warm: the first server's answers when its own caches were empty again.
        server: the second one, which has answered nothing.
        first_log: all that the first one printed.
    """

    expected: dict[str, list[int]]
    warm: dict[str, Answer]
    server: SglangServer
    first_log: str


def ask(server: SglangServer, name: str) -> Answer:
    return server.generate(PROMPTS[name], **(TENANT if name == "tenant" else {}))


def from_storage(answer: Answer) -> int:
    """Tokens that came from disk."""
    return int((answer.meta["cached_tokens_details"] or {}).get("storage", 0))


def folder_of(root: Path) -> Folder:
    (path,) = (path for path in root.iterdir() if path.is_dir())
    return Folder(path)


def settle(folder: Folder, pages: int) -> dict[bytes, Record]:
    """Wait until so many pages are on disk; returns their records."""
    end = time.monotonic() + SECONDS
    while len(records := folder.records()) < pages:
        assert time.monotonic() < end, f"{len(records)} of {pages} pages are on disk"
        time.sleep(0.05)
    assert len(records) == pages
    return records


@pytest.fixture(scope="module")
def restart(
    tmp_path_factory: pytest.TempPathFactory, model: Path, sglang: Path
) -> Iterator[Restart]:
    root = tmp_path_factory.mktemp("hicache")
    settings = {
        "cpu_cache_gb": 0.05,
        "ssd_cache_gb": 0.05,
        "ssd_cache_dir": str(root / "disk"),
        "ssd_timeout_seconds": SECONDS,  # a slow disk must not look like a miss
    }
    config = dataclasses.replace(hicache_config(model, TINY, settings), forked=True)
    written: dict[str, list[Record]] = {}
    with SglangServer(config, root / "first.log") as first:
        folder = folder_of(root / "disk")
        expected, known = {}, {}
        for number, name in enumerate(NAMES, 1):
            answer = ask(first, name)
            assert answer.cached_tokens == 0, f"{name} is a reference"
            expected[name] = answer.tokens
            now = settle(folder, number * WHOLE_PAGES)
            written[name] = [record for key, record in now.items() if key not in known]
            known = now
        first.flush()
        first.overwrite()
        warm = {name: ask(first, name) for name in NAMES}
        first_log = first.log()
        first.kill()
    for record in written["flipped"]:
        folder.flip(record)
    for record in written["forged"]:
        folder.forge(record)
    with SglangServer(config, root / "second.log") as second:
        yield Restart(expected, warm, second, first_log)


def test_pages_that_left_memory_come_back_from_disk(restart: Restart) -> None:
    for name in NAMES:
        assert restart.warm[name].tokens == restart.expected[name]
        assert from_storage(restart.warm[name]) == WHOLE_PAGES * PAGE_TOKENS


def test_wrong_bytes_would_change_the_tokens(restart: Restart) -> None:
    answer = ask(restart.server, "forged")
    assert from_storage(answer) == WHOLE_PAGES * PAGE_TOKENS
    assert answer.tokens != restart.expected["forged"]


def test_a_server_finds_the_pages_of_one_that_was_killed(restart: Restart) -> None:
    answer = ask(restart.server, "intact")
    assert answer.tokens == restart.expected["intact"]
    assert from_storage(answer) == WHOLE_PAGES * PAGE_TOKENS


def test_a_prefix_is_found_and_the_rest_computed(restart: Restart) -> None:
    prompt = PROMPTS["longer"][:200] + PROMPTS["intact"][:100]
    mixed = restart.server.generate(prompt)
    assert from_storage(mixed) == 200 // PAGE_TOKENS * PAGE_TOKENS
    restart.server.overwrite()
    longer = ask(restart.server, "longer")
    assert longer.tokens == restart.expected["longer"]


def test_flipped_bytes_are_computed_instead(restart: Restart) -> None:
    answer = ask(restart.server, "flipped")
    assert answer.tokens == restart.expected["flipped"]
    assert answer.cached_tokens == 0


@pytest.mark.parametrize("other", [{}, {"extra_key": "tenant B"}], ids=["no tenant", "tenant B"])
def test_a_tenant_does_not_hit_what_another_one_has_stored(
    restart: Restart, other: dict[str, Any]
) -> None:
    answer = restart.server.generate(PROMPTS["tenant"], **other)
    assert answer.cached_tokens == 0
    assert answer.tokens == restart.expected["tenant"]


def test_a_tenant_hits_what_it_has_stored(restart: Restart) -> None:
    answer = ask(restart.server, "tenant")
    assert answer.tokens == restart.expected["tenant"]
    assert from_storage(answer) == WHOLE_PAGES * PAGE_TOKENS


def test_pages_are_counted(restart: Restart) -> None:
    metrics = restart.server.metrics()
    assert "sglang:prefetch_bandwidth_count" in metrics


def test_nothing_went_wrong(restart: Restart) -> None:
    for log in (restart.first_log, restart.server.log()):
        assert "Traceback" not in log
        assert "error in" not in log
