# SPDX-License-Identifier: Apache-2.0
"""Nodes, processes with arenas of their own, share blocks by a folder."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'flexkv[objects]'")

from shared_node import FINGERPRINT, Remote, file_of

from flexkv.tiers.job import Outcome, Result
from flexkv.tiers.objects.object_store import ObjectBlocks, Requests
from flexkv.tiers.objects.open_objects import connect
from flexkv.types.errors import StoreSettingError
from packages.conftest import PATIENCE_SECONDS
from packages.patience import patient_objects

Start = Callable[[], Remote]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "kv"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def start(folder: Path, at_end: ExitStack) -> Start:
    settings = patient_objects(f"file://{folder}")
    return lambda: at_end.enter_context(closing(Remote(settings, {})))


def test_a_node_finds_what_another_has_stored(start: Start, folder: Path) -> None:
    one, other = start(), start()
    one.do("store", "abcd")
    assert other.do("fetch", "abcdef") == "abcd"
    assert other.do("store", "abcde") == "1"  # what is there is not written again
    assert len(list((folder / "epochs").iterdir())) == 1
    one.end()
    other.end()
    assert start().do("fetch", "abcdef") == "abcde"
    assert [path for path in folder.rglob("*") if "#" in path.name] == []


@pytest.mark.parametrize("tear", ["short", "flipped", "empty"])
def test_a_torn_file_is_a_miss_and_is_written_again(start: Start, folder: Path, tear: str) -> None:
    one, other = start(), start()
    one.do("store", "abc")
    file = file_of(folder, "b")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes({"short": data[:-100], "flipped": data, "empty": b""}[tear])
    assert other.do("fetch", "abc") == "a"
    assert other.do("store", "abc") == "1"
    assert start().do("fetch", "abc") == "abc"


def test_a_reader_beside_a_writer_reads_whole_blocks_or_none(folder: Path) -> None:
    writer, reader = (
        ObjectBlocks(Requests(connect(f"file://{folder}", PATIENCE_SECONDS), PATIENCE_SECONDS))
        for _ in range(2)
    )
    size, names = 1 << 20, [f"blocks/{FINGERPRINT}/{i:032x}" for i in range(40)]
    blocks = [memoryview((name.encode() * size)[:size]) for name in names]
    seen: Counter[Result] = Counter()

    def write() -> list[Any]:
        each = zip(names, blocks, strict=True)
        return [writer.put([name], [block]) for name, block in each]

    with ThreadPoolExecutor() as threads:
        written = threads.submit(write)
        while seen[Outcome.DONE] < len(names):
            buffers = [memoryview(bytearray(size)) for _ in names]
            found = reader.get(names, buffers)
            for result, buffer, block in zip(found, buffers, blocks, strict=True):
                assert result is Outcome.MISSING or (result is Outcome.DONE and buffer == block)
            seen = Counter(found)
        assert written.result() == [[Outcome.DONE]] * len(names)
    writer.close()
    reader.close()


def test_a_folder_of_others_is_refused(folder: Path, tmp_path: Path) -> None:
    connect(f"file://{folder}", 1.0)
    for mode in (0o750, 0o705, 0o770):
        folder.chmod(mode)
        with pytest.raises(StoreSettingError, match=r"kv.*allowed: .*mkdir -m 700"):
            connect(f"file://{folder}", 1.0)
    folder.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(StoreSettingError, match="link"):
        connect(f"file://{link}", 1.0)
    with pytest.raises(StoreSettingError, match="missing: No such file"):
        connect(f"file://{tmp_path / 'missing'}", 1.0)
    if os.geteuid() == 0:
        os.chown(folder, 1234, 1234)
        with pytest.raises(StoreSettingError, match="belongs to user 1234"):
            connect(f"file://{folder}", 1.0)
